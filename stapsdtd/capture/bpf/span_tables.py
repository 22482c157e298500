"""The tables in the kernel that keep starts until their ends: one for each subscription that pairs.

start ──► table ──► end
            ├─────► the end of its thread, which bpf/span.h sees
            └─────► nobody, for too long: see span_watch.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.operands import NotEncodableError
from stapsdtd.capture.bpf.pairs import Numbers, is_small
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.model import Site
from stapsdtd.spans.span import Span

_log = logging.getLogger(__name__)

_PER_OWNER = layout.MAX_SPANS // 4
_ENTRY_BYTES = 64
"""struct htab_elem and its share of the buckets, without key and entry."""


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def make_span(self, max_entries: int, *, is_small: bool) -> EntryMap: ...

    def put_span(self, span: int, entries: EntryMap, *, is_of_thread: bool, is_small: bool) -> None: ...

    def take_span(self, span: int, *, is_small: bool) -> None: ...

    def died(self, span: int) -> int: ...

    def attach_to_ends_of_threads(self) -> list[int]: ...


@dataclass(slots=True, eq=False)
class SpanTable:
    """users: how many plans name it. signs: which of the words kept of starts are signed; None before there is a start.
    died: how many starts ended with their threads, as far as that was told. lock: held until it is.
    """

    number: int
    channel: Channel
    owner: str
    span: Span
    entries: EntryMap
    users: int = 0
    is_closed: bool = False
    is_unused: bool = False
    is_removed: bool = False
    signs: tuple[bool, ...] | None = None
    died: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kept_of(self, site: Site, architecture: str) -> Numbers:
        """Return what is kept of starts at a site.

        Raises NotEncodableError, also if a word's sign is not that of other starts: ends cannot tell which it was.
        """
        kept = Numbers.of(self.span.start_captures, site, architecture)
        for capture, is_signed, known in zip(
            self.span.start_captures, kept.signs, self.signs or kept.signs, strict=True
        ):
            if is_signed is not known:
                this, other = ("signed", "unsigned") if is_signed else ("unsigned", "signed")
                raise NotEncodableError(f"arg{capture.subject} is {this}, and that of another start {other}")
        return kept

    @property
    def known_signs(self) -> tuple[bool, ...]:
        """Return which words are signed; any, as long as there are no starts and thus no pairs."""
        return (False,) * len(self.span.start_captures) if self.signs is None else self.signs

    @property
    def byte_count(self) -> int:
        return _byte_count(self.span)

    @property
    def is_small(self) -> bool:
        return is_small(self.span)


class SpanTables:
    """Tables are opened and closed by one thread, and watched and removed by another."""

    def __init__(self, kernel: Kernel, memory: TableMemory) -> None:
        self._kernel = kernel
        self._memory = memory
        self._lock = threading.Lock()
        self._tables: dict[int, SpanTable] = {}
        self._links: list[int] = []

    def all(self) -> list[SpanTable]:
        with self._lock:
            return list(self._tables.values())

    def of(self, channels: Collection[Channel]) -> list[SpanTable]:
        return [table for table in self.all() if table.channel in channels]

    def open(self, channel: Channel, owner: str, span: Span) -> SpanTable:
        """Return a subscription's table, a new one the first time. Raises TableFullError, ValueError and OSError."""
        for table in self.of([channel]):
            if table.span != span:
                raise ValueError("a subscription has one span")
            return table
        number = self._free_number(owner)
        byte_count = _byte_count(span)
        self._memory.take(owner, byte_count)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.give_back, owner, byte_count)
            entries = self._kernel.make_span(span.max_open, is_small=is_small(span))
            undo.callback(entries.close)
            table = SpanTable(number, channel, owner, span, entries)
            with self._lock:
                # each thread that ends from now on is seen
                if span.is_of_thread and not self._links:
                    self._links = self._kernel.attach_to_ends_of_threads()
                self._kernel.put_span(number, entries, is_of_thread=span.is_of_thread, is_small=is_small(span))
                self._tables[number] = table
            undo.pop_all()
        return table

    def _free_number(self, owner: str) -> int:
        tables = self.all()
        if sum(table.owner == owner for table in tables) >= _PER_OWNER:
            raise TableFullError(f"{owner} have {_PER_OWNER} spans, which is the limit")
        used = {table.number for table in tables}
        free = next((number for number in range(layout.MAX_SPANS) if number not in used), None)
        if free is None:
            raise TableFullError("the bpf engine's tables of spans are all in use")
        return free

    def begin(self, plan: ActivePlan) -> None:
        """Keep the tables that a plan names."""
        for table in self._named_by(plan):
            table.users += 1

    def end(self, plan: ActivePlan) -> None:
        """Let go of the tables that a plan names, which no hit uses any more."""
        for table in self._named_by(plan):
            table.users -= 1
            table.is_unused = table.is_closed and not table.users

    def close(self, channel: Channel) -> None:
        """Let go of a subscription's table, which goes once no plan names it."""
        for table in self.of([channel]):
            table.is_closed = True
            table.is_unused = not table.users

    def _named_by(self, plan: ActivePlan) -> list[SpanTable]:
        if not plan.paired:
            return []
        numbers = {paired.span for paired in plan.paired}
        return [table for table in self.all() if table.number in numbers]

    def take_died(self, table: SpanTable) -> int:
        """Return how many more starts ended with their threads. The table is locked."""
        if table.is_removed:
            return 0
        before, table.died = table.died, self._kernel.died(table.number)
        return table.died - before

    def remove_unused(self) -> None:
        """Give back the memory of tables that no plan names. Waits for the kernel."""
        for table in [table for table in self.all() if table.is_unused]:
            with table.lock:
                table.is_removed = True
                try:
                    self._kernel.take_span(table.number, is_small=table.is_small)
                except OSError as error:
                    _log.warning("a table of spans stays in the kernel until its place is used again: %s", error)
                table.entries.close()
            self._memory.give_back(table.owner, table.byte_count)
            with self._lock:
                del self._tables[table.number]
                if not any(table.span.is_of_thread for table in self._tables.values()):
                    self._detach()

    def _detach(self) -> None:
        while self._links:
            os.close(self._links.pop())

    def remove_all(self) -> None:
        """Once there are no more hits."""
        self._detach()
        for table in self.all():
            table.entries.close()
        self._tables.clear()


def _byte_count(span: Span) -> int:
    return span.max_open * (_ENTRY_BYTES + sum(layout.SPAN_BYTES[is_small(span)]))
