"""What `stapsdt top` shows, added up from columns: an event costs a part of a sort, not a step of a loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stapsdtd.client import ColumnBatch, ProtocolError

_KEPT = 10_000
"""Probes and processes remembered while they are quiet, of each kind."""


class ProbeId(NamedTuple):
    provider: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """count: in the interval, fired by so many processes. total: since the beginning."""

    probe: ProbeId
    count: int
    total: int
    processes: int


@dataclass(frozen=True, slots=True)
class ProcessRow:
    pid: int
    comm: str
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Rows begin with what fires most. lost and lost_before: events by stage, until its end and until its begin."""

    time_ns: int
    seconds: float
    count: int
    total: int
    probes: tuple[ProbeRow, ...]
    processes: tuple[ProcessRow, ...]
    sites: int
    refused: int
    lost: Mapping[str, int] = field(default_factory=dict)
    lost_before: Mapping[str, int] = field(default_factory=dict)

    def rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Probe:
    count: int = 0
    total: int = 0
    pids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Process:
    comm: str
    is_leaders: bool
    count: int = 0
    total: int = 0


class Rates:
    def __init__(self) -> None:
        self.total = 0
        self._total_before = 0
        self._lost_before: Mapping[str, int] = {}
        self._ids: dict[int, ProbeId] = {}
        self._probes: dict[ProbeId, _Probe] = {}
        self._processes: dict[int, _Process] = {}

    def add(self, batch: ColumnBatch) -> None:
        """Raises ProtocolError for a site that was never described."""
        pairs = batch.site_id.astype(np.uint64) << np.uint64(32) | batch.pid.astype(np.uint64)
        found, rows, counts = np.unique(pairs, return_index=True, return_counts=True)
        for pair, row, count in zip(found.tolist(), rows.tolist(), counts.tolist(), strict=True):
            pid = pair & 0xFFFFFFFF
            probe = self._probes.setdefault(self._id(pair >> 32, batch), _Probe())
            probe.count += count
            probe.total += count
            probe.pids.add(pid)
            process = self._process(pid, batch, row)
            process.count += count
            process.total += count
        self.total += batch.count

    def _id(self, site_id: int, batch: ColumnBatch) -> ProbeId:
        known = self._ids.get(site_id)
        if known is None:
            if site_id not in batch.sites:
                raise ProtocolError(f"the server sent an event of site {site_id}, which it never described")
            probe = batch.sites[site_id].probe
            known = self._ids[site_id] = ProbeId(probe.provider, probe.name, probe.path)
        return known

    def _process(self, pid: int, batch: ColumnBatch, row: int) -> _Process:
        """A process goes by the name of its first thread, and by another one's until that one fires."""
        is_leaders = int(batch.tid[row]) == pid
        known = self._processes.get(pid)
        if known is None or (is_leaders or not known.is_leaders):
            comm = bytes(batch.comm[row]).decode("utf-8", "backslashreplace")
            if known is None:
                known = self._processes[pid] = _Process(comm, is_leaders)
            known.comm, known.is_leaders = comm, is_leaders
        return known

    def take(self, time_ns: int, seconds: float, sites: int, refused: int, lost: Mapping[str, int]) -> Interval:
        """End an interval and begin the next one."""
        interval = Interval(
            time_ns,
            seconds,
            self.total - self._total_before,
            self.total,
            tuple(
                ProbeRow(ident, probe.count, probe.total, len(probe.pids))
                for ident, probe in sorted(
                    self._probes.items(), key=lambda item: (-item[1].count, -item[1].total, item[0])
                )
            ),
            tuple(
                ProcessRow(pid, process.comm, process.count, process.total)
                for pid, process in sorted(
                    self._processes.items(), key=lambda item: (-item[1].count, -item[1].total, item[0])
                )
            ),
            sites,
            refused,
            dict(lost),
            self._lost_before,
        )
        self._total_before = self.total
        self._lost_before = dict(lost)
        self._begin_anew()
        return interval

    def _begin_anew(self) -> None:
        if len(self._probes) > _KEPT:
            self._probes = {ident: probe for ident, probe in self._probes.items() if probe.count}
        if len(self._ids) > _KEPT:
            self._ids.clear()
        if len(self._processes) > _KEPT:
            self._processes = {pid: process for pid, process in self._processes.items() if process.count}
        for probe in self._probes.values():
            probe.count = 0
            probe.pids.clear()
        for process in self._processes.values():
            process.count = 0
