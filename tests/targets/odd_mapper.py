"""Maps executable what is no file of a program: devices, rings, memory without a name. It says which it could."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

PROT, PAGE = mmap.PROT_READ | mmap.PROT_EXEC, 4096
MEMFD_SECRET, PERF_EVENT_OPEN = 447, 298
SHM_EXEC = 0o100000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
FAILED = ctypes.c_void_p(-1).value


def mapped(descriptor: int, flags: int = mmap.MAP_SHARED) -> bool:
    return descriptor >= 0 and libc.mmap(None, PAGE, PROT, flags, descriptor, 0) != FAILED


def perf_ring() -> bool:
    # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY, of this process alone
    attributes = (ctypes.c_uint32 * 32)(1, 128, 9)
    return mapped(libc.syscall(PERF_EVENT_OPEN, attributes, 0, -1, -1, 0))


def shared_memory() -> bool:
    number = libc.shmget(0, PAGE, 0o1700)
    address = libc.shmat(number, None, SHM_EXEC)
    libc.shmctl(number, 0, None)
    return bool(address != FAILED)


def secret() -> bool:
    descriptor = libc.syscall(MEMFD_SECRET, 0)
    if descriptor < 0:
        return False
    os.ftruncate(descriptor, PAGE)
    return mapped(descriptor)


def code() -> bool:
    """A copy of a program in memory that is no file's."""
    memory = mmap.mmap(-1, os.path.getsize(sys.argv[1]), mmap.MAP_PRIVATE, PROT | mmap.PROT_WRITE)
    with open(sys.argv[1], "rb") as file:
        memory.write(file.read())
    held.append(memory)
    return True


held: list[mmap.mmap] = []
done = {
    "zero": mapped(os.open("/dev/zero", os.O_RDWR), mmap.MAP_PRIVATE),
    "shared zero": mapped(os.open("/dev/zero", os.O_RDWR)),
    "perf": perf_ring(),
    "shared memory": shared_memory(),
    "secret": secret(),
    "code": code(),
}
print("ready", flush=True)
for _ in sys.stdin:
    print(",".join(name for name, is_done in done.items() if is_done), "0", flush=True)
