"""The counts that `stapsdt top` shows: of the server's snapshots, each of which covers one interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stapsdtd.client import Snapshot

KEYS = ("provider", "name", "module_path", "pid", "execname")
"""Of the rows of a snapshot."""

_MAX_KEPT = 10_000


class ProbeId(NamedTuple):
    provider: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """count: hits in the interval. total: hits since the start. processes: how many fired it in the interval."""

    probe: ProbeId
    count: int
    total: int
    processes: int


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """comm: the name that most of its hits in the interval had: threads have names of their own."""

    pid: int
    comm: str
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened in one interval. The busiest rows come first.

    time_ns: when it ended, Unix time. seconds: how long it was, by the server's monotonic clock.
    count, total: hits in the interval, and since the start.
    lost, lost_before: hits lost by stage, up to the end and up to the start of the interval.
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


class Rates:
    """Totals by probe and by process. Of more than max_kept probes or processes, idle ones are forgotten."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self.total = 0
        self._lost_before: Mapping[str, int] = {}
        self._probes: Counter[ProbeId] = Counter()
        self._processes: Counter[int] = Counter()
        self._names: dict[int, str] = {}

    def take(self, snapshot: Snapshot, sites: int, refused: int, lost: Mapping[str, int]) -> Interval:
        """Return the interval of the next snapshot, whose rows have `KEYS`."""
        probes: Counter[ProbeId] = Counter()
        processes: Counter[int] = Counter()
        fired_by: dict[ProbeId, set[int]] = {}
        names: dict[int, Counter[str]] = {}
        for row in snapshot.rows:
            provider, name, path, pid, comm = row.key
            count, process = int(row.values["count"] or 0), int(pid) if isinstance(pid, int) else 0
            probe = ProbeId(str(provider), str(name), str(path))
            probes[probe] += count
            processes[process] += count
            fired_by.setdefault(probe, set()).add(process)
            names.setdefault(process, Counter())[str(comm)] += count
        self._names |= {pid: found.most_common(1)[0][0] for pid, found in names.items()}
        self._probes.update(probes)
        self._processes.update(processes)
        count = probes.total()
        self.total += count
        interval = Interval(
            snapshot.end_ns,
            snapshot.duration_ns / 1e9,
            count,
            self.total,
            tuple(
                ProbeRow(probe, probes[probe], total, len(fired_by.get(probe, ())))
                for probe, total in sorted(self._probes.items(), key=lambda item: (-probes[item[0]], -item[1], item[0]))
            ),
            tuple(
                ProcessRow(pid, self._names[pid], processes[pid], total)
                for pid, total in sorted(
                    self._processes.items(), key=lambda item: (-processes[item[0]], -item[1], item[0])
                )
            ),
            sites,
            refused,
            dict(lost),
            self._lost_before,
        )
        self._lost_before = dict(lost)
        self._forget(probes, processes)
        return interval

    def _forget(self, probes: Counter[ProbeId], processes: Counter[int]) -> None:
        if len(self._probes) > self._max_kept:
            self._probes = Counter({each: self._probes[each] for each in probes})
        if len(self._processes) > self._max_kept:
            self._processes = Counter({each: self._processes[each] for each in processes})
            self._names = {each: self._names[each] for each in processes}
