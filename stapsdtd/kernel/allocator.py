"""glibc's malloc, which keeps what its threads once needed unless it is told otherwise: mallopt(3), malloc_trim(3)."""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol, cast

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h"""
_ARENAS = 2
"""By default there are eight for each CPU, and each stays as large as it ever was."""
_KEPT_BYTES = 1 << 20
_MAPPED_BYTES = 1 << 20
"""Larger blocks are mapped, and go back when they are freed. Unset, this grows to what was freed, up to 32 MiB. A sweep
has smaller ones, so that the kernel need not clear them each time.
"""
_PAUSE_SECONDS = 30.0


class Glibc(Protocol):
    """What is called of it."""

    def mallopt(self, option: int, value: int, /) -> int: ...

    def malloc_trim(self, pad: int, /) -> int: ...


def glibc() -> Glibc | None:
    """None where libc is another one, which is left as it is."""
    libc = ctypes.CDLL(None)
    return cast("Glibc", libc) if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def bound(libc: Glibc) -> None:
    """Have few arenas; to be called before there are threads."""
    libc.mallopt(_M_ARENA_MAX, _ARENAS)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class Trimmer:
    """A thread that gives back, every now and then, what is free between blocks in use: free() never does.

    Each time takes some milliseconds, in which another thread that allocates may have to wait.
    """

    def __init__(self, libc: Glibc, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._libc = libc
        self._pause_seconds = pause_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stapsdtd-trimmer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_seconds):
            self._libc.malloc_trim(0)
