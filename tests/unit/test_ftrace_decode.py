from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.ftrace.decode import Decoded, Decoder, SiteConsumer, decode_records
from stapsdtd.capture.ftrace.format import EventFormat, FieldPlace, PageFormat
from stapsdtd.capture.ftrace.pages import Records, parse_pages
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import CUT, I32
from stapsdtd.model import Argument, Capture, Constant, Memory, Register, SiteCapture, Unavailable
from stapsdtd.plan.events import EventSpec, group_sites
from tests.unit.ring_pages import EVENT_ID, HEADER, PAGE_BYTES, Data, Kernel, page
from tests.unit.samples import argument, captured, columns_of, event_rows, key, site, value_list

PID_OFFSET = 1000


def pids_of(tids: I32) -> I32:
    return (tids - PID_OFFSET).astype(np.int32)


def records_of(contents: Sequence[bytes], cpu: int = 2) -> Records:
    data = page(100, *(Data(1, content) for content in contents))
    return parse_pages(cpu, [data], PageFormat(HEADER, PAGE_BYTES))


def decode_one(spec: EventSpec, *records: bytes, site_ids: tuple[int, ...] | None = None) -> list[EventBatch]:
    ids = site_ids or range(1, len(spec.sites) + 1)
    wishes = (SiteConsumer(ident, len(plan.capture.captures)) for ident, plan in zip(ids, spec.sites, strict=True))
    decoder = Decoder(spec, Kernel(spec).format, tuple(wishes))
    decoded = decode_records(records_of(records), {EVENT_ID: decoder}, pids_of)
    assert (decoded.filtered, decoded.unknown) == (0, 0)
    return decoded.batches


def spec_of(*captures: SiteCapture) -> EventSpec:
    (spec,) = group_sites("instance", key(), "x86-64", captures)
    return spec


