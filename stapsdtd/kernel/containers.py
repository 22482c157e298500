r"""Recognize containers by the names that engines give their cgroups.

    0::/system.slice/docker-<64 hex digits>.scope                                  Docker; /docker/<64 hex digits> too
    0::/kubepods.slice/…/cri-containerd-<64 hex digits>.scope                      Kubernetes with containerd
    0::/machine.slice/libpod-<64 hex digits>.scope/container                       Podman
    0::/lxc.payload.web                                                            LXC
    0::/machine.slice/machine-my\x2dname.scope/payload                             systemd-nspawn
    0::/machine.slice/my-name.scope/payload                                        the same with --register=no

Names are not authenticated: anyone who controls part of the cgroup tree can imitate a container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MIN_PREFIX = 12
_ID = re.compile(r"[0-9a-f]{64}")
# monitors of containers have cgroups with other prefixes, such as libpod-conmon
_BY_ID = re.compile(
    rf"(?:(?:docker|cri-containerd|crio|nerdctl|libpod|libpod-payload)-)?({_ID.pattern})(?:\.scope)?"
    rf"|[^:]+:(?:docker|cri-containerd|crio|nerdctl|libpod):({_ID.pattern})"
)
_MACHINE = re.compile(
    r"machine-(?!qemu\\x2d)(.+)\.scope|systemd-nspawn@(.+)\.service|(?!machine-|libpod-)([A-Za-z0-9].*)\.scope"
)
_LXC = "lxc.payload."
_LXC_PARENTS = frozenset({"lxc", "lxc.payload"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_REMOVED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Placement:
    """A process's path in the unified hierarchy and its container's id or name; each empty if there is none."""

    cgroup: str
    container: str


def placement(lines: bytes) -> Placement:
    """Parse /proc/PID/cgroup. Where the unified hierarchy shows no container, those of version 1 may."""
    unified, others = "", []
    for line in os.fsdecode(lines).split("\n"):
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        path = path.removesuffix(_REMOVED)
        if (hierarchy, controllers) == ("0", ""):
            unified = path
        else:
            others.append(path)
    innermost = (chain[-1] for path in [unified, *others] if (chain := containers_in(path)))
    return Placement(unified, next(innermost, ""))


def containers_in(path: str) -> list[str]:
    """Return the containers along a cgroup's path, outermost first."""
    names = path.split("/")
    containers = (_container(parent, name) for parent, name in pairwise(names))
    return [container for container in containers if container is not None]


def cgroups_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """Map each container to its topmost cgroups among a hierarchy's paths."""
    paths_of: dict[str, list[str]] = {}
    for path in paths:
        above, name = os.path.split(path)
        container = _container(os.path.basename(above), name)
        if container is not None and container not in containers_in(above):
            paths_of.setdefault(container, []).append(path)
    return paths_of


def matching(wanted: str, containers: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the containers with this name or id, or whose id begins with this if it has at least 12 digits."""
    is_prefix = len(wanted) >= MIN_PREFIX
    return sorted(
        container
        for container in containers
        if container == wanted or (is_prefix and _ID.fullmatch(container) and container.startswith(wanted))
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
    return _valid(_unescaped(next(filter(None, machine.groups())))) if machine else None


def _valid(name: str) -> str | None:
    return name if _NAME.fullmatch(name) else None


def _unescaped(name: str) -> str:
    """Undo systemd's escapes of characters that unit names cannot contain."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name)
