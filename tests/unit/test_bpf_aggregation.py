"""Hits that add up in the kernel: what is planned, how banks are drained, and what the sinks are told."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, Key, Row
from stapsdtd.aggregate.buckets import FINE, POWERS_OF_TWO, Buckets, Edges, LogLinear
from stapsdtd.aggregate.grouping import group
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.engine import LossStage, ManyRows, Target, TargetSite
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import CUT
from stapsdtd.model import Argument, BuiltIn, Capture, Constant, Memory, Register, Unavailable
from stapsdtd.query.actions import Aggregate, Emit
from stapsdtd.query.compile import MAX_OPERATIONS
from stapsdtd.query.parse import parse_value
from stapsdtd.query.sources import ExpressionSource
from tests.support import wait_for
from tests.unit.bpf_rig import FOUND, A, closed, free, nothing_is_left, slots, target, where
from tests.unit.fake_bpf import GID, PATIENCE_SECONDS, UID, FakeKernel, RecordingSink
from tests.unit.samples import argument, sample_object, site

pytestmark = pytest.mark.timeout(60)

COUNT, SUM, MIN, MAX, AVG, STDDEV, HISTOGRAM = (
    Function.COUNT, Function.SUM, Function.MIN, Function.MAX, Function.AVG, Function.STDDEV, Function.HISTOGRAM,
)  # fmt: skip
BY_ARGUMENT = Aggregation((COUNT,), (Capture(0),))
SITE_ID = 5


class AddingSink(RecordingSink):
    """added: rows, by site_id and key. before_rows is called first, and may raise. aggregation: of hits handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[tuple[int, Key], Row] = {}
        self.aggregation: Aggregation | None = None
        self.before_rows: Callable[[], None] = lambda: None

    def deliver(self, batch: EventBatch) -> None:
        super().deliver(batch)
        if self.aggregation is not None:
            self.aggregated(0, group(self.aggregation, batch, lambda _, field: field.value.encode()))

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        self.before_rows()
        for key, row in rows.items():
            known = self.added.setdefault((site_id, key), row)
            if known is not row:
                known.add(row)

    def aggregated_many(self, rows: ManyRows) -> None:
        for _, part in rows.parts():
            for site_id, of_site in part.items():
                self.aggregated(site_id, of_site)

    @property
    def counted(self) -> int:
        return sum(row.count for row in self.added.values())


def adding(
    engine: BpfEngine,
    kernel: FakeKernel,
    subscription_key: int,
    aggregation: Aggregation,
    *where_: str,
    owner: str = "me",
    sink: AddingSink | None = None,
) -> AddingSink:
    """Add up the hits of A."""
    sink = sink or AddingSink()
    engine.open(subscription_key, sink, 64, owner, sink)
    predicate = where(*where_) if where_ else None
    wanted = (TargetSite(A, SITE_ID, Aggregate(aggregation), predicate=predicate),)
    assert engine.arm(subscription_key, Target(FOUND, kernel.path, wanted)) == []
    return sink


def collected(engine: BpfEngine, subscription_key: int = 1) -> None:
    engine.collect(subscription_key).result(PATIENCE_SECONDS)


def hit(kernel: FakeKernel, *values: int, pid: int = 10, cpu: int = 0) -> None:
    for value in values:
        kernel.hit(A.site_offset, rdi=value, pid=pid, cpu=cpu)


def test_rows_come_by_key_while_the_banks_take_turns(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, Aggregation((SUM, MIN, MAX), (HitField.PID, HitField.EXECNAME), Capture(0)))
    banks = set[int]()
    for turn in range(3):
        hit(kernel, 5, 3)
        hit(kernel, turn, pid=11)
        banks.add(kernel.loaded.parity)
        collected(engine)
        assert sink.added[0, (10, b"app")] == Row(2 * turn + 2, 2 * turn + 2, 8 * turn + 8, 3, 5)
    assert banks == {0, 1}
    hit(kernel, 9, pid=11)
    closed(engine, 1)
    assert sink.added[0, (11, b"app")] == Row(4, 4, 12, 0, 9)
    assert sink.told == (10, 0, 0, {})
    assert sink.counted == 10


