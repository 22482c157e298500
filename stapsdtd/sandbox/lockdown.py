"""Giving up, for good, all that a process may do: first what a zygote never needs, then what a worker never needs.

Each function returns which measures this host did not allow; what every host allows raises OSError where it fails. The
structures and numbers are those of include/uapi/linux/{prctl,capability,landlock,sched}.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from enum import Flag, auto

from stapsdtd.sandbox import seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x04000000, 0x08000000, 0x10000000, 0x40000000

# The same on all machines.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many of the lowest bits a version of Landlock knows (Documentation/userspace-api/landlock.rst)."""
_LANDLOCK_MOST_FILE_RIGHTS = 16
_LANDLOCK_NET, _LANDLOCK_SCOPE = 3, 3
"""TCP's bind and connect, since version 4; abstract sockets and signals, since version 6."""

_MORE_MEMORY = 512 << 20
"""Beyond what the interpreter has. A file with 400,000 notes takes 200 MiB."""

_CPU_SECONDS = 60
"""Of a worker's life, in case that nobody watches it any more; the daemon's deadline is far shorter."""

_DESCRIPTORS = 16

_libc = ctypes.CDLL(None, use_errno=True)


class Measure(Flag):
    """What some hosts do not allow."""

    USER = auto()
    CAPABILITY_BOUND = auto()
    NAMESPACES = auto()
    LANDLOCK = auto()
    SECCOMP = auto()

    @classmethod
    def none(cls) -> Measure:
        return cls(0)


def drop_rights(user: int, group: int) -> Measure:
    """Become another user, where this one may, without a capability, a network or a file to open."""
    missing = Measure.none()
    namespaces = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    is_apart = not _libc.unshare(namespaces)
    is_bounded = _drop_bound()
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
        except PermissionError:
            # root without CAP_SETUID and CAP_SETGID
            missing |= Measure.USER
    if not is_apart:
        # a user namespace gives them to those without CAP_SYS_ADMIN too; last, since within it no user can be changed,
        # and with another bound, since it begins with all capabilities over itself
        if _libc.unshare(_CLONE_NEWUSER | namespaces):
            missing |= Measure.NAMESPACES
        else:
            is_bounded = _drop_bound()
    if not is_bounded:
        missing |= Measure.CAPABILITY_BOUND
    _clear_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # after the change of user, which resets it; and nobody else of that user can look into it or trace it
    _prctl(_PR_SET_DUMPABLE, 0)
    if not _restrict_files():
        missing |= Measure.LANDLOCK
    return missing


def confine(parent: int, had_bytes: int) -> Measure:
    """Live no longer than the parent, in little memory, and without most system calls.

    The process has dropped its rights, and before that had so much address space.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the parent is gone")
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, had_bytes + _MORE_MEMORY),
    ):
        # a lower limit that somebody else set stays
        _, most = resource.getrlimit(what)
        lowest = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (lowest, lowest))
    return Measure.none() if seccomp.install(_libc) else Measure.SECCOMP


def address_space() -> int:
    """How much of it this process has, in bytes; a process that dropped its rights cannot ask."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0):
        raise _failed("prctl")


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _drop_bound() -> bool:
    """Return whether no capability can be had by executing a program any more."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            # otherwise EINVAL, at the end of the list
            return ctypes.get_errno() != errno.EPERM
    return True


def _clear_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise _failed("capset")
    with contextlib.suppress(OSError):
        # the ambient ones went with the permitted ones since Linux 4.3; this says so
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def _restrict_files() -> bool:
    """Deny every right to files that Landlock knows here, by a set without rules; return whether there is Landlock."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return False
    files = (1 << _LANDLOCK_FILE_RIGHTS.get(version, _LANDLOCK_MOST_FILE_RIGHTS)) - 1
    attributes = [files, *([_LANDLOCK_NET] if version >= 4 else []), *([_LANDLOCK_SCOPE] if version >= 6 else [])]
    raw = (ctypes.c_uint64 * len(attributes))(*attributes)
    descriptor = _libc.syscall(_LANDLOCK_CREATE_RULESET, raw, ctypes.c_size_t(ctypes.sizeof(raw)), 0)
    if descriptor < 0:
        return False
    try:
        return not _libc.syscall(_LANDLOCK_RESTRICT_SELF, descriptor, 0)
    finally:
        os.close(descriptor)
