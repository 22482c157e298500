"""A kernel for the bpf engine: tables and rings in memory, events in a list, bpf/stapsdt.bpf.c told again in Python.

A hit runs the program of every event that reaches it, as an uprobe runs all of its consumers.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from stapsdtd.arch import ARCHITECTURES
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.inner_maps import InnerMaps
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.layout import OperandKind, Take
from stapsdtd.capture.bpf.link_closer import LinkCloser
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.rings import Records, Ring
from stapsdtd.capture.bpf.slots import Slot, Slots, Word
from stapsdtd.capture.bpf.span_kinds import SMALL_SPAN, SPAN_OF_WORDS, SPANS_OF_RECORDS, SpanKind
from stapsdtd.capture.bpf.tables import Generation, PlanEntry, PlanSpec, Pools, Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import U64
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.kernel.bpf_rows import RowMap
from stapsdtd.kernel.places import FunctionPlace, Place
from stapsdtd.kernel.uprobe_links import NoMainThreadError
from stapsdtd.query.program import ACCEPT, NO_WORD, REJECT, UNDECIDED, Operation, Source
from stapsdtd.spans.span import SpanCounts
from tests.unit.fake_rows import HIT_KINDS, FakeRowTables, MemoryRows, made_key
from tests.unit.fake_spans import FakeSpans, MemoryEntries, packed
from tests.unit.fake_words import calculated, holds
from tests.unit.samples import event_rows

P = ParamSpec("P")
T = TypeVar("T")

CPUS = 2
LOAD_ADDRESS = 0x7F0000000000
PATIENCE_SECONDS = 20

_PAGE = mmap.PAGESIZE
_BUSY = 1 << 31
_DISCARDED = 1 << 30
UID, GID = 1000, 1001
"""Of all threads that hit."""

_ALL_BITS = (1 << 64) - 1
_TID = 11


class RecordingSink:
    """calls: what each delivery brought, as (time_ns, pid, tid, cpu, comm, site_id, values…).

    before_delivery is called first, and may raise.
    """

    def __init__(self) -> None:
        self.before_delivery: Callable[[], None] = lambda: None
        self.calls: list[list[tuple[Any, ...]]] = []
        self.losses: Counter[LossStage] = Counter()
        self.fired_count = 0
        self.filtered_count = 0

    def deliver(self, batch: EventBatch) -> None:
        self.before_delivery()
        self.calls.append(event_rows(batch))

    def fired(self, count: int) -> None:
        self.fired_count += count

    def filtered(self, count: int, undecided: int = 0) -> None:
        del undecided
        self.filtered_count += count

    def spanned(self, counts: SpanCounts) -> None:
        del counts

    def lost(self, stage: LossStage, count: int) -> None:
        self.losses[stage] += count

    @property
    def told(self) -> tuple[int, int, int, dict[LossStage, int]]:
        """(fired, delivered, filtered, lost by stage)."""
        return self.fired_count, len(self.rows), self.filtered_count, self.losses

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return [row for rows in self.calls for row in rows]

    @property
    def values(self) -> list[tuple[Any, ...]]:
        """(site_id, values…) of each event, in the order in which they came."""
        return [row[5:] for row in self.rows]

    @property
    def pids(self) -> list[int]:
        return [row[1] for row in self.rows]


def record(
    stride: int,
    generation: int,
    *values: int,
    time_ns: int = 0,
    pid: int = 10,
    cpu: int = 0,
    matched: int = 0,
    missing: int = 0,
) -> bytes:
    """Of a thread 11 named app, as it is in a ring of this stride, behind the kernel's header."""
    head = np.array([(time_ns, _TID, pid, matched, generation, missing, cpu, b"app")], layout.RECORD)
    body = head.tobytes() + struct.pack(f"={len(values)}Q", *(value & _ALL_BITS for value in values))
    return body.ljust(stride - layout.RECORD_HEADER, b"\0")


