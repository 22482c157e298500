"""Which probes a client that watches can see, and what changes in that."""

from __future__ import annotations

from collections.abc import Iterable

from stapsdtd.catalog.registry import probes_of
from stapsdtd.catalog.selectors import Selector, select, select_one
from stapsdtd.model import Object, ObjectKey, Probe


class ProbeView:
    """Holds what the client was told last. pids empty means every process, among None too; among may change."""

    def __init__(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], among: frozenset[int] | None = None
    ) -> None:
        self._selectors = selectors
        self._pids = pids
        self.among = among
        self._shown: dict[ObjectKey, dict[tuple[str, str], Probe]] = {}

    def begin(self, probes: list[Probe]) -> list[Probe]:
        """Answer what is visible at first."""
        visible = select(self._selectors, probes, self._pids, self.among)
        for probe in visible:
            self._shown.setdefault(probe.object.key, {})[probe.provider, probe.name] = probe
        return visible

    def changed(self, found: Object, pids: Iterable[int]) -> list[tuple[bool, Probe]]:
        """Tell who maps an object now; answer what came into sight (True) and what went out of it."""
        selected = (
            select_one(self._selectors, probe, self._pids, self.among)
            for probe in probes_of(found, sorted(pids))
            if probe.pids
        )
        now = {(probe.provider, probe.name): probe for probe in selected if probe is not None}
        before = self._shown.pop(found.key, {})
        if now:
            self._shown[found.key] = now
        return [(False, probe) for name, probe in before.items() if name not in now] + [
            (True, probe) for name, probe in now.items() if name not in before
        ]