def one_value(operand: Argument, capture: Capture, **fields: Any) -> Any:
    spec = spec_of(captured(site(arguments=[operand]), capture))
    (found,) = decode_one(spec, Kernel(spec).record(0, **fields))
    return value_list(columns_of(found)[0])[0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
@given(raw=st.integers(0, (1 << 64) - 1), first_bit=st.sampled_from([0, 8]))
def test_register_is_narrowed_to_the_arguments_width(size: int, signed: bool, raw: int, first_bit: int) -> None:
    first_bit = first_bit if size == 1 else 0
    value = raw >> first_bit & (1 << 8 * size) - 1
    expected = value - (1 << 8 * size) if signed and value >> (8 * size - 1) else value
    found = argument(Register("rax", first_bit), size, signed=signed)
    assert one_value(found, Capture(0), q0=raw) == expected


@pytest.mark.parametrize(("size", "field"), [(1, "b0"), (2, "w0"), (4, "d0"), (8, "q0")])
@pytest.mark.parametrize("signed", [True, False])
def test_memory_at_its_width(size: int, field: str, signed: bool) -> None:
    found = argument(Memory("rbp", -8), size, signed=signed)
    assert one_value(found, Capture(0), **{field: -2}) == (-2 if signed else (1 << 8 * size) - 2)


@pytest.mark.parametrize(
    ("constant", "size", "signed", "expected"),
    [(-5, 4, True, -5), (-5, 4, False, (1 << 32) - 5), ((1 << 64) - 1, 8, False, (1 << 64) - 1), (200, 1, True, -56)],
)
def test_constants(constant: int, size: int, signed: bool, expected: int) -> None:
    assert one_value(argument(Constant(constant), size, signed=signed), Capture(0)) == expected


@pytest.mark.parametrize("is_string", [True, False])
def test_what_is_unavailable_has_no_value(is_string: bool) -> None:
    assert one_value(argument(Unavailable("because")), Capture(0, is_string)) is None


@pytest.mark.parametrize(
    ("given_", "max_bytes", "expected"),
    [
        (b"SELECT 1", None, b"SELECT 1"),
        (b"", None, b""),
        (None, None, None),
        (b"abcdef", 4, b"abcd" + CUT),
        (b"abcd", 4, b"abcd"),
        (b"ab", 4, b"ab"),
    ],
)
def test_strings(given_: bytes | None, max_bytes: int | None, expected: bytes | None) -> None:
    assert one_value(argument(), Capture(0, is_string=True, max_bytes=max_bytes), s0=given_) == expected


def test_fields_are_read_wherever_the_kernel_puts_them() -> None:
    """The kernel does not align: behind seven bytes, a string's location lies across two words."""
    arguments = [argument(Memory("rsp", number), size) for number, size in enumerate((1, 2, 4, 8))]
    arguments += [argument(Register("rdi")), argument(Register("rsi"))]
    where = site(arguments=arguments)
    spec = spec_of(captured(where, *(Capture(number, is_string=number >= 4) for number in range(6))))
    kernel = Kernel(spec)
    assert kernel.fields["s0"].offset % 4 == 3
    record = kernel.record(0, b0=0xF1, w0=0xF345, d0=0xF6789ABC, q0=(1 << 64) - 2, s0=b"first", s1=b"second")
    (found,) = decode_one(spec, record)
    assert [value_list(column)[0] for column in columns_of(found)] == [
        0xF1, 0xF345, 0xF6789ABC, (1 << 64) - 2, b"first", b"second",
    ]  # fmt: skip


@given(offset=st.integers(0, 24), size=st.sampled_from([1, 2, 4, 8]), value=st.integers(0, (1 << 64) - 1))
def test_numbers_at_any_offset(offset: int, size: int, value: int) -> None:
    spec = EventSpec("instance", key(), (), spec_of(captured(site(arguments=[argument()]))).sites)
    value %= 1 << 8 * size
    content = bytearray(struct.pack("<HBBi", EVENT_ID, 0, 0, 5) + struct.pack("<II", 0, 0) + b"\xcc" * 40)
    content[16 + offset : 16 + offset + size] = value.to_bytes(size, "little")
    fields = {
        "common_pid": FieldPlace(4, 4), "site": FieldPlace(8, 4), "comm": FieldPlace(12, 4),
        "q0": FieldPlace(16 + offset, size),
    }  # fmt: skip
    decoder = Decoder(spec, EventFormat(EVENT_ID, fields), (SiteConsumer(1, 1),))
    (found,) = decode_records(records_of([bytes(content)]), {EVENT_ID: decoder}, pids_of).batches
    assert value_list(columns_of(found)[0]) == [value]


def test_sites_of_one_event_become_batches_of_their_own() -> None:
    sites = [
        captured(site(f"n{number}", number, [argument(Register(name), 4, signed=True)]))
        for number, name in enumerate(("rax", "rdx"))
    ]
    spec = spec_of(*sites)
    kernel = Kernel(spec)
    records = [kernel.record(position, q0=value) for position, value in ((0, 1), (1, -2), (0, 3), (1, 4))]
    first, second = decode_one(spec, *records, site_ids=(7, 9))
    assert [row[5:] + row[:1] for row in event_rows(first)] == [(7, 1, 101), (7, 3, 103)]
    assert [row[5:] + row[:1] for row in event_rows(second)] == [(9, -2, 102), (9, 4, 104)]


def test_who_and_where() -> None:
    spec = spec_of(captured(site()))
    kernel = Kernel(spec)
    (found,) = decode_one(spec, kernel.record(0, tid=1042, comm=b"fifteen-letters"), kernel.record(0, comm=b""))
    assert event_rows(found) == [
        (101, 42, 1042, 2, b"fifteen-letters", 1), (102, 11, 1011, 2, b"", 1),
    ]  # fmt: skip


def test_comm_at_the_very_end_of_the_last_page() -> None:
    spec = spec_of(captured(site()))
    record = Kernel(spec).record(0, comm=b"ab")
    room = PAGE_BYTES - HEADER - len(Data(0, record).content) - 4 - 8
    padded = room - len(record) % 4
    data = page(100, Data(1, b"\xff" * padded, large=True), Data(1, record))
    records = parse_pages(0, [data], PageFormat(HEADER, PAGE_BYTES)).take(slice(1, None))
    decoder = Decoder(spec, Kernel(spec).format, (SiteConsumer(1, 0),))
    (found,) = decode_records(records, {EVENT_ID: decoder}, pids_of).batches
    assert found.comm.tolist() == [b"ab"]


def test_records_of_unknown_events_are_counted() -> None:
    spec = spec_of(captured(site()))
    known, unknown = Kernel(spec), Kernel(spec, EVENT_ID + 1)
    decoder = Decoder(spec, known.format, (SiteConsumer(1, 0),))
    records = records_of([known.record(0), unknown.record(0), unknown.record(0), known.record(0)])
    decoded = decode_records(records, {EVENT_ID: decoder}, pids_of)
    assert ([len(batch) for batch in decoded.batches], decoded.filtered, decoded.unknown) == ([2], 0, 2)
    assert decode_records(records_of([]), {EVENT_ID: decoder}, pids_of) == Decoded([], 0, 0)
    assert decode_records(records, {}, pids_of) == Decoded([], 0, 4)
