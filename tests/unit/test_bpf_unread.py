"""Values that hits could not read: from the record, by the file, to what is delivered."""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.bpf import layout, unread
from stapsdtd.capture.bpf.constants import ReadOnlyFile, SiteConstants
from stapsdtd.capture.bpf.decode import RecordDecoder
from stapsdtd.capture.bpf.operands import encode_value
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Reading
from stapsdtd.capture.bpf.rings import record_dtype
from stapsdtd.capture.bpf.sources import NumberAt, Source, TextAt
from stapsdtd.capture.bpf.tables import PlanEntry
from stapsdtd.events.columns import CUT, Strings
from stapsdtd.model import Argument, FileOffset, Memory, ReadOnlySegment, Register, Vaddr
from stapsdtd.plan.values import Value
from tests.unit.fake_bpf import RecordingSink
from tests.unit.samples import argument, channels_of, columns_of, event_rows, no_cgroups

STRIDE = layout.STRIDES[3]
ALL_BITS = (1 << 64) - 1
DISCARDED = 1 << 30

SEGMENT = ReadOnlySegment(Vaddr(0x400000), FileOffset(0), 0x10000)
SITE = 0x10
LOADED_AT = 0x55D0_0000_0000
"""What the loader adds to the file's addresses."""
UNREADABLE = 0x7FFF_0000_1000

TEXT = argument(Register("rdi"))
STRING = encode_value(Value(0, is_string=True, limit=16), TEXT, "x86-64")


def number_operand(size: int, *, signed: bool = False, is_float: bool = False) -> bytes:
    found = Argument("", size, signed, is_float, Memory("rdi"))
    return encode_value(Value(0), found, "x86-64")


def raw_operand(size: int) -> bytes:
    return encode_value(Value(0, limit=size), Argument("", size, False, False, Memory("rdi")), "x86-64")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadOnlyFile]:
    """At 0x1000 `text 0`, and so on every 16 bytes; at 0x8000 bytes that count up."""
    content = bytearray(0x10000)
    for number in range(600):
        content[0x1000 + 16 * number : 0x1000 + 16 * number + 9] = b"text %-3d\0" % number
    content[0x8000:0x8100] = bytes(range(256))
    path: Path = tmp_path_factory.mktemp("unread") / "app"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    yield ReadOnlyFile(descriptor, [SEGMENT])
    os.close(descriptor)


def constants(file: ReadOnlyFile, site: int = SITE) -> SiteConstants:
    found = SiteConstants.around(file, FileOffset(site))
    assert found is not None
    return found


def there(offset: int) -> int:
    """The address at which a process has a place of the file's."""
    return LOADED_AT + SEGMENT.vaddr + offset


def operand_at(address: int) -> int:
    """What stands in the place of an operand that could not be read."""
    return address & layout.ADDRESS_MASK | layout.UNREAD_OPERAND


def record(
    generation: int, *values: int, missing: int = ALL_BITS, site: int = SITE, pid: int = 10, time_ns: int = 0,
    texts: bytes = b"", is_discarded: bool = False,
) -> bytes:  # fmt: skip
    all_of_them = (1 << len(values)) - 1
    head = np.array([(time_ns, 11, pid, 1, generation, missing & all_of_them, 0, b"app")], layout.RECORD).tobytes()
    length = STRIDE - layout.RECORD_HEADER | DISCARDED * is_discarded
    body = struct.pack("=II", length, 0) + head + struct.pack(f"={len(values) + 1}Q", *values, there(site)) + texts
    return body.ljust(STRIDE, b"\xcc")


def decoder(*records: bytes) -> RecordDecoder:
    memory = b"".join(records)
    return RecordDecoder(np.frombuffer(memory, record_dtype(STRIDE)), memoryview(memory), STRIDE, no_cgroups())


