"""Determine the user that may trace a process without capabilities (ptrace(2)); as `owner_of` in bpf/filter.h."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable

_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704
"""ioctl_nsfs(2)."""
_DEAD = ([b"Z"], [b"X"])


def owner_of(pid: int, proc: str = "/proc") -> int | None:
    """Return the user that owns the process outright; None if no user does, or it is gone."""
    return _owner(f"{proc}/{pid}", None)


def belonging(pids: Iterable[int], users: frozenset[int]) -> frozenset[int]:
    """Return the processes that belong to any of these users."""
    return frozenset(pid for pid in pids if belongs(pid, users))


def belongs(pid: int, users: frozenset[int]) -> bool:
    """Report whether a process belongs to any of these users; cheaper than owner_of."""
    return _owner(f"/proc/{pid}", users) is not None


def _owner(process: str, among: frozenset[int] | None) -> int | None:
    """Both reads use one descriptor, and so are of one process even if its pid is reused. process: its folder."""
    try:
        with open(f"{process}/status", "rb", buffering=0) as status:
            # task_dump_owner in fs/proc/base.c: root's, unlike /proc/PID itself, if the process is not dumpable, such
            # as a setuid program, one whose file is unreadable, or one that opted out with PR_SET_DUMPABLE
            file_owner = os.fstat(status.fileno()).st_uid
            if among is not None and file_owner not in among and os.stat(process).st_uid not in among:
                return None
            lines = status.readall()
        values = {name: fields.split() for name, _, fields in (line.partition(b":") for line in lines.split(b"\n"))}
        if values.get(b"State", [])[:1] in _DEAD and int(*values.get(b"Threads", [b"1"])) > 1:
            # other threads outlived the main one; its status is root's, since it has no memory that tells
            threads = (f"{process}/task/{thread}" for thread in os.listdir(f"{process}/task"))
            return next((owner for each in threads if (owner := _owner(each, among)) is not None), None)
    except OSError:
        return None
    if among is not None and file_owner not in among:
        return None
    # real, effective, saved; not file system
    users, groups = values.get(b"Uid", [])[:3], values.get(b"Gid", [])[:3]
    if len(set(users)) != 1 or len(set(groups)) != 1 or int(users[0]) != file_owner:
        return None
    if file_owner and (_is_privileged(process, values.get(b"CapPrm", [])) or _is_in_roots_namespace(process)):
        return None
    return file_owner


def _is_privileged(process: str, permitted: list[bytes]) -> bool:
    """Report whether a process has capabilities on this host that its user lacks."""
    if permitted and not int(permitted[0], 16):
        return False
    try:
        # capabilities in another user namespace count only there
        return os.readlink(f"{process}/ns/user") == os.readlink("/proc/self/ns/user")
    except OSError:
        return True


def _is_in_roots_namespace(process: str) -> bool:
    """Report whether a process is in a user namespace that root created, such as that of a service with PrivateUsers=.

    Users may not trace processes in such a namespace. An ordinary user's namespace holds only that user's processes and
    those of subordinate ids, which belong to nobody else.
    """
    try:
        host = os.stat("/proc/self/ns/user").st_ino
        namespace = f"{process}/ns/user"
        return os.stat(namespace).st_ino != host and _creator_of(namespace, host) == 0
    except OSError:
        return True


def _creator_of(namespace: str, host: int) -> int:
    """Return the user that created the outermost namespace, below the host's, around this one. Raises OSError."""
    current = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.fstat(parent := fcntl.ioctl(current, _NS_GET_PARENT)).st_ino != host:
            os.close(current)
            current = parent
        os.close(parent)
        user = bytearray(4)
        fcntl.ioctl(current, _NS_GET_OWNER_UID, user)
        return int.from_bytes(user, sys.byteorder)
    finally:
        os.close(current)
