"""Whose a process is, by the rules of ptrace(2) for who has no capabilities; as `owner_of` in bpf/stapsdt.bpf.c."""

from __future__ import annotations

import os
from collections.abc import Iterable


def owner_of(pid: int) -> int | None:
    """The user who may look into a process; None where that is nobody, or it is gone.

    /proc/PID belongs to the process's user, and to root where the process is not dumpable: a setuid program, one whose
    file cannot be read, one that asked not to be looked into (task_dump_owner in fs/proc/base.c).
    """
    try:
        shown = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/status", "rb") as lines:
            ids = {name: fields.split() for name, _, fields in (line.partition(b":") for line in lines)}
    except OSError:
        return None
    # real, effective, saved, file system
    users, groups = ids.get(b"Uid", [])[:3], ids.get(b"Gid", [])[:3]
    if len(set(users)) != 1 or len(set(groups)) != 1:
        return None
    owner = int(users[0])
    return owner if shown == owner else None


def belonging(pids: Iterable[int], users: frozenset[int]) -> frozenset[int]:
    """Those of some processes that belong to some users."""
    return frozenset(pid for pid in pids if owner_of(pid) in users)