def test_bank_is_not_read_before_its_hits_are_over(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, BY_ARGUMENT)
    hit(kernel, 1)
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=2)
    parity, waits = kernel.loaded.parity, kernel.loaded.waits
    collecting = engine.collect(1)
    wait_for(lambda: kernel.loaded.waits > waits, "the wait for hits to begin")
    assert kernel.loaded.parity != parity
    assert sink.added == {}
    assert not collecting.done()
    now_ns = time.monotonic_ns()
    goes_on()
    # whatever the wait took, later hits are not among them
    assert collecting.result(PATIENCE_SECONDS) < now_ns
    assert sink.added == {(0, (1,)): Row(1), (0, (2,)): Row(1)}


def test_what_is_only_counted_needs_no_table(kernel: FakeKernel, engine: BpfEngine) -> None:
    everywhere = adding(engine, kernel, 1, Aggregation((COUNT,)))
    by_name = adding(engine, kernel, 2, Aggregation((COUNT,), (HitField.PROVIDER, HitField.NAME)), "arg0 != 3")
    hit(kernel, 1, 2, 3, 4)
    collected(engine)
    assert everywhere.added == {(0, ()): Row(4)}
    assert by_name.added == {(SITE_ID, (None, None)): Row(3)}
    hit(kernel, 3, 5, cpu=1)
    closed(engine, 1)
    closed(engine, 2)
    assert everywhere.added == {(0, ()): Row(6)}
    assert by_name.added == {(SITE_ID, (None, None)): Row(4)}
    assert by_name.told == (6, 0, 2, {})
    assert kernel.loaded.row_tables.banks == {}


@pytest.mark.parametrize("later", [frozenset[int](), frozenset({10}), frozenset({66})])
def test_what_is_only_counted_may_be_of_one_process(
    kernel: FakeKernel, engine: BpfEngine, later: frozenset[int]
) -> None:
    """Other processes whose hits are to be left out are not in its scope, unless they are that process."""
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    wanted = (TargetSite(A, SITE_ID, Aggregate(Aggregation((COUNT,))), frozenset({10})),)
    assert engine.arm(1, Target(FOUND, kernel.path, wanted, exclude_later=later)) == []
    (slot,) = slots(kernel)
    plan = np.frombuffer(kernel.loaded.table(".bss.plans"), layout.PLAN)[slot & (1 << layout.PLAN_BITS) - 1]
    assert bool(plan["is_counted"]) == (later != {10})
    hit(kernel, 1, 2)
    closed(engine, 1)
    assert sink.counted == (0 if later == {10} else 2)


def test_events_of_a_site_go_to_those_alone_who_want_them(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A))
    counted, by_argument = (
        adding(engine, kernel, 2, Aggregation((COUNT,))),
        adding(engine, kernel, 3, BY_ARGUMENT, "arg0 > 1"),
    )
    hit(kernel, 1, 2)
    for subscription_key in (1, 2, 3):
        closed(engine, subscription_key)
    assert sink.values == [(1, 1), (1, 2)]
    assert (counted.rows, by_argument.rows) == ([], [])
    assert counted.added == {(0, ()): Row(2)}
    assert by_argument.added == {(0, (2,)): Row(1)}
    assert by_argument.told == (2, 0, 1, {})


def test_full_ring_is_no_loss_to_who_wants_rows(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    """Their filters are the same one."""
    engine.arm(1, target(kernel, A))
    by_argument = adding(engine, kernel, 2, BY_ARGUMENT)
    kernel.loaded.rings.clear()
    hit(kernel, 1)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.losses == {LossStage.KERNEL_BUFFER: 1}
    assert by_argument.told == (1, 0, 0, {})
    assert by_argument.added == {(0, (1,)): Row(1)}


def test_full_table_is_drained_and_what_it_had_no_room_for_is_told(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, Aggregation((COUNT,), (Capture(0),), max_keys=1))
    neighbour = adding(engine, kernel, 2, BY_ARGUMENT)
    room = kernel.loaded.row_tables.banks[0, 0].max_entries
    # nobody drains it meanwhile, as long as one hit has not ended
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=0)
    collecting = engine.collect(1)
    wait_for(lambda: kernel.loaded.parity == 1, "the banks to be flipped")
    hit(kernel, *range(room + 3))
    goes_on()
    collecting.result(PATIENCE_SECONDS)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.losses == {LossStage.TABLE_FULL: 3}
    assert sink.told[0] == sink.counted + 3 == room + 4
    assert neighbour.losses == {}
    assert neighbour.counted == room + 4


