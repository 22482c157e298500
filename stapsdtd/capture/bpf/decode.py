"""Records into columns, for each subscription its own.

    ring ──view──► records ──by plan──► rows of each subscription ──by layout──► blocks

One record serves all subscriptions that its hit matched, and columns that several of them take are gathered once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.layout import RECORD_HEADER
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Fixed, Layout, NoText, NumberAt, Reading, Source, TextAt
from stapsdtd.capture.bpf.rings import DISCARDED, Records
from stapsdtd.capture.bpf.tables import Generation
from stapsdtd.capture.bpf.unread import Unread
from stapsdtd.events.columns import (
    I32,
    I64,
    U16,
    U64,
    Block,
    Bools,
    Comms,
    Indices,
    Numbers,
    Strings,
    ValueColumn,
    floats,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Body:
    """A block but for its site_id."""

    time_ns: I64
    pid: I32
    tid: I32
    cpu: U16
    comm: Comms
    values: tuple[ValueColumn, ...]


Rows = Indices | None
"""None is all of them."""


class Batch:
    """Records of one ring, to be read before they are consumed.

    from_file, unavailable: what became of values that hits could not read, once blocks() was called.
    """

    def __init__(self, records: Records, raw: memoryview, stride: int) -> None:
        self._records = records
        self._raw = raw
        self._stride = stride
        self._bodies: dict[tuple[Layout, tuple[int, ...]], _Body] = {}
        self._rows: list[Rows] = []
        self._some_missing = bool(records["missing"].any())
        self._unread = Unread(records, {})
        self.from_file = self.unavailable = 0

    def blocks(self, plans: Mapping[Generation, ActivePlan]) -> tuple[list[tuple[Channel, Block]], int]:
        """Return each subscription's events, and how many records are of unknown plans."""
        self._unread = Unread(self._records, plans)
        found: dict[tuple[int, Layout], list[tuple[Reading, Rows]]] = {}
        received: list[tuple[ActivePlan, int, int]] = []
        unknown = 0
        for generation, rows, count in self._by_plan():
            if not generation:
                continue
            plan = plans.get(generation)
            if plan is None:
                unknown += count
                continue
            for bit, own in self._by_bit(plan, rows):
                received.append((plan, bit, count if own is rows else _length(own)))
                for reading in plan.readings:
                    if reading.bit == bit:
                        found.setdefault((id(reading.channel), reading.layout), []).append((reading, own))
        blocks = [self._block(layout, parts) for (_, layout), parts in found.items()]
        for plan, bit, count in received:
            plan.received[bit] = plan.received.get(bit, 0) + count
        return blocks, unknown

    def unread(self) -> Iterator[tuple[int, int, int]]:
        """As `Unread.places`, once blocks() was called."""
        return self._unread.places() if self._some_missing else iter(())

    def _by_plan(self) -> list[tuple[Generation, Rows, int]]:
        generations: U64 = self._records["generation"]
        discarded = self._records["length"] & DISCARDED
        if discarded.any():
            generations = np.where(discarded, np.uint64(0), generations)
        if (generations == generations[0]).all():
            return [(int(generations[0]), self._remember(None), len(generations))]
        # by the plans' numbers, since 16 bits are sorted by counting
        order = np.argsort(generations.astype(np.uint16), kind="stable")
        in_order = generations[order]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(in_order)) + 1, [len(order)]]).tolist()
        return [
            (int(in_order[begin]), self._remember(order[begin:end]), end - begin) for begin, end in pairwise(begins)
        ]

    def _by_bit(self, plan: ActivePlan, rows: Rows) -> list[tuple[int, Rows]]:
        bits = dict.fromkeys(reading.bit for reading in plan.readings)
        matched: U64 | None = None
        found: list[tuple[int, Rows]] = []
        for bit in bits:
            if not plan.tested >> bit & 1:
                found.append((bit, rows))
                continue
            if matched is None:
                matched = self._records["matched"] if rows is None else self._records["matched"][rows]
            has = (matched >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)
            if has.all():
                found.append((bit, rows))
            elif has.any():
                found.append((bit, self._remember(np.flatnonzero(has) if rows is None else rows[has])))
        return found

    def _remember(self, rows: Rows) -> Rows:
        """Rows are known by their identity, so they must not be replaced by others while this batch lives."""
        self._rows.append(rows)
        return rows

    def _block(self, layout: Layout, parts: Sequence[tuple[Reading, Rows]]) -> tuple[Channel, Block]:
        channel = parts[0][0].channel
        key = layout, tuple(id(rows) for _, rows in parts)
        if len(parts) == 1:
            reading, rows = parts[0]
            body = self._bodies.get(key) or self._body(layout, rows)
            site_ids = np.full(len(body.time_ns), reading.site_id, np.uint32)
        else:
            joined = np.concatenate([rows for _, rows in parts if rows is not None])
            # in the order of the ring, which is that of time
            order = np.argsort(joined, kind="stable")
            body = self._bodies.get(key) or self._body(layout, joined[order])
            each = [len(rows) for _, rows in parts if rows is not None]
            site_ids = np.repeat(np.array([reading.site_id for reading, _ in parts], np.uint32), each)[order]
        self._bodies[key] = body
        block = Block(body.time_ns, body.pid, body.tid, body.cpu, body.comm, site_ids, body.values)
        return channel, block

    def _body(self, layout: Layout, rows: Rows) -> _Body:
        return _Body(
            self._gather("time_ns", rows).view(np.int64),
            self._gather("pid", rows).view(np.int32),
            self._gather("tid", rows).view(np.int32),
            self._gather("cpu", rows).astype(np.uint16),
            self._gather("comm", rows),
            tuple(self._column(source, rows) for source in layout),
        )

    def _gather(self, name: str, rows: Rows) -> npt.NDArray[Any]:
        """Copy a field out of the ring."""
        column = self._records[name]
        return column.copy() if rows is None else column[rows]

    def _values(self, position: int, rows: Rows) -> U64:
        values = self._records["values"][:, position]
        return values.copy() if rows is None else values[rows]

    def _missing(self, position: int, rows: Rows) -> Bools | None:
        if not self._some_missing:
            return None
        missing = (self._gather("missing", rows) >> np.uint64(position) & np.uint64(1)).astype(np.bool_)
        return missing if missing.any() else None

    def _column(self, source: Source, rows: Rows) -> ValueColumn:
        count = len(self._records) if rows is None else len(rows)
        match source:
            case NumberAt(position, is_signed, float_bytes):
                numbers, missing = self._values(position, rows), self._missing(position, rows)
                if missing is not None:
                    before = missing.copy()
                    self._unread.fill_numbers(numbers, missing, position, rows)
                    self._count(before, missing)
                if float_bytes:
                    return Numbers(floats(numbers, float_bytes), missing)
                return Numbers(numbers.view(np.int64) if is_signed else numbers, missing)
            case TextAt():
                return self._texts(rows, source)
            case Fixed(value, is_signed, is_float):
                missing = np.ones(count, np.bool_) if value is None else None
                if is_float:
                    return Numbers(np.zeros(count, np.float64), missing)
                bits = np.full(count, (value or 0) % (1 << 64), np.uint64)
                return Numbers(bits.view(np.int64) if is_signed else bits, missing)
            case NoText():
                return Strings.of([None] * count)

    def _texts(self, rows: Rows, source: TextAt) -> Strings:
        places, missing = self._values(source.position, rows), self._missing(source.position, rows)
        known = {}
        if missing is not None:
            known = self._unread.texts(places, missing, source, rows)
            places[missing] = 0
        lengths = np.minimum(places >> np.uint64(32), np.uint64(source.max_bytes)).astype(np.intp)
        firsts = (np.arange(len(places)) if rows is None else rows) * self._stride + RECORD_HEADER
        begins = firsts + (places & np.uint64(0xFFFFFFFF)).astype(np.intp)
        raw = self._raw
        texts: list[bytes | memoryview] = [
            raw[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
        ]
        for row, text in known.items():
            texts[row] = text
            lengths[row] = len(text)
        if missing is not None:
            before = missing.copy()
            missing[list(known)] = False
            self._count(before, missing)
        return Strings(np.cumsum(lengths, dtype=np.uint32), b"".join(texts), missing, source.is_raw)

    def _count(self, before: Bools, missing: Bools) -> None:
        left = int(np.count_nonzero(missing))
        self.from_file += int(np.count_nonzero(before)) - left
        self.unavailable += left


def _length(rows: Rows) -> int:
    return 0 if rows is None else len(rows)
