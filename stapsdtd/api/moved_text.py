"""Which processes execute copies of text that has probes: see `procs.moved_text`."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from stapsdtd.api import convert
from stapsdtd.api.rights import Users
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.ownership import belongs
from stapsdtd.model import Mapping, Object, Site
from stapsdtd.procs.moved_text import moved, out_of
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_MOVED = 1000
"""In one response."""
_MAPS_BYTES = 1 << 20
"""Of a process; some 10,000 mappings."""
_MAX_SECONDS = 2.0
"""For the maps of one request."""


class ChosenSites(NamedTuple):
    """Sites of an object that selectors choose, and the processes that map it."""

    object: Object
    sites: tuple[Site, ...]
    pids: tuple[int, ...]


def chosen_sites(
    selectors: Sequence[Selector], objects: Iterable[MappedObject], pids: frozenset[int]
) -> Generator[None, None, list[ChosenSites]]:
    """Return what selectors choose. pids: the only processes to look at; empty for all."""
    chosen = []
    for probes in select(SelectorSet(selectors), (each for each in objects if each.pids), pids):
        if probes:
            mapped_by = tuple(pid for pid in probes[0].pids if not pids or pid in pids)
            chosen.append(
                ChosenSites(probes[0].object, tuple(site for each in probes for site in each.sites), mapped_by)
            )
        yield
    return chosen


def moved_texts(
    chosen: Iterable[tuple[ChosenSites, dict[int, Mapping]]], users: Users, calls: LockedCalls
) -> Generator[None, None, bytes]:
    """Look at the maps of processes, and describe text that they have moved, in a serialized ListProbesResponse.

    chosen: with the objects' mappings by pid. users: whose processes the client may see. calls: reads the maps.
    """
    by_pid: dict[int, list[tuple[ChosenSites, Mapping]]] = {}
    for each, mappings in chosen:
        for pid in each.pids:
            if (mapping := mappings.get(pid)) is not None:
                by_pid.setdefault(pid, []).append((each, mapping))
    response = pb.ListProbesResponse()
    seconds_left = _MAX_SECONDS
    for pid, some in by_pid.items():
        steps, found = _moved_by(pid, some, calls), list[pb.MovedText]()
        is_over = False
        while not is_over and seconds_left > 0:
            begin = time.monotonic()
            try:
                next(steps)
            except StopIteration as end:
                found, is_over = end.value, True
            seconds_left -= time.monotonic() - begin
            yield
        # checked after reading, since another process may have the pid by then
        if found and (users is None or belongs(pid, users)):
            response.moved.extend(found)
        if seconds_left <= 0 or len(response.moved) >= _MAX_MOVED:
            break
    return response.SerializeToString()


def _moved_by(
    pid: int, chosen: Iterable[tuple[ChosenSites, Mapping]], calls: LockedCalls
) -> Generator[None, None, list[pb.MovedText]]:
    found = []
    try:
        mappings = calls.call(pid, lambda: procfs.executable_mappings(pid))
        away = []
        for each, mapping in chosen:
            away.append((each, mapping, out_of(each.sites, mapping, mappings)))
            yield
        if not any(sites for _, _, sites in away):
            return []
        regions = calls.call(pid, lambda: procfs.regions(pid, _MAPS_BYTES))
        owner = os.stat(f"/proc/{pid}").st_uid
    except (ObjectPendingError, OSError):
        # it holds its lock, or is gone
        return []
    for each, mapping, sites in away:
        segments = each.object.parsed.read_only
        texts = yield from moved(sites, segments, mapping, regions)
        found += [convert.moved_text(pid, owner, each.object.path, text) for text in texts]
    return found