class MemoryRing(Ring):
    """The second mapping of the data is a copy: everything is written twice.

    before_peek and before_raw are called first, and may raise.
    """

    def __init__(self, stride: int, size: int) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.before_peek: Callable[[], None] = lambda: None
        self.before_raw: Callable[[], None] = lambda: None
        super().__init__(stride, size, create=_memory)
        self._memory = mmap.mmap(self._descriptor, 2 * _PAGE + 2 * size)
        self._produced = 0
        self.is_closed = False

    def fileno(self) -> int:
        return self._wake

    def peek(self, most: int) -> Records:
        self.before_peek()
        return super().peek(most)

    def raw(self) -> memoryview:
        self.before_raw()
        return super().raw()

    def close(self) -> None:
        assert not self.is_closed
        os.close(self._wake)
        super().close()
        self.is_closed = True

    def put(self, body: bytes, flags: int = 0) -> bool:
        """Answer whether there was room."""
        (consumed,) = struct.unpack_from("=Q", self._memory, 0)
        if self._produced + self.stride - consumed > self.size:
            return False
        entry = struct.pack("=II", len(body) | flags, 0) + body
        assert len(entry) == self.stride
        begin = self._produced % self.size
        for at, byte_count in ((begin, self.stride), (begin + self.size, min(self.stride, self.size - begin))):
            self._memory[2 * _PAGE + at : 2 * _PAGE + at + byte_count] = entry[:byte_count]
        if begin + self.stride > self.size:
            rest = entry[self.size - begin :]
            self._memory[2 * _PAGE : 2 * _PAGE + len(rest)] = rest
        self._produced += self.stride
        struct.pack_into("=Q", self._memory, _PAGE, self._produced)
        return True

    def put_busy(self, body: bytes) -> Callable[[], None]:
        """Begin a record; what is answered completes it."""
        begin = self._produced % self.size
        assert self.put(body, _BUSY)

        def complete() -> None:
            for at in (begin, begin + self.size):
                struct.pack_into("=I", self._memory, 2 * _PAGE + at, len(body))

        return complete

    def put_discarded(self, body: bytes) -> None:
        assert self.put(body, _DISCARDED)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)


