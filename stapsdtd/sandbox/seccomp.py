"""A filter of system calls: what an interpreter needs that reads descriptors it was given, computes and answers.

    load arch ──► not this machine's: kill
    load nr   ──► x32's: kill; in the list: allow; mmap, mprotect: allow without PROT_EXEC
                  anything else: EPERM

EPERM, since a call that Python makes without need (an import, a stat) then costs at most the file, with an error that
names it. The numbers are the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping
from typing import NamedTuple

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K of include/uapi/linux/bpf_common.h."""

_NR_AT, _ARCH_AT, _THIRD_ARGUMENT_AT = 0, 4, 32
"""In struct seccomp_data, of which little-endian machines have an argument's lower half first."""

_PROT_EXEC = 4
_X32_BIT = 0x40000000

_X86_64 = {
    "read": 0, "close": 3, "fstat": 5, "lseek": 8, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "sched_yield": 24, "mremap": 25, "madvise": 28, "sendto": 44, "recvfrom": 45,
    "sendmsg": 46, "recvmsg": 47, "exit": 60, "futex": 202, "restart_syscall": 219, "clock_gettime": 228,
    "exit_group": 231, "getrandom": 318,
    # Not Python's: the kernel's own uprobes make these when somebody traces the interpreter, and until Linux 6.14 and
    # 6.18 a filter saw them.
    "uretprobe": 335, "uprobe": 336,
}  # fmt: skip
_AARCH64 = {
    "close": 57, "lseek": 62, "read": 63, "pread64": 67, "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98,
    "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "sendto": 206, "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "brk": 214, "munmap": 215,
    "mremap": 216, "madvise": 233, "getrandom": 278,
}  # fmt: skip


class _Machine(NamedTuple):
    audit_arch: int
    allowed: Mapping[str, int]
    mmap: int
    mprotect: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86_64, mmap=9, mprotect=10),
    "aarch64": _Machine(0xC00000B7, _AARCH64, mmap=222, mprotect=226),
}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a struct sock_filter; jumps are over so many instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program(machine: str) -> bytes | None:
    """The filter, None where the machine's numbers are not known."""
    known = _MACHINES.get(machine)
    if known is None:
        return None
    refuse = _RET_ERRNO | errno.EPERM
    wx_check = [
        _instruction(_LOAD_WORD, _THIRD_ARGUMENT_AT),
        _instruction(_JUMP_ANY_BIT, _PROT_EXEC, 0, 1),
        _instruction(_RETURN, refuse),
        _instruction(_RETURN, _RET_ALLOW),
    ]
    lines = [
        _instruction(_LOAD_WORD, _ARCH_AT),
        _instruction(_JUMP_EQUAL, known.audit_arch, 1, 0),
        _instruction(_RETURN, _RET_KILL_PROCESS),
        _instruction(_LOAD_WORD, _NR_AT),
        _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _instruction(_RETURN, _RET_KILL_PROCESS),
    ]
    for number in known.allowed.values():
        lines += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _RET_ALLOW)]
    lines += [_instruction(_JUMP_EQUAL, known.mmap, 1, 0), _instruction(_JUMP_EQUAL, known.mprotect, 0, len(wx_check))]
    return b"".join([*lines, *wx_check, _instruction(_RETURN, refuse)])


def install(libc: ctypes.CDLL) -> bool:
    """Filter from now on; return whether that was possible. The process must have no_new_privs."""
    code = program(platform.machine())
    if code is None:
        return False
    filter_ = _Program(len(code) // 8, code)
    failed: int = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0)
    return not failed
