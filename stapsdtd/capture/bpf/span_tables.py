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
from stapsdtd.capture.bpf.kept import kept_of, kind_for
from stapsdtd.capture.bpf.operands import NotEncodableError
from stapsdtd.capture.bpf.pairs import Kept, keeps_records, kind_of
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.sources import NumberAt, Source, TextAt
from stapsdtd.capture.bpf.span_kinds import SPANS_OF_RECORDS, SpanKind
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.model import Site
from stapsdtd.spans.span import Span

_log = logging.getLogger(__name__)

_OF_THREADS = range(layout.THREAD_SPANS)
_OTHERS = range(layout.THREAD_SPANS, layout.MAX_SPANS)
_SHARE = 4
"""One owner may have so large a part of either, ..."""

_LEFT_SHARE = 16
"""... and a table of records may take so large a part of the memory that its owner has left."""
_ENTRY_BYTES = 64
"""struct htab_elem and its share of the buckets, without key and entry."""


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def make_span(self, max_entries: int, kind: SpanKind) -> EntryMap: ...

    def put_span(self, span: int, entries: EntryMap, kind: SpanKind, *, is_of_thread: bool) -> None: ...

    def take_span(self, span: int, kind: SpanKind) -> None: ...

    def died(self, span: int) -> int: ...

    def attach_to_ends_of_threads(self) -> list[int]: ...


@dataclass(slots=True, eq=False)
class SpanTable:
    """entries: None as long as it is not known how large they are, for want of starts. users: how many plans name it.
    kept: None before there is a start. key_signs: which parts of the key are signed; none if it is the thread, or a
    call. died: how many starts ended with their threads, as far as that was told. lock:
    held until it is.
    """

    number: int
    channel: Channel
    owner: str
    span: Span
    kind: SpanKind
    entries: EntryMap | None = None
    users: int = 0
    is_closed: bool = False
    is_unused: bool = False
    is_removed: bool = False
    kept: Kept | None = None
    key_signs: tuple[bool, ...] = ()
    died: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kept_of(self, site: Site, architecture: str) -> Kept:
        """Return what is kept of starts at a site.

        Raises NotEncodableError, also if that differs from other starts: ends cannot tell which it was.
        """
        kept = kept_of(self.span, site, architecture)
        known = kept if self.kept is None else self.kept
        for capture, source, other in zip(self.span.start_captures, kept.sources, known.sources, strict=True):
            if source != other:
                this, that = _kind(source), _kind(other)
                raise NotEncodableError(f"arg{capture.subject} is {this}, and that of another start {that}")
        return kept

    @property
    def ends_with_threads(self) -> bool:
        return ends_with_threads(self.span)

    @property
    def byte_count(self) -> int:
        return 0 if self.entries is None else _byte_count(self.kind, self.entries.max_entries)


def ends_with_threads(span: Span) -> bool:
    """Report whether the program removes what threads that end have begun. Calls are looked for; see span_watch.py."""
    return span.is_of_thread and not span.is_of_calls


def _kind(source: Source) -> str:
    match source:
        case NumberAt(is_signed=is_signed):
            return "signed" if is_signed else "unsigned"
        case TextAt(is_raw=is_raw):
            return "bytes" if is_raw else "a string"
        case _:
            return "unavailable"


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
        table = SpanTable(self._free_number(owner, span), channel, owner, span, kind_of(span))
        if keeps_records(span):
            table.kind = SPANS_OF_RECORDS[0]
        else:
            self._make(table, span.max_open)
        with self._lock:
            self._tables[table.number] = table
        return table

    def keep(self, table: SpanTable, kept: Kept) -> None:
        """Make room in a table for starts, of which nothing was known yet.

        Raises TableFullError, ValueError and OSError.
        """
        if keeps_records(table.span):
            kind = kind_for(kept)
            if table.entries is None:
                table.kind = kind
                self._make(table, self._most_records(table))
            elif table.kind != kind:
                raise NotEncodableError("its start is not as large as an earlier one, which could not be armed")
        table.kept = kept

    def _most_records(self, table: SpanTable) -> int:
        """Return for how many there is room. Each waits as long as a call takes, which for most is short."""
        room = self._memory.left(table.owner) // _LEFT_SHARE // _byte_count(table.kind, 1)
        return min(table.span.max_open, max(room, 1))

    def _make(self, table: SpanTable, max_entries: int) -> None:
        byte_count = _byte_count(table.kind, max_entries)
        self._memory.take(table.owner, byte_count)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.give_back, table.owner, byte_count)
            entries = self._kernel.make_span(max_entries, table.kind)
            undo.callback(entries.close)
            with self._lock:
                # each thread that ends from now on is seen
                if table.ends_with_threads and not self._links:
                    self._links = self._kernel.attach_to_ends_of_threads()
                self._kernel.put_span(table.number, entries, table.kind, is_of_thread=table.ends_with_threads)
            table.entries = entries
            undo.pop_all()

    def _free_number(self, owner: str, span: Span) -> int:
        tables = self.all()
        numbers = _OF_THREADS if ends_with_threads(span) else _OTHERS
        most = len(numbers) // _SHARE
        if sum(table.owner == owner and table.number in numbers for table in tables) >= most:
            raise TableFullError(f"{owner} have {most} spans, which is the limit")
        used = {table.number for table in tables}
        free = next((number for number in numbers if number not in used), None)
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
        if table.is_removed or not table.ends_with_threads:
            return 0
        before, table.died = table.died, self._kernel.died(table.number)
        return table.died - before

    def remove_unused(self) -> None:
        """Give back the memory of tables that no plan names. Waits for the kernel."""
        for table in [table for table in self.all() if table.is_unused]:
            with table.lock:
                table.is_removed = True
                if table.entries is not None:
                    self._remove(table, table.entries)
            self._memory.give_back(table.owner, table.byte_count)
            with self._lock:
                del self._tables[table.number]
                if not any(table.ends_with_threads for table in self._tables.values()):
                    self._detach()

    def _remove(self, table: SpanTable, entries: EntryMap) -> None:
        try:
            self._kernel.take_span(table.number, table.kind)
        except OSError as error:
            _log.warning("a table of spans stays in the kernel until its place is used again: %s", error)
        entries.close()

    def _detach(self) -> None:
        while self._links:
            os.close(self._links.pop())

    def remove_all(self) -> None:
        """Once there are no more hits."""
        self._detach()
        for table in self.all():
            if table.entries is not None:
                table.entries.close()
        self._tables.clear()


def _byte_count(kind: SpanKind, max_entries: int) -> int:
    return max_entries * (_ENTRY_BYTES + kind.key_bytes + kind.entry_bytes)
