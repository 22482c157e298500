r"""Containers, by how engines name the cgroups that they make.

    0::/system.slice/docker-<64 hex digits>.scope                                  Docker; /docker/<64 hex digits> too
    0::/kubepods.slice/…/cri-containerd-<64 hex digits>.scope                      Kubernetes with containerd
    0::/machine.slice/libpod-<64 hex digits>.scope/container                       Podman
    0::/lxc.payload.web                                                            LXC
    0::/machine.slice/machine-my\x2dname.scope/payload                             systemd-nspawn

A name is a label and no proof: whoever owns a part of the hierarchy may name a cgroup there like any container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MIN_PREFIX = 12
_ID = re.compile(r"[0-9a-f]{64}")
# what looks after a container has a cgroup with another prefix, such as libpod-conmon
_BY_ID = re.compile(
    rf"(?:(?:docker|cri-containerd|crio|nerdctl|libpod|libpod-payload)-)?({_ID.pattern})(?:\.scope)?"
    rf"|[^:]+:(?:docker|cri-containerd|crio|nerdctl|libpod):({_ID.pattern})"
)
_MACHINE = re.compile(r"machine-(?!qemu\\x2d)(.+)\.scope|systemd-nspawn@(.+)\.service")
_LXC = "lxc.payload."
_LXC_PARENTS = frozenset({"lxc", "lxc.payload"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_REMOVED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a process runs: its path in the unified hierarchy and its container's id or name, empty for none."""

    cgroup: str
    container: str


def placement(lines: bytes) -> Placement:
    """Read /proc/PID/cgroup. The older hierarchies tell the container where the unified one does not."""
    unified, others = "", []
    for line in os.fsdecode(lines).split("\n"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        path = path.removesuffix(_REMOVED)
        if (number, controllers) == ("0", ""):
            unified = path
        else:
            others.append(path)
    found = (chain[-1] for path in [unified, *others] if (chain := containers_in(path)))
    return Placement(unified, next(found, ""))


def containers_in(path: str) -> list[str]:
    """Answer the containers that a cgroup's path leads through, the innermost last."""
    names = path.split("/")
    found = (_container(parent, name) for parent, name in pairwise(names))
    return [container for container in found if container is not None]


def cgroups_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """Answer, of a hierarchy's paths, those that make each container; what is below one of them is not told again."""
    found: dict[str, list[str]] = {}
    for path in paths:
        above, name = os.path.split(path)
        container = _container(os.path.basename(above), name)
        if container is not None and container not in containers_in(above):
            found.setdefault(container, []).append(path)
    return found


def meant(wanted: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Answer the containers whose name or id, or at least 12 digits of it, this is."""
    is_long = len(wanted) >= MIN_PREFIX
    return sorted(
        each for each in known if each == wanted or (is_long and _ID.fullmatch(each) and each.startswith(wanted))
    )


def _container(parent: str, name: str) -> str | None:
    by_id = _BY_ID.fullmatch(name)
    if by_id:
        return by_id[1] or by_id[2]
    if parent in _LXC_PARENTS:
        return _valid(name)
    if name.startswith(_LXC):
        return _valid(name.removeprefix(_LXC))
    machine = _MACHINE.fullmatch(name) if parent == "machine.slice" else None
    return _valid(_unescaped(machine[1] or machine[2])) if machine else None


def _valid(name: str) -> str | None:
    return name if _NAME.fullmatch(name) else None


def _unescaped(name: str) -> str:
    """Undo what systemd does to characters that a unit's name must not have."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name)
