from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.decode import RecordDecoder
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Reading
from stapsdtd.capture.bpf.rings import record_dtype
from stapsdtd.capture.bpf.sources import Fixed, Layout, NoText, NumberAt, Source, TextAt
from stapsdtd.capture.bpf.tables import PlanEntry
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import CUT
from stapsdtd.spans.span import SpanCounts
from tests.unit.samples import batch, channels_of, columns_of, event_rows, no_cgroups, signed, strings, value_list

STRIDE = layout.STRIDES[3]
DISCARDED = 1 << 30
ALL_BITS = (1 << 64) - 1

Value = int | bytes | None
ADDRESS = 0x7FFF_1234_5678
"""What stands in the place of a value that could not be read."""


@dataclass(frozen=True)
class Hit:
    """values: numbers, texts, and None for what could not be read."""

    plan: int
    values: Sequence[Value] = ()
    time_ns: int = 0
    matched: int = 0
    pid: int = 10
    tid: int = 11
    cpu: int = 0
    comm: bytes = b"app"
    is_discarded: bool = False


class Recorder:
    def __init__(self) -> None:
        self.calls: list[EventBatch] = []
        self.filtered_count = 0

    def deliver(self, batch: EventBatch) -> None:
        self.calls.append(batch)

    def fired(self, count: int) -> None:
        raise AssertionError(count)

    def filtered(self, count: int, undecided: int = 0) -> None:
        del undecided
        self.filtered_count += count

    def spanned(self, counts: SpanCounts) -> None:
        del counts

    def lost(self, stage: LossStage, count: int) -> None:
        raise AssertionError(stage, count)


def record(hit: Hit, stride: int = STRIDE) -> bytes:
    """A record as the program leaves it in a ring, the kernel's header in front."""
    missing = sum(1 << position for position, value in enumerate(hit.values) if value is None)
    head = (hit.time_ns, hit.tid, hit.pid, hit.matched, hit.plan, missing, hit.cpu, hit.comm)
    numbers, texts = [], b""
    for value in hit.values:
        if isinstance(value, bytes):
            numbers.append(len(value) << 32 | layout.RECORD.itemsize + 8 * len(hit.values) + len(texts))
            texts += value
        else:
            numbers.append(ADDRESS if value is None else value & ALL_BITS)
    length = stride - layout.RECORD_HEADER | DISCARDED * hit.is_discarded
    header = np.array([length, 0], "u4").tobytes()
    content = header + np.array([head], layout.RECORD).tobytes() + np.array(numbers, "u8").tobytes() + texts
    assert len(content) <= stride
    return content.ljust(stride, b"\xcc")


def decoder_of(memory: bytes | bytearray, stride: int = STRIDE) -> RecordDecoder:
    return RecordDecoder(np.frombuffer(memory, record_dtype(stride)), memoryview(memory), stride, no_cgroups())


def decoder(*hits: Hit) -> RecordDecoder:
    return decoder_of(b"".join(map(record, hits)))


def channel(subscription_key: int = 1, excluded: Iterable[int] = ()) -> Channel:
    return Channel(subscription_key, Recorder(), frozenset(excluded))


def active(number: int, *readings: Reading, tested: int = 0) -> ActivePlan:
    bits = tuple(sorted({reading.bit for reading in readings}))
    return ActivePlan(PlanEntry(number, 0, b"", 0, 0, bits), channels_of(readings), readings, tested)


def decode(plans: Iterable[ActivePlan], *hits: Hit) -> list[tuple[Channel, EventBatch]]:
    batches, unknown = decoder(*hits).events({plan.entry.generation: plan for plan in plans})
    assert unknown == 0
    return batches


def columns(sources: Layout, *records: Sequence[Value]) -> list[list[Value]]:
    """Answer the values of each source, one an event."""
    plan = active(1, Reading(channel(), 0, 1, sources))
    ((_, found),) = decode([plan], *(Hit(1, values) for values in records))
    return [value_list(column) for column in columns_of(found)]


def layout_of(source: Source) -> str:
    plan = active(1, Reading(channel(), 0, 1, (source,)))
    ((_, found),) = decode([plan], Hit(1, [b"x"]), Hit(1, [None]))
    ((name,),) = (table.layout for table in found.tables)
    return name


