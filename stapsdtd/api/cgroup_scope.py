"""From the cgroups and containers that a request names to where they are. Looking is slow where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel import cgroups, containers
from stapsdtd.query.expression import Cgroup
from stapsdtd.query.parse import no_cgroup

_MOST = 64
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Members:
    """Processes by where they run: in one cgroup of each kind, or below it. Who they are changes."""

    kinds: tuple[tuple[Cgroup, ...], ...]

    def pids(self) -> frozenset[int]:
        found = ([cgroups.processes(each.path) for each in kind] for kind in self.kinds)
        return frozenset.intersection(*(frozenset().union(*pids) for pids in found))


def members(containers_named: Sequence[str], cgroups_named: Sequence[str]) -> Members | None:
    """Answer None where nothing is named. Raises as `of_containers` does."""
    kinds = of_containers("containers", containers_named), of_cgroups("cgroups", cgroups_named)
    return Members(tuple(filter(None, kinds))) if any(kinds) else None


def of_cgroups(field: str, paths: Sequence[str]) -> tuple[Cgroup, ...]:
    """Raises InvalidArgumentError, and KernelFeatureError on a host without the unified hierarchy."""
    _check_number(field, paths)
    found = [(path, cgroups.find(path)) for path in paths]
    missing = [path for path, place in found if place is None]
    if missing:
        raise InvalidArgumentError(field, no_cgroup(missing[0]))
    return tuple(Cgroup(path, place.id, place.level) for path, place in found if place is not None)


def of_containers(field: str, wanted: Sequence[str]) -> tuple[Cgroup, ...]:
    """Answer all cgroups that are one of these containers. Raises as `of_cgroups` does."""
    _check_number(field, wanted)
    known = containers.cgroups_of(cgroups.all_paths()) if wanted else {}
    found: dict[Cgroup, None] = {}
    for each in dict.fromkeys(wanted):
        meant = containers.matching(each, known)
        if len(meant) > 1:
            raise InvalidArgumentError(field, f"{each!r} may be {' or '.join(meant[:3])}; write more of it")
        # each container that is named has to restrict the events, so one that goes meanwhile is an error too
        places = [(path, cgroups.find(path)) for container in meant for path in known[container]]
        living = [Cgroup(path, place.id, place.level) for path, place in places if place is not None]
        if not living:
            raise InvalidArgumentError(field, _no_container(each))
        found.update(dict.fromkeys(living))
    return tuple(found)


def _check_number(field: str, named: Sequence[str]) -> None:
    if len(named) > _MOST:
        raise InvalidArgumentError(field, f"there are {len(named)}, more than the {_MOST} allowed")


def _no_container(wanted: str) -> str:
    shown = wanted if len(wanted) <= _SHOWN else wanted[:_SHOWN] + "…"
    return (
        f"no cgroup of the unified hierarchy is named after a container {shown!r}; write its whole name, or at least "
        f"{containers.MIN_PREFIX} digits of its id"
    )
