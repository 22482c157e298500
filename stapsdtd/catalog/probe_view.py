"""Track which probes a watching client can see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selectors import Selector
from stapsdtd.model import ObjectKey, Probe


class ProbeView:
    """The probes last shown to a client."""

    def __init__(self, selectors: tuple[Selector, ...], pids: frozenset[int]) -> None:
        """pids: see `select`."""
        self._selectors = selectors
        self._pids = pids
        self._shown: dict[ObjectKey, dict[tuple[str, str], Probe]] = {}

    def update(self, objects: Iterable[MappedObject]) -> Iterator[list[tuple[bool, Probe]]]:
        """Take in who maps objects now. In steps, yield the probes that became visible (True) or invisible (False)."""
        for mapped in objects:
            key = mapped.object.key
            now: dict[tuple[str, str], Probe] = {}
            for probes in select(self._selectors, [mapped] if mapped.pids else [], self._pids):
                now |= {(probe.provider, probe.name): probe for probe in probes}
                yield []
            before = self._shown.pop(key, {})
            if now:
                self._shown[key] = now
            yield [(False, probe) for name, probe in before.items() if name not in now] + [
                (True, probe) for name, probe in now.items() if name not in before
            ]