def test_table_that_is_half_full_is_drained_unasked(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, Aggregation((COUNT,), (Capture(0),), max_keys=100))
    hit(kernel, *range(60))
    wait_for(lambda: sink.counted == 60, "the rows to come")


def test_each_argument_type_has_keys_of_its_own(kernel: FakeKernel, engine: BpfEngine) -> None:
    signed = site("a", 0x10, [argument(Register("rdi"), 4, signed=True)])
    unsigned = site("b", 0x20, [argument(Register("rdi"), 4)])
    constant = site("c", 0x30, [argument(Constant(7))])
    unknown = site("d", 0x40, [argument(Unavailable("no way"))])
    found = sample_object(signed, unsigned, constant, unknown)
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    action = Aggregate(Aggregation((SUM, MIN, MAX), (Capture(0),), Capture(0)))
    wanted = tuple(TargetSite(each, number, action) for number, each in enumerate(found.parsed.sites))
    assert engine.arm(1, Target(found, kernel.path, wanted)) == []
    for each in found.parsed.sites:
        kernel.hit(each.site_offset, rdi=(1 << 64) - 1)
    closed(engine, 1)
    most = (1 << 32) - 1
    assert sink.added == {
        (0, (-1,)): Row(1, 1, -1, -1, -1),
        (0, (most,)): Row(1, 1, most, most, most),
        (0, (7,)): Row(1, 1, 7, 7, 7),
        (0, (None,)): Row(1),
    }


def test_what_cannot_be_read_is_a_key_of_its_own_and_no_value(kernel: FakeKernel, engine: BpfEngine) -> None:
    both = site("a", 0x10, [argument(Register("rdi")), argument(Memory("rsp", 0))])
    found = sample_object(both)
    kernel.memory |= {0x5000: b"a text", 0x6000: (40).to_bytes(8, "little")}
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    keys = Capture(0, is_string=True, max_bytes=4), Capture(BuiltIn.UID), Capture(1), Capture(BuiltIn.GID)
    sink.aggregation = Aggregation((SUM,), keys, Capture(1))
    action = Aggregate(sink.aggregation)
    assert engine.arm(1, Target(found, kernel.path, (TargetSite(both, SITE_ID, action),))) == []
    for text, number in ((0x5000, 0x6000), (0, 0x6000), (0x5000, 0x7000), (0, 0)):
        kernel.hit(0x10, rdi=text, rsp=number)
    closed(engine, 1)
    assert {key: (row.count, row.values, row.total) for key, row in sink.added.items()} == {
        (0, (b"a te" + CUT, UID, 40, GID)): (1, 1, 40),
        (0, (None, UID, 40, GID)): (1, 1, 40),
        (0, (b"a te" + CUT, UID, None, GID)): (1, 0, 0),
        (0, (None, UID, None, GID)): (1, 0, 0),
    }
    # those alone whose number may be somewhere
    assert len(sink.rows) == 2


def test_bytes_are_keys_with_all_their_zeros(kernel: FakeKernel, engine: BpfEngine) -> None:
    only = site("a", 0x10, [argument(Register("rdi")), argument(Register("rsi"))])
    found = sample_object(only)
    kernel.memory |= {0x5000: b"abcdefghij\0\0", 0x6000: b"\0" * 12, 0x7000: b"short"}
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    keys = Capture(0, is_buffer=True, max_bytes=12), Capture(1), Capture(0, is_buffer=True, max_bytes=3)
    sink.aggregation = Aggregation((COUNT,), keys)
    wanted = (TargetSite(only, SITE_ID, Aggregate(sink.aggregation)),)
    assert engine.arm(1, Target(found, kernel.path, wanted)) == []
    for address in (0x5000, 0x6000, 0x7000, 0):
        kernel.hit(0x10, rdi=address, rsi=5)
    closed(engine, 1)
    assert sink.added == {
        (0, (b"abcdefghij\0\0", 5, b"abc")): Row(1),
        (0, (bytes(12), 5, bytes(3))): Row(1),
        (0, (None, 5, b"sho")): Row(1),
        (0, (None, 5, None)): Row(1),
    }
    # the one that may be in memory, but for its end
    assert len(sink.rows) == 1


