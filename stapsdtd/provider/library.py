"""A provider's image in memory: written to a memfd and mapped as the dynamic loader would.

The loader itself is left out on purpose. It knows a library by its path and would hand out an older one whose
descriptor number came back; it takes locks, which a fork may leave held; and it unloads when told to, be a
thread inside or not. Here the mapping lives as long as anything that points into it, by reference count.
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

MFD_NOEXEC_SEAL = 0x08  # Linux 6.3; where vm.memfd_noexec is 2 no memfd is made without it
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

# PYFUNCTYPE keeps the GIL: a stub takes less time than giving it away. c_void_p takes any 64 bits, and bytes.
_STUB_TYPES = tuple(ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * count) for count in range(MAX_ARGUMENTS + 1))


@dataclass(frozen=True, slots=True)
class Site:
    """A probe's place in memory. Who holds it may read the semaphore and call the stub; mapping sees to that.

    semaphore: not 0 while the probe is traced in this process.
    stub: takes the probe's number of arguments; an int of at most 64 bits, or bytes to pass their address.
    """

    semaphore: ctypes.c_uint16
    stub: Callable[..., None]
    mapping: object


UNLOADED = Site(ctypes.c_uint16(0), lambda *_: None, None)
"""What a probe has that is in no library: never enabled."""


def load(provider: str, image: Image, arities: Sequence[int]) -> tuple[Site, ...]:
    """Map the image, and return its sites in their order; arities are the numbers of their arguments.

    The descriptor stays open until no site is left: bcc and bpftrace look for a memfd in /proc/PID/fd.
    Raises OSError where the kernel refuses the memfd or the mapping.
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
        for stub, semaphore, arity in zip(image.stubs, image.semaphores, arities, strict=True)
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
        # Whoever opens /proc/PID/fd/N cannot truncate what is mapped.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, image: Image) -> ctypes.Array[ctypes.c_char]:
    """The mapped bytes. Once nothing refers to them they are unmapped, and fd is closed."""
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
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of a memfd: {os.strerror(number)}")
    return start


def _release(start: int, size: int, fd: int, identity: tuple[int, int]) -> None:
    _libc.munmap(start, size)
    # A program that becomes a daemon closes every descriptor; the number may be somebody else's by now.
    with contextlib.suppress(OSError):
        if _identity(fd) == identity:
            os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