def plan(
    generation: int, operands: Sequence[bytes], *sources: Source, known: SiteConstants | None, subscription_key: int = 1
) -> ActivePlan:
    entry = PlanEntry(generation, 0, b"".join(operands), 0, 0, (0,))
    readings = (Reading(Channel(subscription_key, RecordingSink()), 0, generation, sources),)
    return ActivePlan(entry, channels_of(readings), readings, 0, known, abs_ip_at=len(operands))


def by_generation(plans: Iterable[ActivePlan]) -> Mapping[int, ActivePlan]:
    return {each.entry.generation: each for each in plans}


def values(found: RecordDecoder, *plans: ActivePlan) -> list[tuple[Any, ...]]:
    """Of each event, in the order of time."""
    batches, unknown = found.events(by_generation(plans))
    assert unknown == 0
    rows = sorted((row for _, batch in batches for row in event_rows(batch)), key=operator.itemgetter(0))
    return [row[6:] for row in rows]


def test_texts_that_are_constants_are_taken_from_the_file(file: ReadOnlyFile) -> None:
    only = plan(1, [STRING], TextAt(0, 16), known=constants(file))
    at = layout.RECORD.itemsize + 2 * 8
    found = decoder(
        record(1, there(0x1000), time_ns=1),
        record(1, 4 << 32 | at, missing=0, texts=b"read", time_ns=2),
        record(1, there(0x1010), time_ns=3),
        record(1, UNREADABLE, time_ns=4),
        record(1, there(0x1000), time_ns=5),
    )
    assert values(found, only) == [(b"text 0  ",), (b"read",), (b"text 1  ",), (None,), (b"text 0  ",)]
    assert (found.from_file, found.unavailable) == (3, 1)


def test_each_subscription_has_its_own_bound(file: ReadOnlyFile) -> None:
    only = plan(1, [STRING], TextAt(0, 4), TextAt(0, 16), known=constants(file))
    assert values(decoder(record(1, there(0x1020))), only) == [(b"text" + CUT, b"text 2  ")]


def test_raw_bytes_are_taken_from_the_file(file: ReadOnlyFile) -> None:
    only = plan(1, [raw_operand(24)], TextAt(0, 24, is_raw=True), known=constants(file))
    found = decoder(record(1, there(0x8000)), record(1, there(0x10000 - 23), time_ns=1))
    assert values(found, only) == [(bytes(range(24)),), (None,)]


@pytest.mark.parametrize(
    ("size", "signed", "place", "expected"),
    [
        (1, False, 0x80FE, 0xFE), (1, True, 0x80FE, -2), (2, False, 0x8001, 0x0201),
        (2, True, 0x80FD, 0xFEFD - (1 << 16)),
        (4, False, 0x80FC, 0xFFFEFDFC), (4, True, 0x80FC, 0xFFFEFDFC - (1 << 32)),
        (8, False, 0x80F8, 0xFFFEFDFCFBFAF9F8), (8, True, 0x80F8, 0xFFFEFDFCFBFAF9F8 - (1 << 64)),
    ],
)  # fmt: skip
def test_numbers_are_narrowed_as_the_program_does(
    file: ReadOnlyFile, size: int, signed: bool, place: int, expected: int
) -> None:
    only = plan(1, [number_operand(size, signed=signed)], NumberAt(0, signed), known=constants(file))
    found = decoder(record(1, operand_at(there(place))), record(1, 7, missing=0, time_ns=1))
    assert values(found, only) == [(expected,), (7,)]
    assert (found.from_file, found.unavailable) == (1, 0)


@given(st.sampled_from([1, 2, 4, 8]), st.booleans(), st.binary(min_size=8, max_size=8))
def test_every_number_is_narrowed_by_its_size_and_sign(size: int, signed: bool, data: bytes) -> None:
    (operand,) = np.frombuffer(number_operand(size, signed=signed), layout.OPERAND)
    number = int(unread.narrowed(data[:size], operand))
    assert number == int.from_bytes(data[:size], "little", signed=signed) & ALL_BITS


