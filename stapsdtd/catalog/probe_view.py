"""Track which probes a watching client can see."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice

from stapsdtd.catalog.listing_limiter import MAX_PER_OBJECT
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.model import ObjectKey, Probe


class ProbeView:
    """The probes last shown to a client, of an object as many as may be listed.

    They follow from what mapped the object then. To keep them would take 300 bytes of each probe, in each watch.
    """

    def __init__(self, selectors: tuple[Selector, ...], pids: frozenset[int]) -> None:
        """pids: see `select`."""
        self._selectors = SelectorSet(selectors)
        self._pids = pids
        self._depends_on_pids = bool(pids) or self._selectors.names_processes
        self._shown: dict[ObjectKey, MappedObject] = {}

    def update(self, objects: Iterable[MappedObject]) -> Generator[None, None, list[tuple[bool, Probe]]]:
        """Take in who maps objects now, in steps. Return the probes that became visible (True) or invisible (False)."""
        changes: list[tuple[bool, Probe]] = []
        for mapped in objects:
            shown = self._shown.pop(mapped.object.key, None)
            if mapped.pids:
                self._shown[mapped.object.key] = mapped
            if shown is None or not self._is_alike(shown, mapped):
                before, now = (yield from self._probes(shown)), (yield from self._probes(mapped))
                changes += [(False, probe) for name, probe in before.items() if name not in now]
                changes += [(True, probe) for name, probe in now.items() if name not in before]
            yield
        return changes

    def _is_alike(self, shown: MappedObject, now: MappedObject) -> bool:
        """Report whether the same probes are seen, without looking at them."""
        if shown.object.path != now.object.path:
            return False
        return shown.pids == now.pids if self._depends_on_pids else bool(now.pids)

    def _probes(self, mapped: MappedObject | None) -> Generator[None, None, dict[tuple[str, str], Probe]]:
        found: dict[tuple[str, str], Probe] = {}
        for probes in select(self._selectors, [mapped] if mapped and mapped.pids else [], self._pids):
            some = islice(probes or (), MAX_PER_OBJECT - len(found))
            found |= {(probe.provider, probe.name): probe for probe in some}
            yield
        return found
