"""Starts and ends that the kernel pairs: what is planned, what becomes of those left over, what sinks are told."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, KeySource, Row
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.span_tables import SpanTables
from stapsdtd.capture.bpf.span_watch import SpanWatch
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.capture.engine import LossStage, Refusal, Target, TargetSite
from stapsdtd.model import Argument, BuiltIn, Capture, Constant, Memory, Register, Site, StartArgument, Unavailable
from stapsdtd.query.actions import Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.parse import parse_value
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.spans.span import Span, SpanCounts
from tests.support import wait_for
from tests.unit.bpf_rig import closed, free, nothing_is_left, where
from tests.unit.fake_bpf import FakeKernel
from tests.unit.samples import argument, sample_object, site
from tests.unit.test_bpf_aggregation import AddingSink, collected

pytestmark = pytest.mark.timeout(60)

COUNT, SUM, MIN = Function.COUNT, Function.SUM, Function.MIN
RSI = argument(Register("rsi"), 4, signed=True, text="-4@%esi")
IN_MEMORY = argument(Memory("rdx"), text="8@(%rdx)")
BEGIN = site("begin", 0x10, [argument(), RSI, IN_MEMORY])
END = site("end", 0x20, [argument(), argument(Constant(7), text="8@$7"), IN_MEMORY])
FOUND = sample_object(BEGIN, END)
NUMBER = Capture(0)
ELAPSED = Capture(BuiltIn.ELAPSED)
STARTED, NEGATIVE, READ = (Capture(StartArgument(index)) for index in range(3))
KEPT = Span(start_captures=(Capture(0), Capture(1), Capture(2)))


class SpanSink(AddingSink):
    """counts: what became of starts and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = SpanCounts()

    def spanned(self, counts: SpanCounts) -> None:
        self.counts += counts

    @property
    def accounted(self) -> int:
        delivered = len(self.rows) + self.counted
        return delivered + self.filtered_count + self.losses.total() + self.counts.consumed


def armed(
    engine: BpfEngine,
    kernel: FakeKernel,
    subscription_key: int,
    span: Span,
    outcome: Emit | Aggregate,
    *,
    begins: tuple[Site, ...] = (BEGIN,),
    ends: tuple[Site, ...] = (END,),
    text: str = "",
    of_pairs: str = "",
    owner: str = "me",
    users: frozenset[int] | None = None,
) -> tuple[SpanSink, list[Refusal]]:
    sink = SpanSink()
    engine.open(subscription_key, sink, 64, owner, sink)
    predicate = where(text) if text else None
    found = sample_object(*dict.fromkeys([BEGIN, END, *begins, *ends]))
    action = EndSpan(span, outcome, where(of_pairs) if of_pairs else None)
    wanted = [TargetSite(each, 1, action, predicate=predicate) for each in ends]
    wanted += [TargetSite(each, 2, BeginSpan(span), predicate=predicate) for each in begins]
    return sink, engine.arm(subscription_key, Target(found, kernel.path, tuple(wanted), owners=users))


def pairing(
    engine: BpfEngine,
    kernel: FakeKernel,
    subscription_key: int,
    span: Span,
    outcome: Emit | Aggregate,
    *,
    text: str = "",
    of_pairs: str = "",
) -> SpanSink:
    sink, refusals = armed(engine, kernel, subscription_key, span, outcome, text=text, of_pairs=of_pairs)
    assert refusals == []
    return sink


def begin(kernel: FakeKernel, *numbers: int, thread: int = 10, rsi: int = 0, rdx: int = 0) -> None:
    for number in numbers:
        kernel.hit(BEGIN.site_offset, rdi=number, pid=thread, rsi=rsi, rdx=rdx)


def end(kernel: FakeKernel, *numbers: int, thread: int = 10, rdx: int = 0) -> None:
    for number in numbers:
        kernel.hit(END.site_offset, rdi=number, pid=thread, rdx=rdx)


