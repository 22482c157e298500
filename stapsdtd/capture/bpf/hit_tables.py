"""The tables in the kernel that hits are added up in: one for each subscription that aggregates, of two banks.

hits ──► bank 0      (epoch is even)
         bank 1 ──► take() ──► rows of a sink
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.aggregate.buckets import Edges, LogLinear
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.key_layout import KeyLayout
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.recipes import key_class
from stapsdtd.capture.bpf.row_decoder import TakenRows
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.kernel.bpf_rows import Octets, RowMap

_log = logging.getLogger(__name__)

_PER_OWNER = layout.MAX_TABLES // 4
_MAX_BANK_BYTES = 8 << 20
_PER_OWNER_EDGES = layout.MAX_EDGES // 4
_ENTRY_BYTES = 64
"""struct htab_elem and its share of the buckets."""
_BUCKETS_OF_A_KEY = 16
_LEAST_ROWS = 64


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def make_rows(self, key_bytes: int, max_entries: int) -> RowMap: ...

    def put_rows(self, key_class: int, bank: int, rows: RowMap) -> None: ...

    def take_rows(self, key_class: int, bank: int) -> None: ...

    def filled(self, bank: int) -> int: ...

    def set_empty(self, bank: int) -> None: ...


@dataclass(slots=True, eq=False)
class HitTable:
    """banks: by parity. users: how many plans name it. is_unused: it may be removed. lock: held from taking rows until
    they are posted. taken: the rows that were taken last.
    """

    number: int
    channel: Channel
    owner: str
    aggregation: Aggregation
    key_class: int
    banks: tuple[RowMap, RowMap]
    users: int = 0
    is_closed: bool = False
    is_unused: bool = False
    is_removed: bool = False
    taken: TakenRows | None = None
    layouts: dict[int, KeyLayout] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _variants: dict[KeyLayout, int] = field(default_factory=dict)

    def variant(self, key_layout: KeyLayout) -> int:
        """Return the number by which keys of this layout are known."""
        number = self._variants.setdefault(key_layout, len(self._variants))
        # before a hit can name it
        self.layouts[number] = key_layout
        return number

    def bank(self, parity: int) -> int:
        """Return the number of a bank among those of all tables."""
        return 2 * self.number + parity

    @property
    def is_behind(self) -> bool:
        """Rows that were taken have not been added up yet."""
        return self.taken is not None and self.taken.is_waiting

    @property
    def byte_count(self) -> int:
        return 2 * self.banks[0].max_entries * _row_bytes(self.key_class)


class HitTables:
    """Tables are opened and closed by one thread, and read and removed by another."""

    def __init__(self, kernel: Kernel, memory: TableMemory) -> None:
        self._kernel = kernel
        self._memory = memory
        self._lock = threading.Lock()
        self._tables: dict[int, HitTable] = {}

    def all(self) -> list[HitTable]:
        with self._lock:
            return list(self._tables.values())

    def of(self, channels: Collection[Channel]) -> list[HitTable]:
        return [table for table in self.all() if table.channel in channels]

    def open(self, channel: Channel, owner: str, aggregation: Aggregation) -> HitTable:
        """Return a subscription's table, a new one the first time. Raises TableFullError, ValueError and OSError."""
        for table in self.all():
            if table.channel is channel:
                if table.aggregation != aggregation:
                    raise ValueError("a subscription has one aggregation")
                return table
        size_class = key_class(aggregation)
        entries = _entries(aggregation, size_class)
        number = self._free_number(owner, aggregation)
        byte_count = 2 * entries * _row_bytes(size_class)
        self._memory.take(owner, byte_count)
        banks: list[RowMap] = []
        try:
            for parity in (0, 1):
                banks.append(self._kernel.make_rows(layout.KEY_BYTES[size_class], entries))
                self._kernel.set_empty(2 * number + parity)
                self._kernel.put_rows(size_class, 2 * number + parity, banks[-1])
        except BaseException:
            for parity, rows in enumerate(banks):
                # the last one may not be there yet
                with contextlib.suppress(OSError):
                    self._kernel.take_rows(size_class, 2 * number + parity)
                rows.close()
            self._memory.give_back(owner, byte_count)
            raise
        table = HitTable(number, channel, owner, aggregation, size_class, (banks[0], banks[1]))
        with self._lock:
            self._tables[number] = table
        return table

    def _free_number(self, owner: str, aggregation: Aggregation) -> int:
        tables = self.all()
        own = [table for table in tables if table.owner == owner]
        if sum(_edge_count(table.aggregation) for table in own) + _edge_count(aggregation) > _PER_OWNER_EDGES:
            raise TableFullError(f"histograms of {owner} have as many edges as one client's may")
        if len(own) >= _PER_OWNER:
            raise TableFullError(f"{owner} have {_PER_OWNER} aggregations, which is the limit")
        used = {table.number for table in tables}
        free = next(number for number in itertools.count() if number not in used)
        if free >= layout.MAX_TABLES:
            raise TableFullError("the bpf engine's tables of aggregations are all in use")
        return free

    def begin(self, plan: ActivePlan) -> None:
        """Keep the tables that a plan names."""
        for table in self._named_by(plan):
            table.users += 1

    def end(self, plan: ActivePlan) -> None:
        """Let go of the tables that a plan names, which no hit uses any more."""
        for table in self._named_by(plan):
            table.users -= 1
            self._let_go(table)

    def close(self, channel: Channel) -> None:
        """Let go of a subscription's table, which goes once no plan names it."""
        for table in self.of([channel]):
            table.is_closed = True
            self._let_go(table)

    def unused(self) -> list[HitTable]:
        """Return the tables to be removed."""
        return [table for table in self.all() if table.is_unused]

    def _let_go(self, table: HitTable) -> None:
        table.is_unused = table.is_closed and not table.users

    def _named_by(self, plan: ActivePlan) -> list[HitTable]:
        if not plan.added:
            return []
        numbers = {added.table for added in plan.added}
        return [table for table in self.all() if table.number in numbers]

    def take(self, table: HitTable, parities: Sequence[int]) -> list[tuple[Octets, Octets]]:
        """Take the keys and rows out of banks that no hit uses. The table is locked. Raises OSError."""
        taken: list[tuple[Octets, Octets]] = []
        if table.is_removed:
            return taken
        for parity in parities:
            if self._kernel.filled(table.bank(parity)):
                keys, rows, is_empty = table.banks[parity].take_all()
                taken.append((keys, rows))
                # what is left is taken with the next
                if is_empty:
                    self._kernel.set_empty(table.bank(parity))
        return taken

    def fill_level(self, table: HitTable, parity: int) -> float:
        """Return how full a bank is, as a part of 1."""
        return self._kernel.filled(table.bank(parity)) / table.banks[parity].max_entries

    def remove(self, table: HitTable) -> None:
        """Give back the memory of a table that no plan names. Waits for the kernel."""
        with table.lock:
            table.is_removed = True
            for parity, rows in enumerate(table.banks):
                try:
                    self._kernel.take_rows(table.key_class, table.bank(parity))
                except OSError as error:
                    _log.warning("a table of rows stays in the kernel until its place is used again: %s", error)
                rows.close()
        self._memory.give_back(table.owner, table.byte_count)
        with self._lock:
            del self._tables[table.number]

    def remove_all(self) -> None:
        """Once there are no more hits."""
        for table in self.all():
            for rows in table.banks:
                rows.close()
        self._tables.clear()


def _row_bytes(size_class: int) -> int:
    return _ENTRY_BYTES + layout.KEY_BYTES[size_class] + layout.ROW.itemsize


def _entries(aggregation: Aggregation, size_class: int) -> int:
    """Return how many rows a bank has room for: the wanted keys, as far as memory allows. It is emptied before it is
    full, unless new keys come faster than that.
    """
    buckets = _bucket_count(aggregation)
    wanted = aggregation.max_keys * min(buckets, _BUCKETS_OF_A_KEY) if aggregation.keys else buckets + 1
    return max(min(wanted, _MAX_BANK_BYTES // _row_bytes(size_class)), _LEAST_ROWS)


def _edge_count(aggregation: Aggregation) -> int:
    return len(aggregation.buckets.edges) if isinstance(aggregation.buckets, Edges) else 0


def _bucket_count(aggregation: Aggregation) -> int:
    match aggregation.buckets:
        case Edges(edges):
            return len(edges) + 1
        case LogLinear(sub_bits):
            # of both signs, with 1 << sub_bits for each power of two
            return 2 * (65 - sub_bits) << sub_bits
        case None:
            return 1
