"""deploy/seccomp.json: what the service manager allows the unit, as container runtimes are told it.

    .venv/bin/python -m tests.seccomp_profile

writes it anew from systemd/stapsdtd.service, whose sets of system calls the systemd of this host explains. Conditions
on architectures and capabilities, which only Docker and Podman know, are not in it: Kubernetes takes it as well.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import subprocess

from tests.support import ROOT
from tests.units import SERVICE, settings

PROFILE = ROOT / "deploy" / "seccomp.json"

Rule = dict[str, object]

_ALLOW, _REFUSE = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
NAMESPACES = {
    "cgroup": 0x02000000, "ipc": 0x08000000, "net": 0x40000000, "mnt": 0x00020000, "pid": 0x20000000,
    "user": 0x10000000, "uts": 0x04000000, "time": 0x00000080,
}  # fmt: skip
"""CLONE_NEW* of include/uapi/linux/sched.h. Those of clone end where CLONE_NEWTIME is: there it is part of a signal."""
_TIME = NAMESPACES["time"]


def profile() -> dict[str, object]:
    allowed = system_calls(*settings(SERVICE, "SystemCallFilter"))
    (number,) = settings(SERVICE, "SystemCallErrorNumber")
    forbidden = _forbidden_namespaces()
    by_argument: list[Rule] = [
        _rule(["clone"], _masked(forbidden & ~_TIME)),
        _rule(["unshare"], _masked(forbidden)),
        *(_rule(["socket"], _equal(family)) for family in _families()),
    ]
    # its flags are in memory, where no filter sees them; without it, the C library takes clone
    absent: Rule = {"names": ["clone3"], "action": _REFUSE, "errnoRet": errno.ENOSYS}
    # to join others' namespaces is no business of the daemon's
    unconditional = sorted(allowed - {"clone", "clone3", "setns", "socket", "unshare"})
    return {
        "defaultAction": _REFUSE,
        "defaultErrnoRet": getattr(errno, number),
        "syscalls": [_rule(unconditional), *by_argument, absent],
    }


@functools.cache
def system_calls(*words: str) -> frozenset[str]:
    """Expand sets of systemd's, such as @system-service, to the names of system calls, on any architecture."""
    names: set[str] = set()
    for word in words:
        names |= system_calls(*_content(word)) if word.startswith("@") else {word}
    return frozenset(names)


def _content(name: str) -> list[str]:
    command = ["systemd-analyze", "syscall-filter", name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [word for line in lines[1:] if (word := line.strip()) and not word.startswith("#")]


def _forbidden_namespaces() -> int:
    allowed = settings(SERVICE, "RestrictNamespaces")
    return sum(bit for name, bit in NAMESPACES.items() if name not in allowed)


def _families() -> list[int]:
    return sorted(int(getattr(socket, name)) for name in settings(SERVICE, "RestrictAddressFamilies"))


def _rule(names: list[str], *arguments: Rule) -> Rule:
    return {"names": names, "action": _ALLOW} | ({"args": list(arguments)} if arguments else {})


def _equal(value: int) -> Rule:
    return {"index": 0, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(mask: int) -> Rule:
    """That the first argument has none of these bits."""
    return {"index": 0, "value": mask, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}


def written() -> str:
    return json.dumps(profile(), indent=2) + os.linesep


if __name__ == "__main__":
    PROFILE.write_text(written())