def test_hit_that_is_handed_over_is_counted_once_by_everybody(kernel: FakeKernel, engine: BpfEngine) -> None:
    """One subscription's key is not in memory; another's is, and a third wants all events."""
    both = site("a", 0x10, [argument(Memory("rsp", 0)), argument(Memory("rbp", 0))])
    found = sample_object(both)
    events = RecordingSink()
    engine.open(9, events, 64)
    wanted = (TargetSite(both, SITE_ID, Emit((Capture(0),))),)
    assert engine.arm(9, Target(found, kernel.path, wanted)) == []
    sinks = []
    for index in (0, 1):
        sink = AddingSink()
        sink.aggregation = Aggregation((COUNT,), (Capture(index),))
        engine.open(index, sink, 64, "me", sink)
        wanted = (TargetSite(both, SITE_ID, Aggregate(sink.aggregation)),)
        assert engine.arm(index, Target(found, kernel.path, wanted)) == []
        sinks.append(sink)
    kernel.memory[0x6000] = (40).to_bytes(8, "little")
    kernel.hit(0x10, rsp=0x7000, rbp=0x6000)
    kernel.hit(0x10, rsp=0x6000, rbp=0x6000)
    for subscription_key in (0, 1, 9):
        closed(engine, subscription_key)
    assert sinks[0].added == {(0, (None,)): Row(1), (0, (40,)): Row(1)}
    assert sinks[1].added == {(0, (40,)): Row(2)}
    assert [len(sink.rows) for sink in sinks] == [1, 0]
    assert len(events.rows) == 2
    for each in (*sinks, events):
        assert (each.fired_count, each.losses) == (2, {})


@pytest.mark.parametrize("buckets", [POWERS_OF_TWO, FINE, LogLinear(8), Edges((-10, 0, 5, 1 << 62))])
def test_histogram_is_a_row_for_each_bucket(kernel: FakeKernel, engine: BpfEngine, buckets: Buckets) -> None:
    signed = site("a", 0x10, [argument(Register("rdi"), signed=True)])
    found = sample_object(signed)
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    action = Aggregate(Aggregation((HISTOGRAM, MAX), (HitField.CPU,), Capture(0), buckets))
    assert engine.arm(1, Target(found, kernel.path, (TargetSite(signed, SITE_ID, action),))) == []
    values = [0, 1, 4, 5, -1, -10, -11, 1000, 1 << 62, (1 << 63) - 1, -(1 << 63)]
    for value in values:
        kernel.hit(0x10, rdi=value % (1 << 64), cpu=1)
    closed(engine, 1)
    numbers, counts = np.unique(buckets.numbers(np.array(values)), return_counts=True)
    expected = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    assert sink.added == {(0, (1,)): Row(len(values), len(values), 0, min(values), max(values), buckets=expected)}


def test_sums_exceed_64_bits(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, Aggregation((AVG,), (), Capture(0)))
    most = (1 << 64) - 1
    hit(kernel, most, most, most)
    closed(engine, 1)
    assert sink.added == {(0, ()): Row(3, 3, 3 * most)}
    assert sink.added[0, ()].average == float(most)


LONGEST = "+".join(["arg0"] * (MAX_OPERATIONS + 1))
FLOAT = Argument("8f@%xmm0", 8, signed=True, is_float=True, operand=Register("rdi"))


def computed(text: str) -> ExpressionSource:
    return ExpressionSource(parse_value(text, lambda _: None))


LONG = Capture(0, is_string=True, max_bytes=264)
LONG_BYTES = Capture(0, is_buffer=True, max_bytes=265)


