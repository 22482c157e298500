"""Track which probes a watching client can see."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.model import ObjectKey, Probe


class ProbeView:
    """The probes last shown to a client."""

    def __init__(self, selectors: tuple[Selector, ...], pids: frozenset[int]) -> None:
        """pids: see `select`."""
        self._selectors = SelectorSet(selectors)
        self._pids = pids
        self._shown: dict[ObjectKey, dict[tuple[str, str], Probe]] = {}

    def update(self, objects: Iterable[MappedObject]) -> Generator[None, None, list[tuple[bool, Probe]]]:
        """Take in who maps objects now, in steps. Return the probes that became visible (True) or invisible (False)."""
        changes: list[tuple[bool, Probe]] = []
        for mapped in objects:
            key = mapped.object.key
            now: dict[tuple[str, str], Probe] = {}
            for probes in select(self._selectors, [mapped] if mapped.pids else [], self._pids):
                now |= {(probe.provider, probe.name): probe for probe in probes or ()}
                yield
            before = self._shown.pop(key, {})
            if now:
                self._shown[key] = now
            changes += [(False, probe) for name, probe in before.items() if name not in now]
            changes += [(True, probe) for name, probe in now.items() if name not in before]
            yield
        return changes
