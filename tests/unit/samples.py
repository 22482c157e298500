"""Small sites, objects and blocks to test with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stapsdtd.capture.bpf.reading import Channel, Reading
from stapsdtd.capture.engine import TargetSite
from stapsdtd.events.columns import COMM_BYTES, Block, Numbers, Strings, ValueColumn
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


def block(
    times: Sequence[int], *values: ValueColumn, site_id: int | Sequence[int] = 1, **columns: Sequence[Any]
) -> Block:
    """Events of thread 11 in process 10, named app, where columns do not say otherwise."""
    count = len(times)
    given = {"pid": [10] * count, "tid": [11] * count, "cpu": [0] * count, "comm": [b"app"] * count} | columns
    return Block(
        np.array(times, np.int64),
        np.array(given["pid"], np.int32),
        np.array(given["tid"], np.int32),
        np.array(given["cpu"], np.uint16),
        np.array(given["comm"], f"S{COMM_BYTES}"),
        np.array([site_id] * count if isinstance(site_id, int) else site_id, np.uint32),
        values,
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


def event_rows(found: Block) -> list[tuple[object, ...]]:
    """A block's events, one tuple each."""
    columns = [
        found.time_ns.tolist(), found.pid.tolist(), found.tid.tolist(), found.cpu.tolist(), found.comm.tolist(),
        found.site_id.tolist(), *(value_list(column) for column in found.values),
    ]  # fmt: skip
    return list(zip(*columns, strict=True))