def seen(batches: Iterable[tuple[Channel, EventBatch]]) -> dict[int, list[list[tuple[Any, ...]]]]:
    """Return each subscription's batches, as (time_ns, site_id, values…) of their events."""
    found: dict[int, list[list[tuple[Any, ...]]]] = {}
    for where, each in batches:
        found.setdefault(where.subscription_key, []).append([(row[0], *row[5:]) for row in event_rows(each)])
    return found


def test_who_when_and_where() -> None:
    plan = active(1, Reading(channel(), 0, 7, ()))
    hits = [
        Hit(1, time_ns=(1 << 63) - 1, pid=(1 << 22) - 1, tid=5, cpu=1023, comm=b"fifteen-letters"),
        Hit(1, time_ns=2, pid=4, tid=1 << 21, comm=b""),
    ]
    ((_, found),) = decode([plan], *hits)
    assert event_rows(found) == [
        ((1 << 63) - 1, (1 << 22) - 1, 5, 1023, b"fifteen-letters", 7), (2, 4, 1 << 21, 0, b"", 7),
    ]  # fmt: skip


def test_columns_have_the_types_of_a_batch() -> None:
    plan = active(1, Reading(channel(), 0, 7, (NumberAt(0, is_signed=True), NumberAt(0, is_signed=False))))
    for hits in ([Hit(1, [1])], [Hit(1, [1])] * 3, [Hit(1, [1]), Hit(1, [2], is_discarded=True)]):
        ((_, found),) = decode([plan], *hits)
        reference = batch([1])
        for name in ("time_ns", "pid", "tid", "cpu", "comm", "site_id"):
            assert getattr(found, name).dtype == getattr(reference, name).dtype, name
        assert [table.layout for table in found.tables] == [("signed", "unsigned")]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_numbers_are_read_by_their_sign(numbers: list[int]) -> None:
    of_both = columns((NumberAt(0, is_signed=True), NumberAt(0, is_signed=False)), *([number] for number in numbers))
    assert of_both == [numbers, [number & ALL_BITS for number in numbers]]


def test_sources_read_their_own_positions() -> None:
    sources = NumberAt(2, is_signed=False), TextAt(3, 8), NumberAt(0, is_signed=False), TextAt(1, 8)
    assert columns(sources, [10, b"eleven", 12, b"13"], [20, b"", 22, b"23"]) == [
        [12, 22], [b"13", b"23"], [10, 20], [b"eleven", b""],
    ]  # fmt: skip


def test_what_could_not_be_read_has_no_value() -> None:
    sources = NumberAt(0, is_signed=True), NumberAt(1, is_signed=False), TextAt(2, 8), TextAt(3, 8, is_raw=True)
    records: list[list[Value]] = [[None, 1, b"a", None], [2, None, None, b"b"], [3, 4, b"", b"c\0d"]]
    assert columns(sources, *records) == [[None, 2, 3], [1, None, 4], [b"a", None, b""], [None, b"b", b"c\0d"]]


def test_column_with_all_its_values_says_so() -> None:
    plan = active(1, Reading(channel(), 0, 1, (NumberAt(0, is_signed=True), TextAt(1, 8))))
    ((_, found),) = decode([plan], Hit(1, [1, b"a", None]), Hit(1, [2, b"b", 3]))
    assert [column.unavailable for column in columns_of(found)] == [None, None]


@pytest.mark.parametrize("is_raw", [True, False])
def test_texts_are_cut_to_each_subscriptions_own_bound(is_raw: bool) -> None:
    mark = b"" if is_raw else CUT
    sources = TextAt(0, 3, is_raw), TextAt(0, 6, is_raw), TextAt(0, 4096, is_raw)
    assert columns(sources, [b"abcdefgh"], [b"abc"], [b""]) == [
        [b"abc" + mark, b"abc", b""], [b"abcdef" + mark, b"abc", b""], [b"abcdefgh", b"abc", b""],
    ]  # fmt: skip


def test_raw_bytes_are_no_strings() -> None:
    assert layout_of(TextAt(0, 8)) == "string"
    assert layout_of(TextAt(0, 8, is_raw=True)) == "bytes"
    assert layout_of(NoText()) == "string"
    assert layout_of(Fixed(None, is_signed=True)) == "signed"
    assert layout_of(Fixed(5, is_signed=False)) == "unsigned"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Fixed(-5, is_signed=True), -5),
        (Fixed(-(1 << 63), is_signed=True), -(1 << 63)),
        (Fixed(ALL_BITS, is_signed=False), ALL_BITS),
        (Fixed(0, is_signed=False), 0),
        (Fixed(None, is_signed=True), None),
        (NoText(), None),
    ],
)
def test_what_stands_in_the_note_is_in_no_record(source: Source, expected: Value) -> None:
    assert columns((source,), [], []) == [[expected, expected]]