@pytest.mark.parametrize(("size", "kind"), [(4, "<f"), (8, "<d")])
def test_floating_point_numbers_are_taken_from_the_file(tmp_path: Path, size: int, kind: str) -> None:
    path = tmp_path / "floats"
    path.write_bytes(bytes(0x20) + struct.pack(kind, -1.5))
    with path.open("rb") as opened:
        file = ReadOnlyFile(opened.fileno(), [replace(SEGMENT, size=0x20 + size)])
        operand = number_operand(size, signed=True, is_float=True)
        only = plan(1, [operand], NumberAt(0, is_signed=True, float_bytes=size), known=constants(file))
        assert values(decoder(record(1, operand_at(there(0x20)))), only) == [(-1.5,)]


def test_operand_that_was_not_read_is_no_address_of_a_text(file: ReadOnlyFile) -> None:
    """A pointer in memory that is not there: what it points to is not known."""
    only = plan(1, [STRING], TextAt(0, 16), known=constants(file))
    found = decoder(record(1, operand_at(there(0x1000))))
    assert values(found, only) == [(None,)]
    assert (found.from_file, found.unavailable) == (0, 1)


def test_nothing_is_known_of_a_site_without_constants(file: ReadOnlyFile) -> None:
    plans = (
        plan(1, [STRING], TextAt(0, 16), known=None), plan(2, [STRING], TextAt(0, 16), known=constants(file)),
        plan(3, [number_operand(4)], NumberAt(0, is_signed=False), known=None),
    )  # fmt: skip
    found = decoder(
        record(1, there(0x1000)), record(2, there(0x1000), time_ns=1), record(3, operand_at(there(0x8000)), time_ns=2)
    )
    assert values(found, *plans) == [(None,), (b"text 0  ",), (None,)]


def test_many_plans_of_one_batch_have_constants_of_their_own(file: ReadOnlyFile) -> None:
    """Each by the distance from its own site, though the subscription's events become one block."""
    where = Channel(1, RecordingSink())
    plans = []
    for number in range(1, 101):
        made = plan(number, [STRING], TextAt(0, 16), known=constants(file, SITE * number))
        made.readings = (replace(made.readings[0], channel=where),)
        plans.append(made)
    order = [(number * 37) % 100 + 1 for number in range(300)]
    found = decoder(
        *(
            record(number, there(0x1000 + 16 * number), site=SITE * number, time_ns=time)
            for time, number in enumerate(order)
        )
    )
    assert values(found, *plans) == [(b"text %-3d" % number,) for number in order]
    assert (found.from_file, found.unavailable) == (300, 0)


def test_only_so_many_different_constants_are_read_at_once(file: ReadOnlyFile) -> None:
    only = plan(1, [STRING], TextAt(0, 16), known=constants(file))
    most = 256
    numbers = [*range(most + 50), *range(most + 50)]
    found = decoder(*(record(1, there(0x1000 + 16 * number), time_ns=time) for time, number in enumerate(numbers)))
    expected = [(b"text %-3d" % number,) if number < most else (None,) for number in numbers]
    assert values(found, only) == expected
    assert (found.from_file, found.unavailable) == (2 * most, 100)


ADDRESSES = st.sampled_from([UNREADABLE, there(0x1000), there(0x8000), LOADED_AT]).flatmap(
    lambda address: st.sampled_from([address, operand_at(address)])
)


@given(st.lists(st.tuples(ADDRESSES, ADDRESSES, ADDRESSES), min_size=1, max_size=6), st.booleans())
def test_no_address_is_ever_delivered(rows: list[tuple[int, int, int]], has_constants: bool) -> None:
    """Where programs are loaded is for nobody to know."""
    with Path("/dev/zero").open("rb") as zeros:
        file = ReadOnlyFile(zeros.fileno(), [SEGMENT])
        operands = [number_operand(8), STRING, raw_operand(16)]
        sources = NumberAt(0, is_signed=False), TextAt(1, 16), TextAt(2, 16, is_raw=True), NumberAt(0, True, 8)
        only = plan(1, operands, *sources, known=constants(file) if has_constants else None)
        found = decoder(*(record(1, *row, time_ns=time) for time, row in enumerate(rows)))
        batches, _ = found.events({1: only})
    for _, batch in batches:
        for row in event_rows(batch):
            assert set(row[6:]) <= {None, 0, b"", bytes(16)}
        for column in columns_of(batch):
            data = column.data if isinstance(column, Strings) else column.data.tobytes()
            assert not any(struct.pack("=Q", address) in data for row in rows for address in row)


