"""Names the cgroups of events, which records have by id."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stapsdtd.events.columns import U64, Strings
from stapsdtd.kernel.cgroup_ids import CgroupGoneError
from stapsdtd.kernel.containers import containers_in

MOST_LOOKUPS = 256
"""Of a sweep, each some 20 µs: others' events wait meanwhile, and a user may make many cgroups."""
_NAMES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class _Names:
    """path: None if the cgroup is gone. container: the innermost one that it is part of, or empty."""

    path: bytes | None
    container: bytes | None


_GONE = _Names(None, None)


class CgroupNames:
    """Called from one thread."""

    def __init__(self, path_of: Callable[[int], bytes]) -> None:
        """path_of: as `CgroupIds.path_of`."""
        self._path_of = path_of
        # an id is never used again, so what was found once, or was gone, stays so
        self._known: dict[int, _Names] = {}

    def column(self, ids: U64, most_lookups: int, *, is_container: bool) -> tuple[Strings, int]:
        """Return the cgroups' paths or containers, and how many were looked up.

        What exceeds most_lookups is unavailable.
        """
        distinct, codes = np.unique(ids, return_inverse=True)
        looked_up = 0
        names = []
        for cgroup_id in distinct.tolist():
            found = self._known.get(cgroup_id)
            if found is None and looked_up < most_lookups:
                looked_up += 1
                found = self._look_up(cgroup_id)
            names.append((found.container if is_container else found.path) if found else None)
        return Strings.coded(names, codes), looked_up

    def _look_up(self, cgroup_id: int) -> _Names:
        try:
            path = self._path_of(cgroup_id)
        except CgroupGoneError:
            names = _GONE
        except OSError:
            # maybe another time
            return _GONE
        else:
            containers = containers_in(os.fsdecode(path))
            names = _Names(path, os.fsencode(containers[-1]) if containers else b"")
        if len(self._known) >= _NAMES_KEPT:
            del self._known[next(iter(self._known))]
        self._known[cgroup_id] = names
        return names