@pytest.mark.parametrize("stride", layout.STRIDES)
def test_records_of_each_size(stride: int) -> None:
    room = stride - layout.RECORD_HEADER - layout.RECORD.itemsize - 3 * 8
    long = min(room // 2, layout.MAX_TEXT)
    events: list[list[Value]] = [
        [number, bytes([65 + number]) * long, bytes([97 + number]) * (room - long)] for number in range(3)
    ]
    plan = active(1, Reading(channel(), 0, 1, (NumberAt(0, is_signed=True), TextAt(1, room), TextAt(2, room))))
    memory = b"".join(record(Hit(1, values), stride) for values in events)
    ((_, found),), _ = decoder_of(memory, stride).events({1: plan})
    assert list(zip(*map(value_list, columns_of(found)), strict=True)) == list(map(tuple, events))


def test_sites_of_one_layout_become_one_table_in_the_rings_order() -> None:
    where = channel()
    plans = [
        active(number, Reading(where, 0, 100 + number, (NumberAt(0, is_signed=True), TextAt(1, 8))))
        for number in (1, 2, 300)
    ]
    order = (2, 300, 1, 300, 2, 2, 1)
    hits = [Hit(number, [number * time, b"%d" % time], time_ns=time) for time, number in enumerate(order)]
    assert seen(decode(plans, *hits)) == {
        1: [[(time, 100 + number, number * time, b"%d" % time) for time, number in enumerate(order)]]
    }


def test_sites_of_other_layouts_become_tables_of_their_own() -> None:
    where = channel()
    plans = [
        active(1, Reading(where, 0, 7, (NumberAt(0, is_signed=True),))),
        active(2, Reading(where, 0, 8, (NumberAt(0, is_signed=False),))),
        active(3, Reading(where, 0, 9, (TextAt(0, 8),))),
    ]
    hits = [Hit(1, [-1], 1), Hit(3, [b"a"], 2), Hit(2, [-1], 3), Hit(1, [5], 4)]
    ((_, found),) = decode(plans, *hits)
    assert seen([(where, found)]) == {1: [[(1, 7, -1), (2, 9, b"a"), (3, 8, ALL_BITS), (4, 7, 5)]]}
    layouts = {table.layout: table.positions(len(found)).tolist() for table in found.tables}
    assert layouts == {("signed",): [0, 3], ("string",): [1], ("unsigned",): [2]}


def test_values_of_one_type_that_come_from_different_places_share_a_table() -> None:
    where = channel()
    plans = [
        active(1, Reading(where, 0, 7, (NumberAt(0, is_signed=True), TextAt(1, 8)))),
        active(2, Reading(where, 0, 8, (Fixed(5, is_signed=True), TextAt(0, 4)))),
        active(3, Reading(where, 0, 9, ())),
    ]
    hits = [Hit(2, [b"a"], 1), Hit(1, [-1, b"bc"], 2), Hit(3, [], 3), Hit(2, [b"defgh"], 4), Hit(1, [None, b""], 5)]
    ((_, found),) = decode(plans, *hits)
    assert seen([(where, found)]) == {
        1: [[(1, 8, 5, b"a"), (2, 7, -1, b"bc"), (3, 9), (4, 8, 5, b"defg" + CUT), (5, 7, None, b"")]]
    }
    assert sorted(table.layout for table in found.tables) == [(), ("signed", "string")]


def test_each_subscription_of_a_site_reads_it_its_own_way() -> None:
    first, second, third = map(channel, (1, 2, 3))
    plan = active(
        1,
        Reading(first, 0, 11, (NumberAt(0, is_signed=True),)),
        Reading(second, 0, 22, (NumberAt(0, is_signed=True),)),
        Reading(third, 0, 33, (TextAt(1, 2), Fixed(4, is_signed=True))),
    )
    assert seen(decode([plan], Hit(1, [-1, b"abc"], 1), Hit(1, [-2, b"d"], 2))) == {
        1: [[(1, 11, -1), (2, 11, -2)]], 2: [[(1, 22, -1), (2, 22, -2)]],
        3: [[(1, 33, b"ab" + CUT, 4), (2, 33, b"d", 4)]],
    }  # fmt: skip


def test_filters_bit_says_whose_an_event_is() -> None:
    channels = [channel(subscription_key) for subscription_key in range(1, 6)]
    bits = (0, 1, 1, 63, 5)
    readings = [Reading(where, bit, where.subscription_key, ()) for where, bit in zip(channels, bits, strict=True)]
    plan = active(1, *readings, tested=1 << 63 | 1 << 5 | 0b11)
    hits = [Hit(1, time_ns=time, matched=matched) for time, matched in enumerate((0b01, 1 << 63, 0b11, ALL_BITS - 32))]
    assert seen(decode([plan], *hits)) == {
        1: [[(0, 1), (2, 1), (3, 1)]], 2: [[(2, 2), (3, 2)]], 3: [[(2, 3), (3, 3)]], 4: [[(1, 4), (3, 4)]],
    }  # fmt: skip
    assert {bit: plan.received.get(bit, 0) for bit in bits} == {0: 3, 1: 2, 63: 2, 5: 0}


def test_filter_that_accepts_all_is_not_looked_up() -> None:
    first, second = channel(1), channel(2)
    plan = active(1, Reading(first, 0, 1, ()), Reading(second, 1, 2, ()), tested=0b10)
    assert seen(decode([plan], Hit(1, time_ns=1), Hit(1, time_ns=2, matched=0b10))) == {
        1: [[(1, 1), (2, 1)]], 2: [[(2, 2)]],
    }  # fmt: skip
    assert plan.received == {0: 2, 1: 1}


def test_received_counts_on_over_batches_and_once_for_a_filter() -> None:
    plan = active(1, Reading(channel(1), 0, 1, ()), Reading(channel(2), 0, 2, ()))
    other = active(2, Reading(channel(1), 0, 3, ()))
    decode([plan], Hit(1), Hit(1))
    decode([plan, other], Hit(1), Hit(2), Hit(2), Hit(2), Hit(1))
    assert (plan.received, other.received) == ({0: 4}, {0: 3})


def test_room_that_was_lent_again_amid_a_batch() -> None:
    first, second = channel(1), channel(2)
    plans = active(3 << 16 | 5, Reading(first, 0, 1, ())), active(9 << 16 | 5, Reading(second, 0, 2, ()))
    order = (3, 9, 9, 3, 9)
    hits = [Hit(number << 16 | 5, time_ns=time) for time, number in enumerate(order)]
    assert seen(decode(plans, *hits)) == {1: [[(0, 1), (3, 1)]], 2: [[(1, 2), (2, 2), (4, 2)]]}
    assert [plan.received for plan in plans] == [{0: 2}, {0: 3}]


def test_records_of_unknown_plans_are_counted() -> None:
    plan = active(2, Reading(channel(), 0, 1, ()))
    batches, unknown = decoder(Hit(1), Hit(2, time_ns=5), Hit(3), Hit(1)).events({2: plan})
    assert (seen(batches), unknown) == ({1: [[(5, 1)]]}, 3)
    assert decoder(Hit(1), Hit(1)).events({2: plan}) == ([], 2)


def test_generations_of_one_plans_number_are_no_others() -> None:
    plan = active(1, Reading(channel(), 0, 1, ()))
    numbers = (1, 65537, 1, 131073, 65537, 1)
    batches, unknown = decoder(*(Hit(number, time_ns=time) for time, number in enumerate(numbers))).events({1: plan})
    assert (seen(batches), unknown) == ({1: [[(0, 1), (2, 1), (5, 1)]]}, 3)
    assert plan.received == {0: 3}


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_discarded_records_are_nothing_at_all(kept: int) -> None:
    """The program gave up in the middle, so that anything may stand there."""
    plan = active(1, Reading(channel(), 0, 1, (TextAt(0, 4096),)))
    garbage = Hit(1, [ALL_BITS], is_discarded=True)
    hits = [garbage, *(Hit(1, [b"text"], time_ns=time) for time in range(kept)), garbage, Hit(9, is_discarded=True)]
    batches, unknown = decoder(*hits).events({1: plan})
    assert seen(batches) == ({1: [[(time, 1, b"text") for time in range(kept)]]} if kept else {})
    assert unknown == 0
    assert plan.received.get(0, 0) == kept


@given(
    garbage=st.lists(st.binary(min_size=STRIDE, max_size=STRIDE), max_size=4),
    place=st.integers(0, 4),
    number=st.integers(2, ALL_BITS),
)
def test_garbage_of_an_unknown_plan_disturbs_no_other(garbage: list[bytes], place: int, number: int) -> None:
    at = layout.RECORD_HEADER + dict(layout.RECORD.fields or {})["generation"][1]
    records = [
        (STRIDE - 8).to_bytes(4, "little") + each[4:at] + number.to_bytes(8, "little") + each[at + 8 :]
        for each in garbage
    ]
    records.insert(place, record(Hit(1, [-7, b"text", 8], time_ns=5)))
    sources = NumberAt(0, is_signed=True), TextAt(1, 8), NumberAt(2, is_signed=False)
    batches, unknown = decoder_of(b"".join(records)).events({1: active(1, Reading(channel(), 0, 1, sources))})
    assert (seen(batches), unknown) == ({1: [[(5, 1, -7, b"text", 8)]]}, len(garbage))


@pytest.mark.parametrize("records", [1, 2, 3])
@pytest.mark.parametrize("tested", [0, 1])
def test_blocks_do_not_change_when_the_rings_room_is_used_again(records: int, tested: int) -> None:
    memory = bytearray(b"".join(record(Hit(1, [5, b"text"], 9, matched=1)) for _ in range(records)))
    plan = active(1, Reading(channel(), 0, 1, (NumberAt(0, is_signed=True), TextAt(1, 8))), tested=tested)
    ((_, found),), _ = decoder_of(memory).events({1: plan})
    before = event_rows(found)
    memory[:] = record(Hit(2, [6, b"next"], 10, 0, 20, 21, 3, b"other")) * records
    assert event_rows(found) == before == [(9, 10, 11, 0, b"app", 1, 5, b"text")] * records


# a record that a small helper writes is read as it was written


KINDS: Mapping[str, st.SearchStrategy[Value]] = {
    "signed": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    "unsigned": st.none() | st.integers(0, ALL_BITS),
    "string": st.none() | st.binary(max_size=20).map(lambda text: text.replace(b"\0", b"")),
    "bytes": st.none() | st.binary(max_size=20),
}


def source_at(position: int, kind: str, max_bytes: int) -> Source:
    if kind in {"signed", "unsigned"}:
        return NumberAt(position, kind == "signed")
    return TextAt(position, max_bytes, is_raw=kind == "bytes")


@dataclass(frozen=True)
class Wanted:
    """A subscription's part in a plan: the positions that it takes, and its bound for texts."""

    subscription_key: int
    bit: int
    positions: tuple[int, ...]
    max_bytes: int


@dataclass(frozen=True)
class PlanCase:
    kinds: tuple[str, ...]
    wanted: tuple[Wanted, ...]
    tested: int


@st.composite
def plan_cases(draw: st.DrawFn) -> PlanCase:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3).map(tuple))
    positions = st.lists(st.integers(0, len(kinds) - 1), max_size=3).map(tuple)
    subscription_keys = draw(st.sets(st.integers(1, 3), min_size=1))
    wanted = tuple(
        draw(st.builds(Wanted, st.just(subscription_key), st.integers(0, 2), positions, st.sampled_from([4, 64])))
        for subscription_key in sorted(subscription_keys)
    )
    return PlanCase(kinds, wanted, draw(st.integers(0, 7)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[int, PlanCase], list[Hit]]:
    cases = dict(enumerate(draw(st.lists(plan_cases(), min_size=1, max_size=3)), 1))
    hits = []
    for time_ns in range(draw(st.integers(1, 12))):
        number = draw(st.sampled_from(sorted(cases)))
        values = [draw(KINDS[kind]) for kind in cases[number].kinds]
        hits.append(Hit(number, values, time_ns, matched=draw(st.integers(0, 7))))
    return cases, hits


def expected_rows(cases: Mapping[int, PlanCase], hits: Sequence[Hit], subscription_key: int) -> list[tuple[Any, ...]]:
    rows = []
    for hit in hits:
        case = cases[hit.plan]
        for wanted in case.wanted:
            if wanted.subscription_key == subscription_key and (
                not case.tested >> wanted.bit & 1 or hit.matched >> wanted.bit & 1
            ):
                values = [hit.values[position] for position in wanted.positions]
                kinds = [case.kinds[position] for position in wanted.positions]
                cut = [cut_to(wanted.max_bytes, value, kind) for value, kind in zip(values, kinds, strict=True)]
                rows.append((hit.time_ns, 10 * hit.plan + subscription_key, *cut))
    return rows


def cut_to(most: int, value: Any, kind: str) -> Any:
    if not isinstance(value, bytes) or len(value) <= most:
        return value
    return value[:most] + (CUT if kind == "string" else b"")


@settings(max_examples=200)
@given(batches())
def test_each_subscription_gets_what_was_written_for_it(given_: tuple[dict[int, PlanCase], list[Hit]]) -> None:
    cases, hits = given_
    channels = {subscription_key: channel(subscription_key) for subscription_key in (1, 2, 3)}
    plans = []
    for number, case in cases.items():
        readings = []
        for wanted in case.wanted:
            sources = [source_at(position, case.kinds[position], wanted.max_bytes) for position in wanted.positions]
            readings.append(
                Reading(
                    channels[wanted.subscription_key], wanted.bit, 10 * number + wanted.subscription_key, tuple(sources)
                )
            )
        plans.append(active(number, *readings, tested=case.tested))
    found = seen(decode(plans, *hits))
    for subscription_key in channels:
        rows = expected_rows(cases, hits, subscription_key)
        # one batch, in the order of time
        assert found.get(subscription_key, []) == ([rows] if rows else [])


# delivery


def delivered(where: Channel) -> list[tuple[Any, ...]]:
    assert isinstance(where.sink, Recorder)
    (events,) = where.sink.calls
    return event_rows(events)


def test_batches_are_delivered_as_one_in_the_order_of_time() -> None:
    where = channel()
    batches = [
        batch([1, 4], signed(-1, None)),
        batch([2, 3], strings(b"a", None)),
        batch([0, 2], signed(5, 6), site_id=2),
    ]
    where.deliver(batches)
    assert [(row[0], *row[5:]) for row in delivered(where)] == [
        (0, 2, 5), (1, 1, -1), (2, 1, b"a"), (2, 2, 6), (3, 1, None), (4, 1, None),
    ]  # fmt: skip


def test_excluded_processes_count_as_filtered() -> None:
    where = channel(excluded=[20, 30])
    batches = [
        batch([1, 2, 3, 4], signed(1, 2, 3, 4), pid=[10, 20, 30, 40]),
        batch([5, 6, 7], strings(b"a", b"bc", None), pid=[30, 10, 10]),
        batch([8, 9], signed(8, 9), pid=[20, 20]),
    ]
    where.deliver(batches)
    assert [(row[0], row[1], row[-1]) for row in delivered(where)] == [
        (1, 10, 1), (4, 40, 4), (6, 10, b"bc"), (7, 10, None),
    ]  # fmt: skip
    assert isinstance(where.sink, Recorder)
    assert where.sink.filtered_count == 5


def test_nothing_is_delivered_when_all_processes_are_excluded() -> None:
    where = channel(excluded=[10])
    where.deliver([batch([1, 2])])
    assert isinstance(where.sink, Recorder)
    assert where.sink.calls == []
    assert where.sink.filtered_count == 2


@pytest.mark.parametrize("excluded", [[], [99]])
def test_processes_that_are_not_excluded_are_not_filtered(excluded: list[int]) -> None:
    where = channel(excluded=excluded)
    where.deliver([batch([1, 2], pid=[10, 20])])
    assert isinstance(where.sink, Recorder)
    assert [row[1] for row in delivered(where)] == [10, 20]
    assert where.sink.filtered_count == 0


def test_floating_point_numbers_of_both_sizes() -> None:
    single, double = (int.from_bytes(struct.pack(kind, -1.5), "little") for kind in ("<f", "<d"))
    sources = NumberAt(0, is_signed=True, float_bytes=4), NumberAt(1, is_signed=False, float_bytes=8)
    nothing = Fixed(None, is_signed=False, is_float=True)
    assert columns((*sources, nothing), [single, double]) == [[-1.5], [-1.5], [None]]
    assert {layout_of(source) for source in (NumberAt(0, is_signed=True, float_bytes=4), nothing)} == {"float"}