def test_what_is_missing_is_told_with_its_process_and_size(file: ReadOnlyFile) -> None:
    operands = [number_operand(4), STRING, raw_operand(24), number_operand(8)]
    made = plan(1, operands[:3], known=None)
    # a further operand that only tests read is in no record
    made.entry = replace(made.entry, operands=b"".join(operands))
    found = decoder(
        record(1, operand_at(0x7000), 5, 0x8000, missing=0b101, pid=7),
        record(1, 1, 2, 3, missing=0),
        record(1, 1, 0x9000, 3, missing=0b010, pid=8),
        record(2, operand_at(0x7000), missing=1),
        record(1, operand_at(0x7000), 0x7000, 0x7000, is_discarded=True),
    )
    assert list(found.unread()) == []
    found.events({1: made})
    assert list(found.unread()) == [(7, 0x7000, 4), (7, 0x8000, 24), (8, 0x9000, 17)]
    assert file.segments


def test_only_so_many_places_of_a_batch_are_told(file: ReadOnlyFile) -> None:
    only = plan(1, [STRING], known=constants(file))
    found = decoder(*(record(1, 0x1000 * number) for number in range(1, 200)))
    found.events({1: only})
    assert len(list(found.unread())) == 64


def test_records_grow_by_so_many_bytes_of_constants_at_most(tmp_path: Path) -> None:
    """A process that unmapped its constants has small records, each with all of its texts to be filled in."""
    path = tmp_path / "app"
    path.write_bytes(b"x" * 0x10000)
    with path.open("rb") as opened:
        operand = encode_value(Value(0, is_string=True, limit=4096), TEXT, "x86-64")
        file = ReadOnlyFile(opened.fileno(), [SEGMENT])
        greedy = plan(1, [operand] * 3, *(TextAt(position, 4096) for position in range(3)), known=constants(file))
        modest = plan(2, [operand], TextAt(0, 16), known=constants(file))
        found = decoder(*[record(1, *[there(0x1000)] * 3)] * 2000, record(2, there(0x1000), time_ns=1))
        rows = values(found, greedy, modest)
    grown = sum(len(value) for row in rows for value in row if value is not None)
    assert (7 << 20) < grown <= (8 << 20) + 16 + len(CUT)
    # others have theirs all the same
    assert rows[-1] == (b"x" * 16 + CUT,)


def test_only_so_many_constants_of_a_batch_are_read(file: ReadOnlyFile) -> None:
    plans = [
        plan(number, [STRING] * 8, *(TextAt(at, 16) for at in range(8)), known=constants(file)) for number in (1, 2)
    ]
    rows = [[there(0x1000 + 16 * ((200 * at + number) % 600)) for at in range(8)] for number in range(200)]
    found = decoder(
        *(record(1, *row, time_ns=time) for time, row in enumerate(rows)), record(2, *rows[0], time_ns=1000)
    )
    assert values(found, *plans)[-1] == tuple(b"text %-3d" % (200 * at % 600) for at in range(8))
    assert found.from_file <= 1024


def test_every_process_has_a_place_told_beside_one_that_misses_much(file: ReadOnlyFile) -> None:
    only = plan(1, [STRING] * 8, known=constants(file))
    flood = [record(1, *range(0x1000 * row, 0x1000 * row + 0x8000, 0x1000), pid=7) for row in range(8, 2000)]
    found = decoder(*flood, record(1, *[0x7000] * 8, pid=8))
    found.events({1: only})
    told = list(found.unread())
    assert (8, 0x7000, 17) in told
    assert len(told) == 64
