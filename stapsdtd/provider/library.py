"""Writes a provider's image to a memfd and maps it, as the dynamic loader would.

The loader itself is not used: it identifies a library by its path, and would return an older one whose descriptor
number was reused; it takes locks, which a fork may leave held; and it unloads on request even if a thread is inside.
Here, references to the mapping keep it alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import MAP_PRIVATE, PROT_EXEC, PROT_READ, PROT_WRITE

from stapsdtd.provider.argtypes import MAX_ARGUMENTS
from stapsdtd.provider.elf64 import PF_W, PF_X
from stapsdtd.provider.image import Image

MFD_NOEXEC_SEAL = 0x08  # Linux 6.3; required if vm.memfd_noexec is 2
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

# PYFUNCTYPE keeps the GIL: a stub takes less time than releasing it. c_void_p accepts any 64 bits, and bytes.
_STUB_TYPES = tuple(ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * count) for count in range(MAX_ARGUMENTS + 1))


@dataclass(frozen=True)
class Site:
    """A probe in memory. Its reference to the mapping keeps the semaphore and the stub valid.

    semaphore: nonzero while the probe is traced in this process.
    stub: takes the probe's number of arguments: integers of at most 64 bits, or bytes, whose address is passed.
    """

    semaphore: ctypes.c_uint16
    stub: Callable[..., None]
    mapping: object


UNLOADED = Site(ctypes.c_uint16(0), lambda *_: None, None)
"""The site of a probe that is not loaded, which is never enabled."""


def load(provider: str, image: Image, arities: Sequence[int]) -> tuple[Site, ...]:
    """Map the image and return its sites, in order. arities: the number of arguments of each.

    The descriptor stays open as long as a site is referenced: bcc and bpftrace look for the memfd in /proc/PID/fd.
    Raises OSError if the kernel refuses the memfd or the mapping.
    """
    fd = _memfd(f"libstapsdt:{provider}", image.content)
    try:
        mapping = _map(fd, image)
    except OSError:
        os.close(fd)
        raise
    start = ctypes.addressof(mapping)
    return tuple(
        Site(ctypes.c_uint16.from_buffer(mapping, semaphore), _STUB_TYPES[arity](start + stub), mapping)
        for stub, semaphore, arity in zip(image.stubs, image.semaphores, arities)
    )


def _memfd(name: str, content: bytes) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        # Otherwise anyone who opens /proc/PID/fd/N could truncate the mapped file.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, image: Image) -> ctypes.Array[ctypes.c_char]:
    """Return the mapped bytes. They are unmapped, and fd is closed, once nothing refers to them."""
    last = image.segments[-1]
    size = last.offset + last.size
    start = _mmap(None, size, PROT_READ, fd, 0)
    try:
        for segment in image.segments[1:]:
            rights = PROT_READ
            rights |= PROT_WRITE if segment.flags & PF_W else 0
            rights |= PROT_EXEC if segment.flags & PF_X else 0
            _mmap(start + segment.offset, segment.size, rights, fd, segment.offset)
    except OSError:
        _libc.munmap(start, size)
        raise
    mapping = (ctypes.c_char * size).from_address(start)
    weakref.finalize(mapping, _release, start, size, fd, _identity(fd)).atexit = False
    return mapping


def _mmap(address: int | None, size: int, rights: int, fd: int, offset: int) -> int:
    flags = MAP_PRIVATE if address is None else MAP_PRIVATE | MAP_FIXED
    start: int = _libc.mmap(address, size, rights, flags, fd, offset)
    if start == MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of a memfd: {os.strerror(error)}")
    return start


def _release(start: int, size: int, fd: int, identity: tuple[int, int]) -> None:
    _libc.munmap(start, size)
    # A program that daemonizes closes all descriptors, so the number may have been reused.
    with contextlib.suppress(OSError):
        if _identity(fd) == identity:
            os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