def test_end_tells_of_its_start(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = pairing(engine, kernel, 1, KEPT, Emit((NUMBER, STARTED, NEGATIVE, READ, ELAPSED)))
    kernel.memory[0x500] = bytes([9]) + bytes(7)
    begin(kernel, 1, rsi=0xFFFFFFFD, rdx=0x500)
    begin(kernel, 2, thread=11)
    end(kernel, 3)
    end(kernel, 4, thread=11)
    # once more, and of a thread that began nothing
    end(kernel, 5)
    end(kernel, 6, thread=12)
    closed(engine, 1)
    first, second = sink.values
    assert first[:-1] == (1, 3, 1, -3, 9)
    # not in memory when it began, where nobody could have it paged in
    assert second[:-1] == (1, 4, 2, 0, None)
    assert kernel.touched == []
    assert all(0 < values[-1] < 60_000_000_000 for values in sink.values)
    assert sink.counts == SpanCounts(starts=2, paired=2, unmatched=2)
    assert sink.fired_count == sink.accounted == 6


@pytest.mark.parametrize("span", [Span(), Span(start_captures=(NUMBER,)), Span((NUMBER,))])
@pytest.mark.parametrize(
    "of_pairs",
    [
        "elapsed > 0 && arg0 >= 2",
        "arg0 < 2 ? elapsed == -1 : elapsed < 60s",
        "elapsed - elapsed + arg0 * 2 >= 4",
        "elapsed == -1 || !(arg0 == 1)",
    ],
)
def test_pairs_that_are_not_wanted_are_filtered(
    kernel: FakeKernel, engine: BpfEngine, span: Span, of_pairs: str
) -> None:
    """Of the subscription alone that does not want them, and whatever becomes of its others."""
    emitted = pairing(engine, kernel, 1, span, Emit((NUMBER,)), of_pairs=of_pairs)
    counted = pairing(engine, kernel, 2, span, Aggregate(Aggregation((COUNT,))), text="arg0 != 3", of_pairs=of_pairs)
    calculated = ExpressionSource(parse_value("elapsed * 0 + arg0", lambda _: None))
    by = pairing(engine, kernel, 3, span, Aggregate(Aggregation((SUM,), (calculated,), NUMBER)), of_pairs=of_pairs)
    everything = pairing(engine, kernel, 4, span, Aggregate(Aggregation((COUNT,))))
    for number in (1, 2, 1, 3):
        begin(kernel, number)
        end(kernel, number)
    end(kernel, 7)
    for key in range(1, 5):
        closed(engine, key)
    assert emitted.values == [(1, 2), (1, 3)]
    assert by.added == {(0, (2,)): Row(1, 1, 2), (0, (3,)): Row(1, 1, 3)}
    assert (counted.added, everything.added) == ({(0, ()): Row(1)}, {(0, ()): Row(4)})
    assert [sink.filtered_count for sink in (emitted, by, counted, everything)] == [2, 2, 2 + 2, 0]
    for sink in (emitted, by, everything):
        assert sink.counts == SpanCounts(starts=4, paired=4, unmatched=1)
    assert counted.counts == SpanCounts(starts=3, paired=3, unmatched=1)
    for sink in (emitted, by, counted, everything):
        assert sink.fired_count == sink.accounted == 9
        assert sink.losses == {}


@pytest.mark.parametrize("outcome", [Emit((NUMBER,)), Aggregate(Aggregation((COUNT,)))])
def test_filter_of_the_only_subscription_that_pairs(
    kernel: FakeKernel, engine: BpfEngine, outcome: Emit | Aggregate
) -> None:
    """Its pairing counts the hits."""
    sink = pairing(engine, kernel, 1, Span(), outcome, text="arg0 != 9", of_pairs="elapsed > 60s")
    for number in (1, 9, 2):
        begin(kernel, number)
        end(kernel, number)
    closed(engine, 1)
    assert sink.counts == SpanCounts(starts=2, paired=2)
    assert (sink.fired_count, sink.filtered_count, sink.accounted) == (6, 2 + 2, 6)
    assert (sink.rows, sink.losses) == ([], {})


def test_pairs_add_up_by_what_is_known_of_both(kernel: FakeKernel, engine: BpfEngine) -> None:
    by_start = pairing(engine, kernel, 1, KEPT, Aggregate(Aggregation((COUNT, SUM), (STARTED, NUMBER), NEGATIVE)))
    took = pairing(engine, kernel, 2, KEPT, Aggregate(Aggregation((MIN,), (), ELAPSED)))
    counted = pairing(engine, kernel, 3, Span(), Aggregate(Aggregation((COUNT,))))
    for number in (1, 1, 2):
        begin(kernel, number, rsi=0xFFFFFFFD)
        end(kernel, 5)
    end(kernel, 5)
    for subscription_key in (1, 2, 3):
        collected(engine, subscription_key)
    for sink in (by_start, took, counted):
        assert sink.counts == SpanCounts(starts=3, paired=3, unmatched=1)
        assert sink.fired_count == sink.accounted == 7
    assert by_start.added == {(0, (1, 5)): Row(2, 2, -6), (0, (2, 5)): Row(1, 1, -3)}
    (row,) = took.added.values()
    assert row.values == 3
    assert row.low is not None
    assert row.low > 0
    assert counted.added == {(0, ()): Row(3)}
    for subscription_key in (1, 2, 3):
        closed(engine, subscription_key)


def test_pair_is_handed_over_if_its_end_lacks_something(kernel: FakeKernel, engine: BpfEngine) -> None:
    aggregation = Aggregation((COUNT,), (Capture(2), STARTED))
    sink = pairing(engine, kernel, 1, KEPT, Aggregate(aggregation))
    sink.aggregation = aggregation
    kernel.memory[0x500] = bytes([9]) + bytes(7)
    for address in (0x500, 0x600):
        begin(kernel, 4)
        end(kernel, 0, rdx=address)
    end(kernel, 0, rdx=0x600)
    closed(engine, 1)
    assert sink.added == {(0, (9, 4)): Row(1), (0, (None, 4)): Row(1)}
    assert len(sink.rows) == 1
    assert sink.counts == SpanCounts(starts=2, paired=2, unmatched=1)


@pytest.mark.parametrize("key", [(NUMBER,), (Capture(BuiltIn.UID), NUMBER), (HitField.PID, NUMBER, HitField.CPU)])
def test_key_of_numbers(kernel: FakeKernel, engine: BpfEngine, key: tuple[KeySource, ...]) -> None:
    sink = pairing(engine, kernel, 1, Span(key, (NUMBER,)), Emit((NUMBER, STARTED)))
    begin(kernel, 1, 2, 2, 3)
    end(kernel, 4, 2, 1, 2)
    closed(engine, 1)
    assert sink.values == [(1, 2, 2), (1, 1, 1)]
    assert sink.counts == SpanCounts(starts=4, paired=2, nested=1, unmatched=2)
    assert sink.counts.open == 1


def test_constant_is_part_of_a_key(kernel: FakeKernel, engine: BpfEngine) -> None:
    """The end's is 7."""
    sink = pairing(engine, kernel, 1, Span((Capture(1),), (NUMBER,)), Emit((STARTED,)))
    begin(kernel, 1, rsi=6)
    begin(kernel, 2, rsi=7)
    end(kernel, 0)
    closed(engine, 1)
    assert sink.values == [(1, 2)]


def test_hit_whose_key_is_not_in_memory_is_lost(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = pairing(engine, kernel, 1, Span((Capture(2),)), Emit((NUMBER,)))
    begin(kernel, 1, rdx=0x600)
    end(kernel, 1, rdx=0x600)
    closed(engine, 1)
    assert sink.losses == {LossStage.DECODE: 2}
    assert sink.counts == SpanCounts()
    assert sink.fired_count == sink.accounted == 2


def test_filter_chooses_starts_and_ends(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = pairing(engine, kernel, 1, Span(), Emit((NUMBER,)), text="arg0 > 5")
    begin(kernel, 1, 6)
    end(kernel, 2, 7, 8)
    closed(engine, 1)
    assert sink.values == [(1, 7)]
    assert sink.counts == SpanCounts(starts=1, paired=1, unmatched=1)
    assert (sink.filtered_count, sink.fired_count, sink.accounted) == (2, 5, 5)


def test_thread_that_ends_takes_its_starts_along(kernel: FakeKernel, engine: BpfEngine) -> None:
    of_thread = pairing(engine, kernel, 1, Span(), Emit((NUMBER,)))
    of_number = pairing(engine, kernel, 2, Span((NUMBER,)), Emit((NUMBER,)))
    begin(kernel, 1, thread=20)
    begin(kernel, 2, thread=21)
    kernel.loaded.spans.end_thread(20)
    collected(engine)
    assert of_thread.counts == SpanCounts(starts=2, died=1)
    assert of_number.counts == SpanCounts(starts=2)
    kernel.loaded.spans.end_thread(21)
    closed(engine, 1)
    closed(engine, 2)
    assert of_thread.counts == SpanCounts(starts=2, died=2)
    assert of_number.counts.open == 2


def test_full_table_says_so(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = pairing(engine, kernel, 1, Span((NUMBER,), max_open=2), Emit((NUMBER,)))
    begin(kernel, 1, 2, 3, 2)
    end(kernel, 1, 2, 3)
    closed(engine, 1)
    assert sink.values == [(1, 1), (1, 2)]
    assert sink.counts == SpanCounts(starts=4, paired=2, nested=1, table_full=1, unmatched=1)


def test_hits_are_counted_once_also_while_others_come_and_go(kernel: FakeKernel, engine: BpfEngine) -> None:
    """A pairing counts the hits of a plan that has no other consumer."""
    sink = pairing(engine, kernel, 1, Span(), Emit((NUMBER,)), text="arg0 > 5")

    def three_hits() -> None:
        begin(kernel, 1, 6)
        end(kernel, 7)

    three_hits()
    for subscription_key in (2, 3):
        other = pairing(engine, kernel, subscription_key, Span((NUMBER,)), Emit((NUMBER,)))
        three_hits()
        closed(engine, subscription_key)
        assert other.fired_count == other.accounted == 3
        three_hits()
    collected(engine)
    assert sink.fired_count == sink.accounted == 15
    assert (sink.filtered_count, sink.counts) == (5, SpanCounts(starts=5, paired=5))
    closed(engine, 1)
    assert sink.fired_count == sink.accounted == 15


class Watched:
    """A table of starts, whose entries the test makes."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.sink = SpanSink()
        self.tables = SpanTables(kernel.loaded, TableMemory())
        self.table = self.tables.open(Channel(1, self.sink), "me", Span((NUMBER,), timeout_ns=100))
        (self.entries,) = kernel.loaded.spans.tables.values()

    def put(self, number: int, begun_ns: int) -> None:
        key = number.to_bytes(8 * layout.PAIR_KEY_WORDS, "little")
        self.entries.by_key[key] = begun_ns.to_bytes(layout.SPAN_ENTRY.itemsize, "little")

    def look(self, now_ns: int) -> SpanCounts:
        seconds = iter([0.0, 10.0, 10.0])
        SpanWatch(self.tables, lambda work: work(), lambda: now_ns, lambda: next(seconds)).look()
        return self.sink.counts


def test_start_that_waits_for_too_long_is_taken_out(kernel: FakeKernel) -> None:
    watched = Watched(kernel)
    watched.put(1, 1000)
    watched.put(2, 1001)
    assert watched.look(1101) == SpanCounts(timed_out=1)
    assert len(watched.entries.by_key) == 1


def test_start_that_finds_its_place_taken_is_told(kernel: FakeKernel) -> None:
    watched = Watched(kernel)
    watched.put(1, 1000)
    watched.entries.before_take = lambda: watched.put(1, 1090)
    watched.entries.refuse_put = OSError(errno.E2BIG, "as told")
    assert watched.look(1101) == SpanCounts(table_full=1)
    assert watched.entries.by_key == {}


@pytest.mark.parametrize(("comes_back", "counts"), [(False, SpanCounts()), (True, SpanCounts(nested=1))])
def test_start_that_came_while_a_late_one_was_looked_for_stays(
    kernel: FakeKernel, comes_back: bool, counts: SpanCounts
) -> None:
    """If yet another start came meanwhile, that one stays, and there were two."""
    watched = Watched(kernel)
    watched.put(1, 1000)
    watched.entries.before_take = lambda: watched.put(1, 1090)
    if comes_back:
        watched.entries.after_take = lambda: watched.put(1, 1095)
    assert watched.look(1101) == counts
    (entry,) = watched.entries.by_key.values()
    assert int.from_bytes(entry, "little") == (1095 if comes_back else 1090)


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (Span(is_nested=True), "keeps one start for each key"),
        (Span((HitField.TID, NUMBER)), "a key that has the thread has nothing else"),
        (Span((NUMBER,) * 4), "has at most 3 parts"),
        (Span((Capture(0, is_string=True),)), "consists of numbers"),
        (Span((HitField.EXECNAME,)), "consists of numbers"),
        (Span((HitField.NAME,)), "consists of numbers"),
        (Span((Capture(BuiltIn.CONTAINER),)), "consists of numbers"),
        (Span(start_captures=(Capture(0, is_string=True),)), "keeps no strings"),
        (Span(start_captures=tuple(map(Capture, range(5)))), "at most 4 arguments"),
    ],
)
def test_what_the_program_cannot_pair_is_refused(
    kernel: FakeKernel, engine: BpfEngine, span: Span, reason: str
) -> None:
    told = engine.why_not_paired(span)
    assert told is not None
    assert reason in told
    _, refusals = armed(engine, kernel, 1, span, Emit((NUMBER,)))
    assert {refusal.reason for refusal in refusals} == {told}
    assert kernel.loaded.spans.tables == {}


FLOAT = Argument("8f@%xmm0", 8, signed=True, is_float=True, operand=Register("rdi"))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (argument(signed=True, text="-8@%rdi"), "arg0 is signed, and that of another start unsigned"),
        (FLOAT, "8f@%xmm0 is no integer"),
        (argument(size=12, text="12@%rdi"), "12@%rdi is no integer"),
        (argument(Unavailable("it is gone")), "it is gone"),
    ],
)
def test_start_that_does_not_fit_the_others_is_refused(
    kernel: FakeKernel, engine: BpfEngine, other: Argument, reason: str
) -> None:
    misfit = site("other", 0x30, [other])
    span = Span(start_captures=(NUMBER,))
    sink, refusals = armed(engine, kernel, 1, span, Emit((STARTED,)), begins=(BEGIN, misfit))
    assert [refusal.site for refusal in refusals] == [misfit]
    assert reason in refusals[0].reason
    begin(kernel, 1)
    end(kernel, 1)
    closed(engine, 1)
    assert sink.values == [(1, 1)]


def test_ends_learn_what_starts_are_like_that_come_later(kernel: FakeKernel, engine: BpfEngine) -> None:
    """A start in another file may be found long after its ends."""
    sink = SpanSink()
    span = Span((HitField.PID,), (Capture(1),))
    engine.open(1, sink, 64, "me", sink)
    ends = (TargetSite(END, 1, EndSpan(span, Aggregate(Aggregation((MIN,), (), NEGATIVE)))),)
    assert engine.arm(1, Target(sample_object(END), kernel.path, ends)) == []
    end(kernel, 1)
    other = sample_object(BEGIN, inode=2)
    assert engine.arm(1, Target(other, kernel.path, (TargetSite(BEGIN, 2, BeginSpan(span)),))) == []
    begin(kernel, 1, rsi=0xFFFFFFFE)
    end(kernel, 1)
    closed(engine, 1)
    assert sink.added == {(0, ()): Row(1, 1, low=-2, high=-2)}
    assert sink.counts == SpanCounts(starts=1, paired=1, unmatched=1)


def test_site_serves_so_many_spans(kernel: FakeKernel, engine: BpfEngine) -> None:
    sinks = [pairing(engine, kernel, number, Span(), Emit((NUMBER,))) for number in range(layout.MAX_PAIRINGS)]
    _, refusals = armed(engine, kernel, 9, Span(), Emit((NUMBER,)))
    assert {refusal.reason for refusal in refusals} == {
        "the bpf engine pairs hits of a site for at most 4 subscriptions"
    }
    begin(kernel, 1)
    end(kernel, 2)
    for number, sink in enumerate(sinks):
        closed(engine, number)
        assert sink.values == [(1, 2)]


def test_pairings_of_a_site_are_kept_for_who_may_trace_everybody(kernel: FakeKernel, engine: BpfEngine) -> None:
    for number in range(3):
        _, refusals = armed(engine, kernel, number, Span(), Emit((NUMBER,)), users=frozenset({1000}))
        assert bool(refusals) == (number == 2)
        assert all("at most 2 times for clients that may not trace everybody's" in each.reason for each in refusals)
    for number in (3, 4):
        pairing(engine, kernel, number, Span(), Emit((NUMBER,)))


def test_memory_is_shared_by_owner_with_aggregations(kernel: FakeKernel, engine: BpfEngine) -> None:
    big = Span((NUMBER,), max_open=400_000)
    assert armed(engine, kernel, 1, big, Emit((NUMBER,)))[1] == []
    _, refusals = armed(engine, kernel, 2, big, Emit((NUMBER,)))
    assert "as much of the kernel's memory as one client's may" in refusals[0].reason
    assert armed(engine, kernel, 3, big, Emit((NUMBER,)), owner="another")[1] == []


@pytest.mark.parametrize("failure", ["memory", "tables"])
def test_nothing_is_left_of_it(kernel: FakeKernel, engine: BpfEngine, failure: str) -> None:
    before = free(kernel, engine)
    outcomes: list[Emit | Aggregate] = [Emit((NUMBER, ELAPSED)), Aggregate(Aggregation((COUNT,), (STARTED,)))]
    for subscription_key, outcome in enumerate(outcomes):
        pairing(engine, kernel, subscription_key, KEPT, outcome)
    assert engine.metrics().table_bytes > 0
    begin(kernel, 1)
    if failure == "memory":
        kernel.loaded.spans.refuse = OSError(errno.ENOMEM, "as told")
        _, refusals = armed(engine, kernel, 5, Span(), Emit((NUMBER,)))
        assert all("as told" in refusal.reason for refusal in refusals)
        closed(engine, 5)
    tables: list[Any] = list(kernel.loaded.spans.tables.values())
    for subscription_key in range(len(outcomes)):
        closed(engine, subscription_key)
    engine.retry_cleanup()
    wait_for(lambda: not kernel.loaded.spans.tables and engine.metrics().table_bytes == 0, "the tables to be gone")
    assert all(table.is_closed for table in tables)
    nothing_is_left(engine, kernel, before)
    kernel.pools.pairings.allocate(layout.MAX_PAIRING_ROWS)
