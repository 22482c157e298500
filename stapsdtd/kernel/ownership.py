"""Whose a process is, by the rules of ptrace(2) for who has no capabilities; as `owner_of` in bpf/filter.h."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable

_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704
"""ioctl_nsfs(2)."""


def owner_of(pid: int) -> int | None:
    """The user who may look into a process; None where that is nobody, or it is gone."""
    return _owner(pid, None)


def belonging(pids: Iterable[int], users: frozenset[int]) -> frozenset[int]:
    """Those of some processes that belong to some users."""
    return frozenset(pid for pid in pids if belongs(pid, users))


def belongs(pid: int, users: frozenset[int]) -> bool:
    """Whether a process belongs to any of these users; sooner answered than whose it is."""
    return _owner(pid, users) is not None


def _owner(pid: int, among: frozenset[int] | None) -> int | None:
    """One descriptor leads to one process, whoever gets its number later."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
            # as task_dump_owner in fs/proc/base.c has it, and unlike /proc/PID itself: root's where the process is not
            # dumpable, which are a setuid program, one whose file cannot be read, one that asked to be left alone
            shown = os.fstat(status.fileno()).st_uid
            if among is not None and shown not in among:
                return None
            lines = status.readall()
    except OSError:
        return None
    found = {name: fields.split() for name, _, fields in (line.partition(b":") for line in lines.split(b"\n"))}
    # real, effective, saved, file system
    users, groups = found.get(b"Uid", [])[:3], found.get(b"Gid", [])[:3]
    if len(set(users)) != 1 or len(set(groups)) != 1 or int(users[0]) != shown:
        return None
    if shown and (_is_privileged(pid, found.get(b"CapPrm", [])) or _is_in_roots_namespace(pid)):
        return None
    return shown


def _is_privileged(pid: int, permitted: list[bytes]) -> bool:
    """Whether a user's process can do on this host what its user cannot, by capabilities that it was started with."""
    if permitted and not int(permitted[0], 16):
        return False
    try:
        # those of a user namespace count only there
        return os.readlink(f"/proc/{pid}/ns/user") == os.readlink("/proc/self/ns/user")
    except OSError:
        return True


def _is_in_roots_namespace(pid: int) -> bool:
    """Whether it is in a user namespace that root made, such as a service's with PrivateUsers=.

    Its users may not trace what is in it. An ordinary user's namespace holds that user's processes, and those of
    subordinate ids, who are nobody else.
    """
    try:
        host = os.stat("/proc/self/ns/user").st_ino
        namespace = f"/proc/{pid}/ns/user"
        return os.stat(namespace).st_ino != host and _maker_of(namespace, host) == 0
    except OSError:
        return True


def _maker_of(namespace: str, host: int) -> int:
    """Who made the outermost of the namespaces around one, below the host's. Raises OSError."""
    here = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.fstat(parent := fcntl.ioctl(here, _NS_GET_PARENT)).st_ino != host:
            os.close(here)
            here = parent
        os.close(parent)
        user = bytearray(4)
        fcntl.ioctl(here, _NS_GET_OWNER_UID, user)
        return int.from_bytes(user, sys.byteorder)
    finally:
        os.close(here)
