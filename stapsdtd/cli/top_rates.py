"""The event counts that `stapsdt top` shows, summed over whole columns with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stapsdtd.client import ColumnBatch, ProtocolError

_MAX_KEPT = 10_000


class ProbeId(NamedTuple):
    provider: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """count: events in the interval. total: events since the start. processes: how many fired it in the interval."""

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
    """What happened in one interval. The busiest rows come first.

    count, total: events in the interval, and since the start.
    lost, lost_before: events lost by stage, up to the end and up to the start of the interval.
    """

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
    is_leader: bool
    count: int = 0
    total: int = 0


class Rates:
    """Counts events by probe and process. Of more than max_kept probes or processes, idle ones are forgotten."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self.total = 0
        self._total_before = 0
        self._lost_before: Mapping[str, int] = {}
        self._probe_ids: dict[int, ProbeId] = {}
        self._probes: dict[ProbeId, _Probe] = {}
        self._processes: dict[int, _Process] = {}

    def add(self, batch: ColumnBatch) -> None:
        """Raises ProtocolError for a site that was never described."""
        keys = batch.site_id.astype(np.uint64) << np.uint64(32) | batch.pid.astype(np.uint64)
        unique, rows, counts = np.unique(keys, return_index=True, return_counts=True)
        for key, row, count in zip(unique.tolist(), rows.tolist(), counts.tolist(), strict=True):
            pid = key & 0xFFFFFFFF
            probe = self._probes.setdefault(self._probe_id(key >> 32, batch), _Probe())
            probe.count += count
            probe.total += count
            probe.pids.add(pid)
            process = self._process(pid, batch, row)
            process.count += count
            process.total += count
        self.total += batch.count

    def _probe_id(self, site_id: int, batch: ColumnBatch) -> ProbeId:
        probe_id = self._probe_ids.get(site_id)
        if probe_id is None:
            if site_id not in batch.sites:
                raise ProtocolError(f"the server sent an event of site {site_id}, which it never described")
            probe = batch.sites[site_id].probe
            probe_id = self._probe_ids[site_id] = ProbeId(probe.provider, probe.name, probe.path)
        return probe_id

    def _process(self, pid: int, batch: ColumnBatch, row: int) -> _Process:
        """Return the process, named after its main thread or, until that one fires, after any thread."""
        is_leader = int(batch.tid[row]) == pid
        process = self._processes.get(pid)
        if process is None or (is_leader or not process.is_leader):
            comm = bytes(batch.comm[row]).decode("utf-8", "backslashreplace")
            if process is None:
                process = self._processes[pid] = _Process(comm, is_leader)
            process.comm, process.is_leader = comm, is_leader
        return process

    def take(self, time_ns: int, seconds: float, sites: int, refused: int, lost: Mapping[str, int]) -> Interval:
        """Return the interval that ends now, and start the next one."""
        interval = Interval(
            time_ns,
            seconds,
            self.total - self._total_before,
            self.total,
            tuple(
                ProbeRow(probe_id, probe.count, probe.total, len(probe.pids))
                for probe_id, probe in sorted(
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
        self._reset()
        return interval

    def _reset(self) -> None:
        if len(self._probes) > self._max_kept:
            self._probes = {probe_id: probe for probe_id, probe in self._probes.items() if probe.count}
        if len(self._probe_ids) > self._max_kept:
            self._probe_ids.clear()
        if len(self._processes) > self._max_kept:
            self._processes = {pid: process for pid, process in self._processes.items() if process.count}
        for probe in self._probes.values():
            probe.count = 0
            probe.pids.clear()
        for process in self._processes.values():
            process.count = 0