@pytest.mark.parametrize(
    ("aggregation", "argument_", "reason"),
    [
        (Aggregation((STDDEV,), (), Capture(0)), argument(), "the kernel computes no standard deviation"),
        (Aggregation((COUNT,), (computed("arg0 / 2.0"),)), argument(), "the kernel does not calculate arg0 / 2.0: "),
        (Aggregation((SUM,), (Capture(0),), computed("str(arg0) ~ 'a'")), argument(), "no strings"),
        (Aggregation((COUNT,), (computed("arg0 + 1"),)), FLOAT, "arg0: 8f@%xmm0 is a floating-point number"),
        (Aggregation((COUNT,), (computed("arg0 + 1"),)), argument(Register("xmm0")), "%xmm0 is no register"),
        (Aggregation((COUNT,), (computed(LONGEST), computed("-arg0"))), argument(), "at most 32 operations"),
        (Aggregation((COUNT,), (LONG,)), argument(), "its key takes 280 bytes, and in the kernel at most 272"),
        (Aggregation((COUNT,), (LONG_BYTES,)), argument(), "its key takes 280 bytes, and in the kernel at most 272"),
        (Aggregation((COUNT,), (HitField.PID,) * 16), argument(), "its key has 16 parts, and in the kernel at most 15"),
        (Aggregation((SUM,), (), Capture(0)), argument(size=12), "8@%rdi is no integer"),
        (
            Aggregation((COUNT,), (Capture(0),)),
            FLOAT,
            "8f@%xmm0 is no integer",
        ),
        (Aggregation((HISTOGRAM,), (), Capture(0), LogLinear(9)), argument(), "at most 256 buckets"),
        (Aggregation((COUNT,), (Capture(0),)), argument(Register("xmm0")), "%xmm0 is no register"),
    ],
)
def test_what_the_program_cannot_do_is_refused_with_the_same_reason(
    kernel: FakeKernel, engine: BpfEngine, aggregation: Aggregation, argument_: Argument, reason: str
) -> None:
    only = site("a", 0x10, [argument_])
    told = engine.why_not_aggregated(aggregation, only, "x86-64")
    assert told is not None
    assert reason in told
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    found = sample_object(only)
    (refusal,) = engine.arm(1, Target(found, kernel.path, (TargetSite(only, 1, Aggregate(aggregation)),)))
    assert refusal.reason == told
    assert kernel.loaded.row_tables.banks == {}


def test_what_just_fits_is_taken(engine: BpfEngine) -> None:
    longest = Capture(0, is_string=True, max_bytes=247)
    assert engine.why_not_aggregated(Aggregation((COUNT,), (longest,)), A, "x86-64") is None
    assert engine.why_not_aggregated(Aggregation((COUNT,), (HitField.PID,) * 15), A, "x86-64") is None


def test_keys_and_values_are_calculated(kernel: FakeKernel, engine: BpfEngine) -> None:
    """For two subscriptions at once, of which only one wants the first hit."""
    both = site("a", 0x10, [argument(Register("rdi"), signed=True), argument(Memory("rsp", 0))])
    found = sample_object(both)
    kernel.memory[0x6000] = (7).to_bytes(8, "little")
    wanted = {
        1: (Aggregation((SUM, MIN, MAX), (computed("arg0 % 4"), HitField.PID), computed("arg0 * 2 - 1")), None),
        2: (Aggregation((COUNT,), (computed("arg0 > 1 && arg1 > 6"), computed("12 / arg0"))), where("arg0 + 1 < 3")),
    }
    sinks = {key: AddingSink() for key in wanted}
    for key, (aggregation, predicate) in wanted.items():
        engine.open(key, sinks[key], 64, "me", sinks[key])
        site_ = TargetSite(both, SITE_ID, Aggregate(aggregation), predicate=predicate)
        assert engine.arm(key, Target(found, kernel.path, (site_,))) == []
    for number in (6, -3, 0, 1):
        kernel.hit(0x10, rdi=number % (1 << 64), rsp=0x6000)
    for key in wanted:
        closed(engine, key)
    assert sinks[1].added == {
        (0, (2, 10)): Row(1, 1, 11, 11, 11),
        (0, (-3, 10)): Row(1, 1, -7, -7, -7),
        (0, (0, 10)): Row(1, 1, -1, -1, -1),
        (0, (1, 10)): Row(1, 1, 1, 1, 1),
    }
    assert {key: row.count for (_, key), row in sinks[2].added.items()} == {(0, -4): 1, (0, 12): 1}
    # 12 / 0 is handed over like what is not in memory
    assert (len(sinks[2].rows), sinks[2].filtered_count) == (1, 1)


