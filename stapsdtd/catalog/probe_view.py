"""Track which probes a watching client can see."""

from __future__ import annotations

from collections.abc import Iterable

from stapsdtd.catalog.registry import probes_of
from stapsdtd.catalog.selectors import Selector, select, select_one
from stapsdtd.model import Object, ObjectKey, Probe


class ProbeView:
    """The probes last shown to a client. Empty pids or among None stand for every process; among may be changed."""

    def __init__(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], among: frozenset[int] | None = None
    ) -> None:
        self._selectors = selectors
        self._pids = pids
        self.among = among
        self._shown: dict[ObjectKey, dict[tuple[str, str], Probe]] = {}

    def begin(self, probes: list[Probe]) -> list[Probe]:
        """Return the probes visible at first."""
        visible = select(self._selectors, probes, self._pids, self.among)
        for probe in visible:
            self._shown.setdefault(probe.object.key, {})[probe.provider, probe.name] = probe
        return visible

    def changed(self, obj: Object, pids: Iterable[int]) -> list[tuple[bool, Probe]]:
        """Update the processes that map an object. Return probes that became visible (True) or invisible (False)."""
        selected = (
            select_one(self._selectors, probe, self._pids, self.among)
            for probe in probes_of(obj, sorted(pids))
            if probe.pids
        )
        now = {(probe.provider, probe.name): probe for probe in selected if probe is not None}
        before = self._shown.pop(obj.key, {})
        if now:
            self._shown[obj.key] = now
        return [(False, probe) for name, probe in before.items() if name not in now] + [
            (True, probe) for name, probe in now.items() if name not in before
        ]