class FakeLoaded(Loaded):
    """puts: (class, size) of each ring that the program was given. share: how many records of a process go to a spare
    ring where there is no room. waits_refused: what the next waits for hits raise, one each. waits: how many began.
    before_reader_waits: is called first, and may raise.
    """

    def __init__(self) -> None:
        self.cpus = CPUS
        self.program = 77
        self.linked_program = None
        # there are none: tests of chains are in tests/kernel
        self.chains = InnerMaps(-1)
        self.tables = {
            ".bss.index": mmap.mmap(-1, 4 * layout.INDEX_ENTRIES),
            ".bss.slots": mmap.mmap(-1, layout.SLOT.itemsize * layout.MAX_SLOTS),
            ".bss.plans": mmap.mmap(-1, layout.PLAN.itemsize * layout.MAX_PLANS),
            ".bss.operands": mmap.mmap(-1, layout.OPERAND.itemsize * layout.MAX_OPERANDS),
            ".bss.tests": mmap.mmap(-1, layout.TEST.itemsize * layout.MAX_TESTS),
            ".bss.recipes": mmap.mmap(-1, layout.RECIPE.itemsize * layout.MAX_RECIPES),
            ".bss.edges": mmap.mmap(-1, 8 * layout.MAX_EDGES),
            ".bss.pairings": mmap.mmap(-1, layout.PAIRING.itemsize * layout.MAX_PAIRING_ROWS),
            "counters": mmap.mmap(-1, 8 * layout.MAX_COUNTERS * CPUS),
        }
        self.reader_waits = False
        self.is_closed = False
        self.row_tables = FakeRowTables()
        self.spans = FakeSpans()
        self.made: list[MemoryRing] = []
        self.rings: dict[int, MemoryRing] = {}
        self.puts: list[tuple[int, int]] = []
        self.spares: dict[int, MemoryRing] = {}
        self.share = 0
        self.shares: Counter[int] = Counter()
        self.refuse_rings: OSError | None = None
        self.refuse_puts: OSError | None = None
        self.after_put: Callable[[], None] = lambda: None
        self.waits_refused: list[OSError] = []
        self.waits = 0
        self.before_reader_waits: Callable[[bool], None] = lambda _waits: None
        self._under_way = set[object]()
        self._one_is_over = threading.Condition()

    def table(self, name: str) -> mmap.mmap:
        return self.tables[name]

    def make_ring(self, stride: int, size: int) -> MemoryRing:
        if self.refuse_rings is not None:
            raise self.refuse_rings
        self.made.append(MemoryRing(stride, size))
        return self.made[-1]

    def put_ring(self, record_class: int, ring: int) -> None:
        if self.refuse_puts is not None:
            raise self.refuse_puts
        (found,) = (each for each in self.made if not each.is_closed and each.fileno() == ring)
        assert found.stride == layout.STRIDES[record_class]
        self.rings[record_class] = found
        self.puts.append((record_class, found.size))
        self.after_put()

    def put_spare(self, record_class: int, ring: int) -> None:
        (found,) = (each for each in self.made if not each.is_closed and each.fileno() == ring)
        assert found.stride == layout.STRIDES[record_class]
        self.spares[record_class] = found
        self.made.remove(found)

    def spare(self, record_class: int, pid: int) -> MemoryRing | None:
        """Where a process's record goes that found no room."""
        self.shares[pid] += 1
        return self.spares[record_class] if self.shares[pid] <= self.share else None

    def take_ring(self, record_class: int) -> None:
        del self.rings[record_class]

    def make_rows(self, key_bytes: int, max_entries: int) -> MemoryRows:
        return MemoryRows(key_bytes, max_entries)

    def put_rows(self, key_class: int, bank: int, rows: RowMap) -> None:
        assert isinstance(rows, MemoryRows)
        self.row_tables.banks[key_class, bank] = rows

    def take_rows(self, key_class: int, bank: int) -> None:
        del self.row_tables.banks[key_class, bank]

    def filled(self, bank: int) -> int:
        return self.row_tables.filled[bank]

    def set_empty(self, bank: int) -> None:
        self.row_tables.filled[bank] = 0

    def make_span(self, max_entries: int, kind: SpanKind) -> MemoryEntries:
        if self.spans.refuse is not None:
            raise self.spans.refuse
        return MemoryEntries(max_entries, kind)

    def put_span(self, span: int, entries: EntryMap, kind: SpanKind, *, is_of_thread: bool) -> None:
        assert isinstance(entries, MemoryEntries)
        assert entries.kind == kind
        self.spans.tables[span] = entries
        if is_of_thread:
            self.spans.died[span] = 0
            self.spans.of_threads.add(span)

    def take_span(self, span: int, kind: SpanKind) -> None:
        assert self.spans.tables.pop(span).kind == kind
        self.spans.of_threads.discard(span)

    def died(self, span: int) -> int:
        return self.spans.died[span]

    def attach_to_ends_of_threads(self) -> list[int]:
        self.spans.attached = [os.eventfd(0) for _ in range(2)]
        return list(self.spans.attached)

    @property
    def parity(self) -> int:
        return self.row_tables.parity

    def flip(self) -> int:
        self.row_tables.parity ^= 1
        return 1 - self.row_tables.parity

    def set_reader_waits(self, waits: bool) -> None:
        self.before_reader_waits(waits)
        self.reader_waits = waits

    def hit_begins(self, hit: object) -> None:
        with self._one_is_over:
            self._under_way.add(hit)

    def hit_is_over(self, hit: object) -> None:
        with self._one_is_over:
            self._under_way.remove(hit)
            self._one_is_over.notify_all()

    def wait_for_hits(self) -> None:
        """As synchronize_rcu() does: hits that begin meanwhile are not waited for."""
        self.waits += 1
        if self.waits_refused:
            raise self.waits_refused.pop()
        with self._one_is_over:
            begun = set(self._under_way)
            assert self._one_is_over.wait_for(lambda: not begun & self._under_way, PATIENCE_SECONDS)

    def wake_up(self, ring: MemoryRing) -> None:
        """As a hit does, which takes the flag back."""
        if self.reader_waits:
            self.reader_waits = False
            ring.wake()

    def counters(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """By CPU and cell."""
        return np.frombuffer(self.tables["counters"], "u8").reshape(CPUS, layout.MAX_COUNTERS)

    def close(self) -> None:
        self.is_closed = True


class FakeTables(Tables):
    """generations: of all plans that were allocated. refuse_totals: what totals() raises."""

    def __init__(self, table: Callable[[str], mmap.mmap], cpus: int, pools: Pools | None = None) -> None:
        super().__init__(table, cpus, pools)
        self.generations: list[Generation] = []
        self.refuse_totals: Exception | None = None

    def allocate_plan(self, plan: PlanSpec) -> PlanEntry:
        entry = super().allocate_plan(plan)
        self.generations.append(entry.generation)
        return entry

    def totals(self) -> U64:
        if self.refuse_totals is not None:
            raise self.refuse_totals
        return super().totals()


class FakeSlots(Slots):
    """around_change: is called before and after each."""

    def __init__(self, words: U64, pool: Pool) -> None:
        super().__init__(words, pool)
        self.around_change: Callable[[], None] = lambda: None

    def _write(self, slot: Slot) -> None:
        self.around_change()
        super()._write(slot)
        self.around_change()


class AtOnce(Executor):
    """Works in the caller's thread: at once or, while it is held, not before it is released or shut down."""

    def __init__(self) -> None:
        self.is_held = False
        self._held: list[Callable[[], object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()

        def work() -> None:
            done.set_result(fn(*args, **kwargs))

        if self.is_held:
            self._held.append(work)
        else:
            work()
        return done

    def release(self) -> None:
        self.is_held = False
        held, self._held = self._held, []
        for work in held:
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        self.release()


class FakeEvent:
    """In place of ProbeEvent. scopes: the processes for which it is open, None for all."""

    holds_event_mutex = True
    own_program = None

    def __init__(self, kernel: FakeKernel, name: str, places: Sequence[Place | FunctionPlace], cookie: int) -> None:
        self._kernel = kernel
        self._name = name
        self.places: list[tuple[str, int]] = []
        self.scopes: set[int | None] = set()
        self._cookie = cookie
        for place in places:
            if isinstance(place, FunctionPlace):
                kernel.step(f"define {self._name} {place}")
                continue
            kernel.step(f"define {self._name} {str(place).partition(':')[2]}")
            self.places.append((os.readlink(place.path), place.offset))
        kernel.events[self._name] = self

    def arm(self, armed: int | None) -> None:
        self._kernel.step(f"arm {self._name} {armed}")
        self.scopes.add(armed)
        self._kernel.after_arming()

    def reaches(self, path: str, offset: int, pid: int) -> bool:
        return (path, offset) in self.places and bool(self.scopes & {None, pid})

    def found(self, _path: str, _offset: int, address: int) -> tuple[int, int]:
        """Answer the group and the slot of a hit."""
        first, mask, shift = self._cookie & 0xFFFFF, self._cookie >> 20 & 0xFFF, self._cookie >> 32 & 0xF
        index = np.frombuffer(self._kernel.loaded.table(".bss.index"), "u4")
        return self._cookie >> layout.GROUP_SHIFT, int(index[first + (address >> shift & mask)])

    def unpatch(self) -> None:
        self.scopes.clear()

    disarm = unpatch

    def renew_in(self, pid: int) -> bool:
        if pid in self.scopes:
            self._kernel.step(f"renew {self._name} in {pid}")
        return True

    def unpatch_in(self, armed: int) -> None:
        self.scopes.discard(armed)

    def missed(self, _of_events: Callable[[], Mapping[str, int]]) -> int:
        return 0

    def remove(self) -> None:
        self._kernel.step(f"remove {self._name}", self.scopes.clear)
        del self._kernel.events[self._name]


class FakeLink(FakeEvent):
    """In place of UprobeLink."""

    holds_event_mutex = False

    def __init__(self, kernel: FakeKernel, name: str, places: Sequence[Place], cookies: Sequence[int]) -> None:
        super().__init__(kernel, name, places, 0)
        self._cookies = dict(zip(self.places, cookies, strict=True))

    def arm(self, armed: int | None) -> None:
        if None in self.scopes:
            return
        if armed is not None and armed in self._kernel.without_main_thread:
            raise NoMainThreadError(armed)
        # the kernel would run the program twice
        assert armed is not None or not self.scopes
        super().arm(armed)

    def renew_in(self, pid: int) -> bool:
        return pid not in self.scopes

    def found(self, path: str, offset: int, _address: int) -> tuple[int, int]:
        cookie = self._cookies[path, offset]
        return cookie >> layout.GROUP_SHIFT, cookie & 0xFFFFFFFF


class FakeKernel:
    """log: each step, `define g0 0x10(0x20)`, `arm g0 None`, `remove g0`. path: the file that is hit.

    without_main_thread: processes whose main thread has ended.
    fail: answers what a step raises; before_step is called first, while all is as it was; after_arming when a process
    is armed and the engine does not know it yet.
    memory: what processes have there, by its address; what is not among it is not resident. on_disk: what is
    there once it was touched. touched: what was, as (pid, address, bytes).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.loaded = FakeLoaded()
        self.pools = Pools()
        self.tables = FakeTables(self.loaded.table, self.loaded.cpus, self.pools)
        words = np.frombuffer(self.loaded.table(".bss.slots"), "u8", layout.MAX_SLOTS)
        self.slots = self.tables.slots = FakeSlots(words, self.pools.slots)
        # the group that handled a hit, by its process and slot
        self.marks: dict[tuple[int, int], int] = {}
        self.reaper_worker = AtOnce()
        self.reaper = EventReaper(worker=self.reaper_worker, links=LinkCloser(self.reaper_worker))
        self.events: dict[str, FakeEvent] = {}
        self.without_main_thread: set[int] = set()
        self._link_numbers = itertools.count()
        self.log: list[str] = []
        self.memory: dict[int, bytes] = {}
        self.on_disk: dict[int, bytes] = {}
        self.touched: list[tuple[int, int, int]] = []
        self.paging = Paging(self._touch, lambda pid: pid, lambda _pid, _address: 1 << 20)
        self.fail: Callable[[str], Exception | None] = lambda _step: None
        self.before_step: Callable[[], None] = lambda: None
        self.after_arming: Callable[[], None] = lambda: None

    def close(self) -> None:
        for ring in [*self.loaded.made, *self.loaded.spares.values()]:
            if not ring.is_closed:
                ring.close()

    def _touch(self, pid: int, address: int, byte_count: int) -> None:
        self.memory |= {there: data for there, data in self.on_disk.items() if there == address}
        self.touched.append((pid, address, byte_count))

    def make_event(self, name: str, places: Sequence[Place | FunctionPlace], cookie: int) -> FakeEvent:
        group, event = name.split("/")
        assert event.endswith(group.removeprefix("stapsdtd"))
        return FakeEvent(self, event.partition("_")[0], places, cookie)

    def make_link(self, places: Sequence[Place], cookies: Sequence[int]) -> FakeLink:
        return FakeLink(self, f"l{next(self._link_numbers)}", places, cookies)

    def step(self, text: str, in_any_case: Callable[[], None] = lambda: None) -> None:
        self.before_step()
        self.log.append(text)
        in_any_case()
        error = self.fail(text)
        if error is not None:
            raise error

    def steps(self) -> list[str]:
        """Answer those since the last time."""
        found, self.log = self.log, []
        return found

    @property
    def scopes(self) -> dict[str, set[int | None]]:
        return {name: event.scopes for name, event in self.events.items()}

    def hit(self, offset: int, *, pid: int = 10, cpu: int = 0, path: str | None = None, **registers: int) -> None:
        for run in self.programs(offset, pid=pid, cpu=cpu, path=path, **registers):
            run()

    def begin_hits(self, offset: int, **context: Any) -> list[Callable[[], None]]:
        """Begin a hit of each event that reaches it; what is answered ends them, for which the kernel may take long."""
        return [begin() for begin in self._programs(offset, **context)]

    def programs(self, offset: int, **context: Any) -> list[Callable[[], None]]:
        """Begin a hit. What is answered runs its programs: that of the event that was made last comes first."""
        return [partial(_run, begin) for begin in self._programs(offset, **context)]

    def wait_for_uprobes(self) -> None:
        """See `Loaded`. Hits that have begun are those of whoever wants to be called at each step."""
        self.before_step()

    def _programs(
        self, offset: int, *, pid: int = 10, cpu: int = 0, path: str | None = None, **registers: int
    ) -> list[Callable[[], Callable[[], None]]]:
        by_place = {ARCHITECTURES["x86-64"].pt_regs[name]: value for name, value in registers.items()}
        ip = LOAD_ADDRESS + offset
        by_place[ARCHITECTURES["x86-64"].pt_regs["rip"]] = ip
        place = path or self.path, offset
        reached = [event for event in reversed(list(self.events.values())) if event.reaches(*place, pid)]
        return [partial(_Hit(self, pid, cpu, by_place).begin, *event.found(*place, ip)) for event in reached]


def _run(begin: Callable[[], Callable[[], None]]) -> None:
    begin()()


class _Hit:
    """bpf/stapsdt.bpf.c, without what is there for the verifier."""

    def __init__(self, kernel: FakeKernel, pid: int, cpu: int, registers: Mapping[int, int]) -> None:
        self._loaded = kernel.loaded
        self._memory = kernel.memory
        self._marks = kernel.marks
        self._pid = pid
        self._cpu = cpu
        self._registers = registers
        self._plan: Any = None
        self._generation = self._parity = 0
        # what is known of each pair that it makes: time elapsed, words of the start, and which are missing
        self._pairs: dict[int, tuple[int, ...]] = {}
        self._starts: dict[int, bytes] = {}
        # None where there is none
        self._made: dict[int, int | None] = {}

    def _row(self, table: str, dtype: np.dtype[Any], number: int) -> Any:
        return np.frombuffer(self._loaded.tables[table], dtype, 1, number * dtype.itemsize)[0]

    def begin(self, group: int, slot_number: int) -> Callable[[], None]:
        """Go as far as to know the plan; what is answered does the rest."""
        word = Word.unpack(int(self._row(".bss.slots", layout.SLOT, slot_number)["word"]))
        if not word.plan or not self._handles(word, group, slot_number):
            return lambda: None
        # what is read of it later is what stands there then
        self._plan = self._row(".bss.plans", layout.PLAN, word.plan)
        self._generation = int(self._plan["generation"])
        self._parity = self._loaded.parity
        self._loaded.hit_begins(self)
        return self._end

    def _handles(self, word: Word, group: int, slot: int) -> bool:
        """bpf/move.h, where group numbers do not begin anew."""
        key = self._pid, slot
        if not word.oldest <= group <= word.newest:
            return False
        if group < self._marks.get(key, 0) <= word.newest:
            if group == word.oldest:
                del self._marks[key]
            return False
        if group != word.oldest:
            self._marks[key] = group
        return True

    def _end(self) -> None:
        matched = self._matched()
        if not self._plan["is_paired" if matched else "is_single"]:
            self._count(layout.Counter.HITS)
        matched = self._run(self._pair(matched), int(self._plan["pair_tests"]))
        matched = self._aggregate(matched) & int(self._plan["emitted"])
        if matched and not self._write(matched):
            for bit in range(layout.MAX_FILTERS):
                if matched >> bit & 1:
                    self._count(layout.Counter.LOST, bit)
        self._loaded.hit_is_over(self)

    def _pair(self, matched: int) -> int:
        """Answer the filters that accepted the hit, without those of ends that end nothing."""
        for number in range(int(self._plan["pairing_count"])):
            pairing = self._row(".bss.pairings", layout.PAIRING, int(self._plan["pairings"]) + number)
            bit, first, cells = (int(pairing[name]) for name in ("filter", "operands", "cells"))
            if not matched >> bit & 1:
                continue
            behind = first + int(pairing["parts"])
            key, missing = self._words(first, behind)
            pair = None
            if missing:
                counted = [layout.SpanCounter.LOST]
            else:
                kind = _kind_of(pairing)
                if pairing["is_of_call"]:
                    key = [self._pid, key[0], key[1] | _TID << 32]
                as_key = packed([self._pid] if pairing["is_of_thread"] else key, kind.key_bytes // 8)
                if pairing["is_end"]:
                    counted, pair = self._loaded.spans.end(pairing, as_key, time.monotonic_ns())
                    self._starts[number] = struct.pack(f"={len(pair or ())}Q", *(pair or ()))
                else:
                    assert self._loaded.spans.tables[int(pairing["span"])].kind == kind
                    operands = range(behind, behind + int(pairing["words"]))
                    wanted = int(pairing["start_filter"])
                    is_wanted = not wanted or bool(matched >> (wanted - 1) & 1)
                    entry = self._kept(kind, operands, is_wanted=is_wanted)
                    counted = self._loaded.spans.begin(pairing, as_key, entry)
            for counter in counted:
                self._count_cell(int(self._plan["counters"]) + cells + counter)
            if pair is not None and pair[0] < 0:
                self._count(layout.Counter.FILTERED, bit)
                pair = None
            if pair is not None:
                self._pairs[number] = pair[:1] if pairing["start_class"] else pair
            elif pairing["is_end"]:
                matched &= ~(1 << bit)
        return matched

    def _kept(self, kind: SpanKind, operands: range, *, is_wanted: bool) -> bytes:
        if kind.start_class:
            head, texts = self._record(
                [self._row(".bss.operands", layout.OPERAND, each) for each in operands], matched=0
            )
            return (head + texts).ljust(kind.entry_bytes, b"\0")
        kept, missing = self._words(operands.start, operands.stop)
        begun = time.monotonic_ns() | (0 if is_wanted else layout.UNWANTED_START)
        thread = self._pid << 32 | _TID
        if kind == SMALL_SPAN:
            return packed([begun, thread], 2)
        return packed([begun, *kept], layout.PAIR_WORDS) + packed([missing << 1, thread], 2)

    def _words(self, first: int, end: int) -> tuple[list[int], int]:
        """The numbers of some operands, and a bit for each that could not be read."""
        head = {int(kind): own for kind, own in zip(HIT_KINDS, (self._pid, _TID, self._cpu), strict=True)}
        words: list[int] = []
        missing = 0
        for number in range(first, end):
            operand = self._row(".bss.operands", layout.OPERAND, number)
            value, is_there = self._fetched(operand) if operand["kind"] not in head else (head[operand["kind"]], True)
            missing |= (not is_there) << len(words)
            words.append(value)
        return words, missing

    def _aggregate(self, matched: int) -> int:
        """Answer the filters that accepted the hit, without those of recipes that added it to a row of their own."""
        matched = self._run(matched, int(self._plan["calculations"]))
        edges = np.frombuffer(self._loaded.tables[".bss.edges"], "i8").tolist()
        head = {int(kind): own for kind, own in zip(HIT_KINDS, (self._pid, _TID, self._cpu), strict=True)}
        for number in range(int(self._plan["recipe_count"])):
            recipe = self._row(".bss.recipes", layout.RECIPE, int(self._plan["recipes"]) + number)
            if not matched >> int(recipe["filter"]) & 1:
                continue
            count = int(recipe["parts"]) + int(recipe["has_value"])
            firsts = range(int(recipe["operands"]), int(recipe["operands"]) + count)
            operands = [self._row(".bss.operands", layout.OPERAND, first) for first in firsts]
            if recipe["hands_over"]:
                matched &= ~(1 << int(recipe["filter"]))
            made = made_key(recipe, operands, self._text_or_number, edges, head)
            if made is None:
                matched |= 1 << int(recipe["filter"])
            elif not self._loaded.row_tables.add(recipe, *made, self._parity):
                self._count_cell(int(self._plan["counters"]) + int(recipe["lost"]))
        return matched

    def _text_or_number(self, operand: Any) -> tuple[int, bool, bytes]:
        value, is_there = self._fetched(operand)
        if not is_there or operand["take"] == Take.NUMBER:
            return value, is_there, b""
        text = self._text(operand, value)
        return value, text is not None, text or b""

    def _text(self, operand: Any, address: int) -> bytes | None:
        """The string or the bytes at an address; None if they cannot be read."""
        limit, text = int(operand["limit"]), self._memory.get(address)
        if operand["take"] == Take.BYTES:
            return text[:limit] if text is not None and len(text) >= limit else None
        return None if text is None else text.partition(b"\0")[0][: limit - 1]

    def _count(self, counter: layout.Counter, bit: int = 0) -> None:
        self._count_cell(int(self._plan["counters"]) + counter + int(self._plan["filter_counters"]) * bit)

    def _count_cell(self, cell: int) -> None:
        self._loaded.counters()[self._cpu, cell] += np.uint64(1)

    def _matched(self) -> int:
        return self._run(int(self._plan["always"]), 0 if self._plan["has_tests"] else layout.JUMP_END)

    def _run(self, matched: int, at: int) -> int:
        """Run tests. Answer the filters that accepted the hit."""
        while at != layout.JUMP_END:
            test = self._row(".bss.tests", layout.TEST, int(self._plan["tests"]) + at)
            bit, jump = int(test["filter"]), self._jump(test, matched)
            if jump == ACCEPT:
                matched |= 1 << bit
            elif jump in {REJECT, UNDECIDED}:
                if jump == UNDECIDED:
                    self._count(layout.Counter.UNDECIDED, bit)
                self._count(layout.Counter.FILTERED, bit)
                matched &= ~(1 << bit)
            elif jump == layout.JUMP_EXCLUDE:
                self._count(layout.Counter.EXCLUDED, bit)
            at = jump if jump < UNDECIDED else int(test["next_filter"])
        return matched

    def _jump(self, test: Any, matched: int) -> int:
        value, is_there = self._pid, True
        match int(test["source"]):
            case Source.ARGUMENT:
                value, is_there = self._fetched(self._operand(int(test["index"])))
            case Source.ZERO:
                value = 0
            case Source.WORD:
                value = self._made[int(test["index"])] or 0
            case Source.ELAPSED:
                value = self._pairs[int(test["index"])][0]
            case Source.MATCHED:
                value = matched >> int(test["index"]) & 1
            case source:
                assert source == Source.PID
        if not is_there:
            return int(test["on_missing"])
        assert test["uses_words"] <= self._plan["uses_words"]
        right = int(test["value"])
        if test["right"] != NO_WORD:
            right = self._made[int(test["right"])] or 0
        left, relation = value & int(test["mask"]), int(test["relation"])
        if relation < Operation.ADD:
            return int(test["on_true"] if holds(relation, left, right) else test["on_false"])
        result = None if relation == Operation.MISS else calculated(relation, left, right)
        self._made[int(test["result"])] = result
        return int(test["on_missing"] if result is None else test["on_true"])

    def _operand(self, number: int) -> Any:
        return self._row(".bss.operands", layout.OPERAND, int(self._plan["operands"]) + number)

    def _fetched(self, operand: Any) -> tuple[int, bool]:
        """The value, or what could not be read and False."""
        value = int(operand["constant"])
        if operand["kind"] == OperandKind.MADE and operand["index"] >= layout.FIRST_WORD_CELL:
            made = self._made[int(operand["index"]) - layout.FIRST_WORD_CELL]
            return (layout.UNREAD_OPERAND, False) if made is None else (made, True)
        if operand["kind"] == OperandKind.MADE:
            pairing, word = divmod(int(operand["index"]), layout.PAIR_WORDS + 1)
            *words, missing = (*self._pairs[pairing], 0)[: layout.PAIR_WORDS + 1]
            return (layout.UNREAD_OPERAND, False) if missing >> word & 1 else (words[word], True)
        base, index = (self._registers.get(int(operand[name]), 0) for name in ("base", "index"))
        if operand["kind"] == OperandKind.REGISTER:
            value = base
        elif operand["kind"] == OperandKind.UID_GID:
            value = GID << 32 | UID
        elif operand["kind"] != OperandKind.CONSTANT:
            value = value + base + index * int(operand["scale"]) & _ALL_BITS
            if operand["is_narrow"]:
                value &= 0xFFFFFFFF
            if operand["kind"] == OperandKind.MEMORY:
                there = self._memory.get(value, b"")
                if len(there) < operand["width"]:
                    return value & layout.ADDRESS_MASK | layout.UNREAD_OPERAND, False
                value = int.from_bytes(there[: operand["width"]], "little")
        value = value << int(operand["left"]) & _ALL_BITS
        if operand["is_signed"] and value >> 63:
            value -= 1 << 64
        return value >> int(operand["right"]) & _ALL_BITS, True

    def _taken(self, operand: Any, at: int) -> tuple[int, bool, bytes]:
        """The value, or what could not be read and False; and the text that is to stand at a place in the record."""
        if operand["take"] == Take.START:
            start = self._starts[int(operand["index"])][: int(operand["limit"])]
            padding = bytes(-at % 8)
            return len(start) << 32 | at + len(padding), bool(start), padding + start
        value, is_there = self._fetched(operand)
        if not is_there or operand["take"] == Take.NUMBER:
            return value, is_there, b""
        text = self._text(operand, value)
        if text is None:
            return value & layout.ADDRESS_MASK, False, b""
        return len(text) << 32 | at, True, text

    def _is_intact(self) -> bool:
        if self._plan["generation"] == self._generation:
            return True
        self._count_cell(layout.STRAY_HITS)
        return False

    def _record(self, operands: Sequence[Any], matched: int) -> tuple[bytes, bytes]:
        """Answer the record of some values, and their texts."""
        begin = layout.RECORD.itemsize + 8 * len(operands)
        values, missing, texts = [], 0, b""
        for number, operand in enumerate(operands):
            value, is_there, text = self._taken(operand, begin + len(texts))
            texts += text
            missing |= (not is_there) << number
            values.append(value)
        head = record(
            begin + layout.RECORD_HEADER, self._generation, *values,
            time_ns=time.monotonic_ns(), pid=self._pid, cpu=self._cpu, matched=matched, missing=missing,
        )  # fmt: skip
        return head, texts

    def _write(self, matched: int) -> bool:
        operands = [self._operand(number) for number in range(int(self._plan["values"]))]
        assert self._plan["has_texts"] or all(operand["take"] == Take.NUMBER for operand in operands)
        head, texts = self._record(operands, matched)
        record_class = layout.record_class(len(head) + len(texts))
        ring = self._loaded.rings.get(record_class)
        if ring is None:
            return False
        if not self._is_intact():
            return True
        body = (head + texts).ljust(ring.stride - layout.RECORD_HEADER, b"\0")
        is_written = ring.put(body)
        if not is_written and (spare := self._loaded.spare(record_class, self._pid)):
            is_written = spare.put(body)
        if is_written:
            self._loaded.wake_up(ring)
        return is_written


def _kind_of(pairing: Any) -> SpanKind:
    if pairing["start_class"]:
        return SPANS_OF_RECORDS[int(pairing["start_class"]) - 1]
    return SMALL_SPAN if pairing["is_small"] else SPAN_OF_WORDS


def _memory(size: int) -> int:
    """In place of create_ring."""
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, 2 * _PAGE + 2 * size)
    return descriptor


def running(name: str) -> list[threading.Thread]:
    """The threads of this name that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def lasting_descriptors() -> int:
    """How many this process has open, but for the memory of rings, which goes when nothing refers to it."""
    return len(os.listdir("/proc/self/fd")) - descriptors_of("/memfd:ring (deleted)")


def descriptors_of(path: str) -> int:
    """How often this process has a file open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}") == path
    return found


def offset_of(step: str) -> int:
    """Where `define g0 0x10(0x20)` says that the site is."""
    found = re.search(r"0x[0-9a-f]+", step)
    assert found
    return int(found[0], 16)