def test_site_calculates_so_much_and_no_more(kernel: FakeKernel, engine: BpfEngine) -> None:
    """Fifteen keys for each subscription, of which six have room."""
    aggregation = Aggregation((COUNT,), tuple(computed(f"arg0 + {number}") for number in range(1, 16)))
    sinks = [adding(engine, kernel, number, aggregation, owner=f"client {number}") for number in range(6)]
    refused_one = AddingSink()
    engine.open(6, refused_one, 64, "client 6", refused_one)
    wanted = Target(FOUND, kernel.path, (TargetSite(A, SITE_ID, Aggregate(aggregation)),))
    (refusal,) = engine.arm(6, wanted)
    assert refusal.reason == "the bpf engine cannot calculate that many keys and values at a site"
    restricted = Aggregation((COUNT,), (computed("arg0 + 1"),) * 8)
    for number in range(4):
        closed(engine, number)
    hit(kernel, 5)
    for number in (4, 5):
        closed(engine, number)
        assert sinks[number].added == {(0, tuple(range(6, 21))): Row(1)}
    keys = range(10, 16)
    refusals = []
    for key in keys:
        sink = AddingSink()
        engine.open(key, sink, 64, f"client {key}", sink)
        site_ = TargetSite(A, SITE_ID, Aggregate(restricted))
        refusals += engine.arm(key, Target(FOUND, kernel.path, (site_,), owners=frozenset({1000})))
    assert [each.reason for each in refusals] == [
        "its calculations are too many for clients that may not trace everybody's processes"
    ]


def test_one_owner_cannot_take_all_tables(kernel: FakeKernel, engine: BpfEngine) -> None:
    limit = layout.MAX_TABLES // 4
    for subscription_key in range(limit):
        adding(engine, kernel, subscription_key, Aggregation((COUNT,), (Capture(0),), max_keys=1))
    sink = AddingSink()
    engine.open(limit, sink, 64, "me", sink)
    (refusal,) = engine.arm(limit, Target(FOUND, kernel.path, (TargetSite(A, 1, Aggregate(BY_ARGUMENT)),)))
    assert "have 32 aggregations, which is the limit" in refusal.reason
    adding(engine, kernel, limit + 1, BY_ARGUMENT, owner="another")


def test_one_owner_cannot_take_all_edges(kernel: FakeKernel, engine: BpfEngine) -> None:
    many = Aggregation((HISTOGRAM,), (), Capture(0), Edges(tuple(range(2048))), max_keys=1)
    limit = layout.MAX_EDGES // 4 // 2048
    for subscription_key in range(limit):
        adding(engine, kernel, subscription_key, many)
    sink = AddingSink()
    engine.open(limit, sink, 64, "me", sink)
    (refusal,) = engine.arm(limit, Target(FOUND, kernel.path, (TargetSite(A, 1, Aggregate(many)),)))
    assert "as many edges as one client's may" in refusal.reason
    adding(engine, kernel, limit + 1, many, owner="another")


def test_probes_as_keys_have_room_for_more_than_one_site(kernel: FakeKernel, engine: BpfEngine) -> None:
    adding(engine, kernel, 1, Aggregation((SUM,), (HitField.NAME,), Capture(0), max_keys=5000))
    assert {rows.max_entries for rows in kernel.loaded.row_tables.banks.values()} == {5000}


def test_nothing_is_left_of_it(kernel: FakeKernel, engine: BpfEngine) -> None:
    before = free(kernel, engine)
    histogram = Aggregation((HISTOGRAM,), (Capture(0),), Capture(0), Edges((1, 2, 3)))
    for subscription_key in (1, 2):
        adding(engine, kernel, subscription_key, histogram)
    assert engine.metrics().table_bytes > 0
    hit(kernel, 1, 2)
    for subscription_key in (1, 2):
        closed(engine, subscription_key)
    engine.retry_cleanup()
    wait_for(lambda: not kernel.loaded.row_tables.banks, "the tables to be gone")
    assert engine.metrics().table_bytes == 0
    nothing_is_left(engine, kernel, before)
    kernel.pools.recipes.recipes.allocate(layout.MAX_RECIPES - layout.FIRST_RECIPE)
    kernel.pools.recipes.edges.allocate(layout.MAX_EDGES)


def test_wait_that_fails_is_tried_again(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, BY_ARGUMENT)
    hit(kernel, 1)
    kernel.loaded.waits_refused.append(OSError(errno.ENOMEM, "as told"))
    collected(engine)
    assert sink.added == {(0, (1,)): Row(1)}


