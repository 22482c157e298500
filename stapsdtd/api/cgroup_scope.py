"""Finds the cgroups and containers that a request names. This is slow on a host with many cgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stapsdtd.errors import InvalidArgumentError, about
from stapsdtd.kernel import container_names, containers
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.expression import Cgroup
from stapsdtd.query.nodes import no_cgroup

NamesOf = Callable[[Iterable[str]], Mapping[str, str]]
"""Maps ids of containers to the names that engines gave them."""

_MAX_NAMES = 64
_MAX_SHOWN_CHARACTERS = 100
_MAX_SHOWN_MATCHES = 8


class Hierarchy(Protocol):
    """A hierarchy of cgroups, such as `kernel.cgroups`. Each function raises KernelFeatureError if there is none."""

    def find(self, path: str) -> CgroupInfo | None: ...

    def all_paths(self) -> Iterator[str]: ...

    def processes(self, path: str) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class Members:
    """The processes in or below at least one cgroup of each group, which may change at any time."""

    hierarchy: Hierarchy
    groups: tuple[tuple[Cgroup, ...], ...]

    def pids(self) -> frozenset[int]:
        pids_by_group = ([self.hierarchy.processes(cgroup.path) for cgroup in group] for group in self.groups)
        return frozenset.intersection(*(frozenset().union(*pids) for pids in pids_by_group))


def members(
    hierarchy: Hierarchy, names_of: NamesOf | None, given_names: Sequence[str], cgroup_paths: Sequence[str]
) -> Members | None:
    """Return None if no names are given. Raises as `of_containers` does."""
    groups = (
        of_containers(hierarchy, names_of, "containers", given_names),
        of_cgroups(hierarchy, "cgroups", cgroup_paths),
    )
    return Members(hierarchy, tuple(filter(None, groups))) if any(groups) else None


def of_cgroups(hierarchy: Hierarchy, field: str, given: Sequence[str]) -> tuple[Cgroup, ...]:
    """Return the cgroups with these paths, or names such as `postgresql.service`.

    Raises InvalidArgumentError, and KernelFeatureError on a host without the unified hierarchy.
    """
    _check_count(field, given)
    with about(field):
        paths = [each if "/" in each or not each else _path_of(hierarchy, field, each) for each in given]
        locations = [(path, hierarchy.find(path)) for path in paths]
    missing = [(name, path) for name, (path, location) in zip(given, locations, strict=True) if location is None]
    if missing:
        raise InvalidArgumentError(field, no_cgroup(missing[0][1]), value=missing[0][0])
    return tuple(Cgroup(path, location.id, location.level) for path, location in locations if location is not None)


def _path_of(hierarchy: Hierarchy, field: str, name: str) -> str:
    """Return the path of the topmost cgroup with a name; the name itself if there is none.

    Users have names at choice, but only deep below their own slices.

    Raises InvalidArgumentError if several are topmost.
    """
    paths = [path for path in hierarchy.all_paths() if path.rpartition("/")[2] == name]
    level = min((path.count("/") for path in paths), default=0)
    topmost = sorted(path for path in paths if path.count("/") == level)
    if len(topmost) > 1:
        reason = f"{name!r} is the name of {_listed(topmost)}; write the path of one"
        raise InvalidArgumentError(field, reason, value=name)
    return topmost[0] if topmost else name


def of_containers(
    hierarchy: Hierarchy, names_of: NamesOf | None, field: str, names: Sequence[str]
) -> tuple[Cgroup, ...]:
    """Return all cgroups of the containers with these names or ids. Raises as `of_cgroups` does.

    names_of: None for a client that may not learn which containers others have.
    """
    _check_count(field, names)
    with about(field):
        paths_by_container = containers.cgroups_of(hierarchy.all_paths()) if names else {}
    given_names = names_of(paths_by_container) if names and names_of else {}
    result: dict[Cgroup, None] = {}
    for name in dict.fromkeys(names):
        by_id = containers.matching(name, paths_by_container)
        matches = sorted({*by_id, *container_names.called(name, given_names)})
        if len(matches) > 1:
            shown = [f"{each} ({given_names[each]})" if each in given_names else each for each in matches]
            raise InvalidArgumentError(field, _ambiguous(name, shown, is_id=len(by_id) == len(matches)), value=name)
        # without any cgroup a container would not restrict the events, so one that has just gone is an error as well
        locations = [(path, hierarchy.find(path)) for container in matches for path in paths_by_container[container]]
        living = [Cgroup(path, location.id, location.level) for path, location in locations if location is not None]
        if not living:
            raise InvalidArgumentError(field, _no_container(name, knows_names=names_of is not None), value=name)
        result.update(dict.fromkeys(living))
    return tuple(result)


def _check_count(field: str, names: Sequence[str]) -> None:
    if len(names) > _MAX_NAMES:
        raise InvalidArgumentError(field, f"there are {len(names)}, more than the {_MAX_NAMES} allowed")


def _ambiguous(name: str, shown: Sequence[str], *, is_id: bool) -> str:
    return f"{name!r} matches {_listed(shown)}; write {'more of it' if is_id else 'the id of one'}"


def _listed(matches: Sequence[str]) -> str:
    more = len(matches) - _MAX_SHOWN_MATCHES
    return " and ".join([*matches[:_MAX_SHOWN_MATCHES], *([f"{more} more"] if more > 0 else [])])


def _no_container(name: str, *, knows_names: bool) -> str:
    shown = name if len(name) <= _MAX_SHOWN_CHARACTERS else name[:_MAX_SHOWN_CHARACTERS] + "…"
    by_name = "its whole name, or " if knows_names else ""
    return (
        f"no cgroup of the unified hierarchy is named after a container {shown!r}; write {by_name}at least "
        f"{containers.MIN_PREFIX} digits of its id"
        + ("" if knows_names else ", since engines' names of containers are for roles that reach all users' processes")
    )
