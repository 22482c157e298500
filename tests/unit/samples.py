"""Small sites, objects and batches to test with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.capture.bpf.reading import Channel, Reading
from stapsdtd.capture.engine import Target, TargetSite
from stapsdtd.events.batch import EventBatch, ValueTable
from stapsdtd.events.columns import COMM_BYTES, Numbers, Strings, ValueColumn
from stapsdtd.kernel.cgroup_ids import CgroupGoneError
from stapsdtd.model import (
    Argument,
    Capture,
    FileOffset,
    Object,
    ObjectKey,
    Operand,
    ParsedObject,
    Problem,
    Register,
    Site,
    SiteCapture,
)
from stapsdtd.query.actions import Emit
from stapsdtd.query.expression import Condition

RDI = Register("rdi")


def argument(operand: Operand = RDI, size: int = 8, *, signed: bool = False, text: str = "8@%rdi") -> Argument:
    return Argument(text, size, signed=signed, is_float=False, operand=operand)


def site(
    name: str = "tick",
    offset: int = 0x1000,
    arguments: Sequence[Argument] = (),
    *,
    provider: str = "app",
    semaphore: int | None = None,
    function: str | None = None,
    nop_bytes: int = 1,
) -> Site:
    semaphore_offset = None if semaphore is None else FileOffset(semaphore)
    return Site(provider, name, FileOffset(offset), semaphore_offset, function, tuple(arguments), nop_bytes)


def captured(where: Site, *captures: Capture) -> SiteCapture:
    """All arguments as integers where no captures are given."""
    return SiteCapture(where, captures or tuple(Capture(index) for index in range(len(where.arguments))))


def wanted_site(capture: SiteCapture, site_id: int, pids: frozenset[int] | None = None) -> TargetSite:
    return TargetSite(capture.site, site_id, Emit(capture.captures), pids)


def predicated(target: Target, predicate: Condition | None) -> Target:
    """The same sites, whose hits have to satisfy a predicate."""
    return replace(target, sites=tuple(replace(each, predicate=predicate) for each in target.sites))


def channels_of(readings: Sequence[Reading]) -> tuple[tuple[int, Channel], ...]:
    """Of a plan all of whose consumers want events."""
    return tuple((reading.bit, reading.channel) for reading in readings)


def key(inode: int = 1) -> ObjectKey:
    return ObjectKey(dev=1, inode=inode, size=4096, mtime_ns=0)


def sample_object(
    *sites: Site,
    path: str = "/usr/bin/app",
    inode: int = 1,
    problems: Sequence[Problem] = (),
    of: ObjectKey | None = None,
) -> Object:
    return Object(of or key(inode), path, ParsedObject("x86-64", "c0ffee", sites, tuple(problems)))


def batch(
    times: Sequence[int], *values: ValueColumn, site_id: int | Sequence[int] = 1, **columns: Sequence[Any]
) -> EventBatch:
    """Events of thread 11 in process 10, named app, where columns do not say otherwise."""
    count = len(times)
    given = {"pid": [10] * count, "tid": [11] * count, "cpu": [0] * count, "comm": [b"app"] * count} | columns
    return EventBatch(
        np.array(times, np.int64),
        np.array(given["pid"], np.int32),
        np.array(given["tid"], np.int32),
        np.array(given["cpu"], np.uint16),
        np.array(given["comm"], f"S{COMM_BYTES}"),
        np.array([site_id] * count if isinstance(site_id, int) else site_id, np.uint32),
        (ValueTable(values),),
    )


def signed(*numbers: int | None) -> Numbers:
    return Numbers(np.array([number or 0 for number in numbers], np.int64), _missing(numbers))


def unsigned(*numbers: int | None) -> Numbers:
    return Numbers(np.array([number or 0 for number in numbers], np.uint64), _missing(numbers))


def strings(*texts: bytes | None) -> Strings:
    return Strings.of(texts)


def _missing(values: Sequence[object]) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    missing = np.array([value is None for value in values], np.bool_)
    return missing if missing.any() else None


def value_list(column: ValueColumn) -> list[int | bytes | None]:
    """A column's values, None where there is none."""
    if isinstance(column, Strings):
        return list(column.tolist())
    missing = np.zeros(len(column.data), np.bool_) if column.unavailable is None else column.unavailable
    return [None if absent else number for number, absent in zip(column.data.tolist(), missing.tolist(), strict=True)]


def columns_of(events: EventBatch) -> tuple[ValueColumn, ...]:
    """Return the values of a batch whose events all have values of the same types."""
    (table,) = events.tables
    return table.columns


def event_rows(events: EventBatch) -> list[tuple[object, ...]]:
    """Return (time_ns, pid, tid, cpu, comm, site_id, values…) of each event."""
    head = events.time_ns, events.pid, events.tid, events.cpu, events.comm, events.site_id
    values: list[list[object]] = [[] for _ in range(len(events))]
    for table in events.tables:
        rows = range(len(events)) if table.rows is None else table.rows.tolist()
        for row, *row_values in zip(rows, *map(value_list, table.columns), strict=True):
            values[row] = row_values
    return [(*cells[:-1], *cells[-1]) for cells in zip(*(column.tolist() for column in head), values, strict=True)]


def no_cgroups() -> CgroupNames:
    """Of a host that has no unified hierarchy."""

    def path_of(cgroup_id: int) -> bytes:
        raise CgroupGoneError(cgroup_id)

    return CgroupNames(path_of)