def test_rows_that_could_not_be_taken_come_later(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = adding(engine, kernel, 1, BY_ARGUMENT)
    hit(kernel, 1)
    rows = kernel.loaded.row_tables.banks[0, kernel.loaded.parity]
    rows.refuse_taking = OSError(errno.ENOMEM, "as told")
    collected(engine)
    assert sink.added == {}
    rows.refuse_taking = None
    closed(engine, 1)
    assert sink.added == {(0, (1,)): Row(1)}


def test_sink_that_fails_loses_its_own_rows_and_is_told(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink, other = (adding(engine, kernel, number, BY_ARGUMENT) for number in (1, 2))

    def fail() -> None:
        raise ValueError("as told")

    sink.before_rows = fail
    hit(kernel, 1, 1)
    collected(engine)
    assert sink.losses == {LossStage.DECODE: 2}
    assert other.added == {(0, (1,)): Row(2)}


class SlowSink(AddingSink):
    """Adds up rows when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[ManyRows] = []

    def aggregated_many(self, rows: ManyRows) -> None:
        self.waiting.append(rows)

    def go_on(self) -> None:
        for rows in self.waiting:
            super().aggregated_many(rows)
        self.waiting.clear()


def test_rows_of_a_sink_that_is_behind_stay_in_the_kernel(kernel: FakeKernel, engine: BpfEngine) -> None:
    slow = SlowSink()
    few = Aggregation((COUNT,), (Capture(0),), max_keys=100)
    adding(engine, kernel, 1, few, sink=slow)
    other = adding(engine, kernel, 2, few)
    hit(kernel, *range(60))
    wait_for(lambda: slow.waiting and other.counted == 60, "both to be drained, being half full")
    hit(kernel, *range(60))
    wait_for(lambda: other.counted == 120, "the other one's to be drained again")
    assert len(slow.waiting) == 1
    # who asks for all hits so far gets them
    collected(engine)
    assert sum(rows.hits for rows in slow.waiting) == 120
    slow.go_on()
    assert slow.counted == 120
    hit(kernel, *range(60))
    wait_for(lambda: slow.waiting, "it to be drained unasked again")
    slow.go_on()
    closed(engine, 1)
    slow.go_on()
    closed(engine, 2)
    assert (slow.counted, other.counted) == (180, 180)
    assert slow.losses == {}


def test_rows_that_a_sink_refuses_are_lost_and_it_is_drained_further(kernel: FakeKernel, engine: BpfEngine) -> None:
    class Refusing(AddingSink):
        refuses = True

        def aggregated_many(self, rows: ManyRows) -> None:
            if self.refuses:
                raise ValueError("as told")
            super().aggregated_many(rows)

    sink = Refusing()
    adding(engine, kernel, 1, Aggregation((COUNT,), (Capture(0),), max_keys=100), sink=sink)
    hit(kernel, *range(60))
    wait_for(lambda: sink.losses == {LossStage.DECODE: 60}, "the rows to be refused")
    sink.refuses = False
    hit(kernel, *range(70))
    wait_for(lambda: sink.counted == 70, "the next ones to come")


def test_many_rows_come_in_parts(kernel: FakeKernel, engine: BpfEngine) -> None:
    slow = SlowSink()
    adding(engine, kernel, 1, Aggregation((COUNT,), (Capture(0),), max_keys=4000), sink=slow)
    hit(kernel, *range(1500), 7)
    collected(engine)
    # at once, or in several goes if the host is busy
    assert sum(rows.hits for rows in slow.waiting) == 1501
    for rows in slow.waiting:
        hits, parts = rows.hits, list(rows.parts())
        assert sum(of_part for of_part, _ in parts) == hits
        assert {len(part[0]) for _, part in parts[:-1]} <= {512}
        assert len(parts[-1][1][0]) <= 512


def test_many_collect_at_once(kernel: FakeKernel, engine: BpfEngine) -> None:
    """As the streams of many subscriptions do: each sees what fired before it asked."""
    sink = adding(engine, kernel, 1, BY_ARGUMENT)
    seen: list[bool] = []

    def ask(number: int) -> None:
        collected(engine)
        seen.append((0, (number,)) in sink.added)

    hit(kernel, *range(8))
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def test_processes_that_are_excluded_later_are_in_no_row(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = AddingSink()
    engine.open(1, sink, 64, "me", sink)
    wanted = (TargetSite(A, SITE_ID, Aggregate(BY_ARGUMENT)),)
    excluded = frozenset({66})
    assert engine.arm(1, Target(FOUND, kernel.path, wanted, exclude_later=excluded)) == []
    hit(kernel, 1)
    hit(kernel, 2, pid=66)
    closed(engine, 1)
    assert sink.added == {(0, (1,)): Row(1)}
