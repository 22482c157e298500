"""Make glibc's malloc return freed memory to the kernel: mallopt(3), malloc_trim(3)."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h"""
_ARENAS = 2
"""The default is eight per CPU, none of which ever shrinks."""
_TRIM_BYTES = 16 << 20
"""Free memory at the heap's end beyond which free() returns it. With less the reader would lose its blocks after every
sweep, and clearing new pages took a quarter of the daemon's CPU time. The Trimmer returns the rest.
"""
_MMAP_BYTES = 1 << 20
"""Larger blocks are mapped, and unmapped when freed; the reader's are smaller. Unless set, the threshold grows to the
largest block freed, up to 32 MiB.
"""
_PAUSE_SECONDS = 10.0
_BUSY_SHARE = 0.01
"""Of a CPU. An idle daemon uses less."""


class Glibc(Protocol):
    """The functions that are used."""

    def mallopt(self, option: int, value: int, /) -> int: ...

    def malloc_trim(self, pad: int, /) -> int: ...


def glibc() -> Glibc | None:
    """Return None if libc is not glibc."""
    libc = ctypes.CDLL(None)
    return cast("Glibc", libc) if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def limit_arenas(libc: Glibc) -> None:
    """Call this before starting any thread."""
    libc.mallopt(_M_ARENA_MAX, _ARENAS)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


class Trimmer:
    """A thread that periodically returns free pages between blocks in use, which free() never does.

    Each trim takes a few milliseconds, during which threads that allocate may have to wait. So an idle process is
    trimmed once, when it has come to rest.
    """

    def __init__(
        self,
        libc: Glibc,
        pause_seconds: float = _PAUSE_SECONDS,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """cpu_clock: the CPU time of this process, in seconds."""
        self._libc = libc
        self._pause_seconds = pause_seconds
        self._cpu_clock = cpu_clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stapsdtd-trimmer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        used, was_busy = self._cpu_clock(), True
        while not self._stopping.wait(self._pause_seconds):
            before, used = used, self._cpu_clock()
            is_busy = used - before > _BUSY_SHARE * self._pause_seconds
            if is_busy or was_busy:
                self._libc.malloc_trim(0)
            was_busy = is_busy
