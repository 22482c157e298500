"""Every object comes back as it was, and nothing else gets through."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from stapsdtd.arch import parse_arguments
from stapsdtd.elf.read_only import MAX_READ_ONLY_SEGMENTS
from stapsdtd.elf.sites import MAX_NOTES
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import (
    LONGEST_NOP_BYTES,
    MAX_PROBLEMS,
    Address,
    Argument,
    Constant,
    FileOffset,
    Memory,
    Operand,
    ParsedObject,
    Problem,
    ReadOnlySegment,
    Register,
    Site,
    Unavailable,
    Vaddr,
)
from stapsdtd.sandbox import codec, protocol
from stapsdtd.sandbox.protocol import ParserFailedError, RefusedError, decode, encode, encode_reason
from tests.fuzz.examples import examples
from tests.unit.elf_builder import NOP, TEXT_VADDR, Elf, parse_notes
from tests.unit.samples import argument, site

FILE_SIZE = 1 << 40

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
MAYBE_TEXTS = st.none() | TEXTS
REGISTERS = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
DISPLACEMENTS = st.integers(-(1 << 63), (1 << 63) - 1)
NEVER = st.just(value=False)
NUMBER_SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def constants(draw: st.DrawFn) -> Argument:
    size, signed = draw(NUMBER_SIZES), draw(st.booleans())
    low, high = (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) if signed else (0, (1 << 8 * size) - 1)
    value = draw(st.integers(low, high) | st.sampled_from([low, high]))
    return Argument(draw(TEXTS), size, signed, False, Constant(value))


def of(
    sizes: st.SearchStrategy[int], operands: st.SearchStrategy[Operand], floats: st.SearchStrategy[bool] = NEVER
) -> st.SearchStrategy[Argument]:
    return st.builds(Argument, TEXTS, sizes, st.booleans(), floats, operands)


MEMORIES = st.builds(Memory, st.none() | REGISTERS, DISPLACEMENTS, st.none() | REGISTERS, NUMBER_SIZES, MAYBE_TEXTS)
ARGUMENTS = st.one_of(
    constants(),
    of(NUMBER_SIZES, st.builds(Register, REGISTERS)),
    of(st.just(1), st.builds(Register, REGISTERS, st.just(8))),
    of(st.sampled_from([4, 8]), st.builds(Register, REGISTERS), st.booleans()),
    of(st.integers(1, 4096), MEMORIES, st.booleans()),
    of(NUMBER_SIZES, st.builds(Address, st.none() | REGISTERS, DISPLACEMENTS, MAYBE_TEXTS)),
    of(st.integers(0, 1 << 20), st.builds(Unavailable, TEXTS), st.booleans()),
)

SITES = st.builds(
    Site,
    TEXTS,
    TEXTS,
    st.integers(0, FILE_SIZE - 1).map(FileOffset),
    st.none() | st.integers(1, FILE_SIZE // 2 - 1).map(lambda half: FileOffset(2 * half)),
    MAYBE_TEXTS,
    st.lists(ARGUMENTS, max_size=4).map(tuple),
    st.integers(1, LONGEST_NOP_BYTES),
)

SEGMENTS = st.builds(
    ReadOnlySegment,
    st.integers(0, (1 << 64) - 1).map(Vaddr),
    st.integers(0, FILE_SIZE // 2).map(FileOffset),
    st.integers(1, FILE_SIZE // 2),
)

OBJECTS = st.builds(
    ParsedObject,
    st.from_regex(r"[a-z0-9_-]{1,12}", fullmatch=True),
    st.none() | st.binary(min_size=1, max_size=64).map(bytes.hex),
    st.lists(SITES, max_size=6, unique_by=lambda site: (site.site_offset, site.provider, site.name)).map(tuple),
    st.lists(st.builds(Problem, st.just("") | TEXTS, st.just("") | TEXTS, TEXTS), max_size=4).map(tuple),
    st.booleans(),
    st.lists(SEGMENTS, max_size=3).map(tuple),
)


def encoded(parsed: ParsedObject) -> bytes:
    return b"".join(encode(parsed))


def sample(*sites: Site) -> ParsedObject:
    segments = (ReadOnlySegment(Vaddr(0x400000), FileOffset(0), 0x1000),)
    return ParsedObject("x86-64", "c0ffee", sites, (Problem("app", "", "no nop"),), read_only=segments)


def mapped(offset: int, size: int, vaddr: int = 0x400000) -> ParsedObject:
    return replace(SAMPLE, read_only=(ReadOnlySegment(Vaddr(vaddr), FileOffset(offset), size),))


SAMPLE = sample(
    site("one", 0x10, [argument(), argument(Memory("rbp", -8, "rcx", 4, "NBuffers"), 4)], semaphore=0x20, function="f"),
    site("two", 0x11, [argument(Constant(-5), 4, signed=True, text="-4@$-5"), argument(Unavailable("no"), 0)]),
    site("three", 0x12, [argument(Address(None, 3, "s"))], function="gé"),
)


@examples(300)
@given(OBJECTS)
def test_round_trip(parsed: ParsedObject) -> None:
    assert decode(encoded(parsed), FILE_SIZE) == parsed


def test_each_class_of_the_model_has_a_table_with_all_its_fields() -> None:
    held = {ParsedObject, Site, Problem, ReadOnlySegment, Argument}
    assert {table.kind for table in codec.TABLES} == held | set(get_args(Operand))
    for table in codec.TABLES:
        assert [column.name for column in table.columns] == list(inspect.signature(table.kind).parameters)


@pytest.mark.parametrize("hint", [str, int, bytes, str | None, int | None])
def test_a_field_must_say_what_it_may_be(hint: type) -> None:
    with pytest.raises(TypeError, match="the model gives no bounds for colour"):
        codec.column_of("colour", hint)


ARCHITECTURES = ("x86-64", "i386", "aarch64", "arm", "riscv64", "s390x", "ppc64le", "loongarch64", "machine-8")
SIZES = (
    "",
    "1@",
    "-1@",
    "2@",
    "-2@",
    "4@",
    "-4@",
    "8@",
    "-8@",
    "2f@",
    "4f@",
    "8f@",
    "16@",
    "16f@",
    "3@",
    "0@",
    "9999999@",
)
OPERANDS = (
    *("$5", "$-1", "$0xffffffffffffffff", "$-9223372036854775808", "$x", "%rdi", "%ah", "%eax", "%ax", "%xmm0"),
    *("(%rax)", "-8(%rbp)", "8(%rbp,%rcx,4)", "8(,%rcx,8)", "-4096(%r15)", "(%ax)", "N(%rip)", "N+8(%rip)"),
    *("N", "$N", "%fs:0", "0x1000", "nonsense", "\xff", "N@GOTOFF(%eax)", "x0", "w3", "[sp, 96]", "[x1, x2]", "#7"),
    *("r3", "[r3, #4]", "[fp, -8]", "a0", "8(a0)", "%r2", "160(%r15)", "0(%r1,%r2)", "3", "8(9)", "3,9", "i42", "$r4"),
    *("$r4,8", "7", "table+24"),
)


@examples(500)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(OPERANDS)), max_size=8), st.sampled_from(ARCHITECTURES)
)
def test_what_the_grammar_makes_is_never_refused(arguments: list[tuple[str, str]], architecture: str) -> None:
    text = " ".join(f"{size}{operand}" for size, operand in arguments)
    parsed = ParsedObject(architecture, None, (site(arguments=parse_arguments(text, architecture)),), ())
    assert decode(encoded(parsed), FILE_SIZE) == parsed


def test_equal_things_cross_once() -> None:
    note, sites = Elf().note, 1000
    elf = Elf(NOP * sites)
    parsed = parse_notes(*(note(TEXT_VADDR + i, arguments=b"8@%rdi -4@-8(%rbp)") for i in range(sites)), elf=elf)
    assert len(parsed.sites) == sites
    assert len(encoded(parsed)) < sites * 40
    found = decode(encoded(parsed), FILE_SIZE)
    assert len({id(site.arguments) for site in found.sites}) == len({id(site.name) for site in found.sites}) == 1


def test_reasons() -> None:
    with pytest.raises(ObjectUnreadableError, match=r"^not an ELF file$"):
        decode(b"".join(encode_reason("not an ELF file")), 0)
    with pytest.raises(ParserFailedError, match=r"^the parser failed: KeyError: 'a'\\nb$"):
        decode(b"".join(encode_reason("KeyError: 'a'\nb", failed=True)), 0)
    with pytest.raises(ObjectUnreadableError):
        decode(b"".join(encode_reason("\N{SNOWMAN}" * 10_000 + "\udcff")), 0)


def test_every_truncated_or_extended_answer_is_refused() -> None:
    answer = encoded(SAMPLE)
    for length in range(len(answer)):
        with pytest.raises(RefusedError):
            decode(answer[:length], FILE_SIZE)
    with pytest.raises(RefusedError):
        decode(answer + b"\0", FILE_SIZE)


EXTREMES = st.sampled_from([0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1])


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    answer = bytearray(encoded(draw(st.just(SAMPLE) | OBJECTS)))
    for _ in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        at = draw(st.integers(0, len(answer) - width))
        answer[at : at + width] = (draw(EXTREMES | st.integers(0, 2**64 - 1)) % 2 ** (8 * width)).to_bytes(
            width, "little"
        )
    return bytes(answer)


def believe(answer: bytes, file_size: int) -> ParsedObject | None:
    """None where it is refused."""
    try:
        parsed = decode(answer, file_size)
    except (RefusedError, ObjectUnreadableError):
        return None
    for found in parsed.sites:
        assert 0 <= found.site_offset < file_size
        assert found.semaphore_offset is None or 0 < found.semaphore_offset <= file_size - 2
        assert found.provider
        assert found.name
        assert 1 <= found.nop_bytes <= LONGEST_NOP_BYTES
        for one in found.arguments:
            _check(one)
    assert len({(s.site_offset, s.provider, s.name) for s in parsed.sites}) == len(parsed.sites)
    assert all(problem.reason for problem in parsed.problems)
    assert all(0 < each.size <= file_size - each.offset for each in parsed.read_only)
    assert len(parsed.read_only) <= MAX_READ_ONLY_SEGMENTS
    repr(parsed).encode()
    return parsed


def _check(one: Argument) -> None:
    """What readers rely on."""
    assert 0 <= one.size <= 1 << 20
    match one.operand:
        case Constant(value):
            assert one.size in (1, 2, 4, 8)
            np.array([value], f"{'i' if one.signed else 'u'}{one.size}")
        case Register(name, first_bit):
            assert name.replace("_", "a").isalnum()
            assert first_bit == 0 or (first_bit == 8 and one.size == 1)
        case Memory(base, displacement, index, scale, symbol):
            assert all(name is None or name.replace("_", "a").isalnum() for name in (base, index))
            assert scale in (1, 2, 4, 8)
            assert symbol != ""
            struct.pack("<q", displacement)
        case Address(base, displacement, symbol):
            assert base is None or base.replace("_", "a").isalnum()
            assert symbol != ""
            struct.pack("<q", displacement)
        case Unavailable(reason):
            assert reason


@pytest.mark.timeout(600)  # ./dev fuzz tries more
@examples(500)
@given(mutations())
def test_a_mutated_answer_is_refused_or_could_be_of_another_file(answer: bytes) -> None:
    parsed = believe(answer, FILE_SIZE)
    if parsed is not None:
        assert decode(encoded(parsed), FILE_SIZE) == parsed


@examples(500)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(answer: bytes) -> None:
    believe(answer, FILE_SIZE)
    believe(b"\1" + answer, FILE_SIZE)


@pytest.mark.parametrize(
    ("wrong", "because"),
    [
        (sample(site(offset=FILE_SIZE)), "beyond the file's end"),
        (
            replace(sample(site()), problems=(Problem("app", "one", "twice", FileOffset(0x11)),)),
            "a note that duplicates no site",
        ),
        (sample(site(offset=-1)), "sites: Expected `int` >= 0"),
        (sample(site(semaphore=FILE_SIZE)), "beyond the file's end"),
        (sample(site(semaphore=FILE_SIZE - 1)), "multiple of 2"),
        (sample(site(semaphore=7)), "multiple of 2"),
        (sample(site(semaphore=0)), "sites: Expected `int` >= 2"),
        (sample(site(nop_bytes=0)), "sites: Expected `int` >= 1"),
        (sample(site(nop_bytes=LONGEST_NOP_BYTES + 1)), "sites: Expected `int` <= 15"),
        (sample(site(), site()), "twice"),
        (sample(site(name="")), "shorter"),
        (sample(site(name="n" * 2049)), "longer"),
        (sample(site(name="é" * 1025)), "longer"),
        (sample(site(function="f" * 20_000)), "longer"),
        (sample(site(function="")), "shorter"),
        (sample(site(arguments=[argument(text="")])), "shorter"),
        (sample(site(name="a\0b")), "NUL"),
        (sample(site(arguments=[argument(Register("di\np:x"))])), "text"),
        (sample(site(arguments=[argument(Memory("rdi", index="%rax"))])), "text"),
        (sample(site(arguments=[argument(Constant(256), 1)])), "operand"),
        (sample(site(arguments=[argument(Constant(-1), 4)])), "operand"),
        (sample(site(arguments=[argument(Register("rdi"), 3)])), "operand"),
        (sample(site(arguments=[argument(Register("rax", 8), 8)])), "operand"),
        (sample(site(arguments=[argument(Memory("rdi"), 5000)])), "operand"),
        (sample(site(arguments=[argument(Address("rdi"), 16)])), "operand"),
        (sample(site(arguments=[argument(size=(1 << 20) + 1)])), "arguments: Expected `int` <= 1048576"),
        (sample(site(arguments=[argument(size=-1)])), "arguments: Expected `int` >= 0"),
        (sample(site(arguments=[argument(Memory("rax", 1 << 63))])), "operands: Expected `int` <= 9223372036854775807"),
        (sample(site(arguments=[argument(Memory("rax", scale=9))])), "operands: Expected `int` <= 8"),
        (sample(site(arguments=[argument(Memory("rax", scale=3))])), "operand"),
        (sample(site(arguments=[argument(Register("ax", 1))])), "multiple of 8"),
        (sample(site(arguments=[argument(Register("ax", 16), 1)])), "operands: Expected `int` <= 8"),
        (sample(site(arguments=[argument()] * 129)), "lists of arguments: Expected `int` <= 128"),
        (sample(site(arguments=[argument(text="t" * 17_000)])), "longer"),
        (sample(site(arguments=[argument(Unavailable("r" * 17_000))])), "longer"),
        (mapped(0, 0), "read only: Expected `int` >= 1"),
        (mapped(FILE_SIZE, 1), "segment"),
        (mapped(1, FILE_SIZE), "segment"),
        (mapped((1 << 64) - 1, 1), "segment"),
        (mapped(1, (1 << 64) - 1), "segment"),
        (mapped((1 << 64) - 0x100, 0x200), "segment"),
        (ParsedObject("x86 64", None, (), ()), "architecture"),
        (ParsedObject("x86-64\n", None, (), ()), "architecture"),
        (ParsedObject("x86-64", "abc", (), ()), "build_id"),
        (ParsedObject("x86-64", "ab" * 65, (), ()), "build_id"),
    ],
)
def test_what_no_file_could_have_said(wrong: ParsedObject, because: str) -> None:
    with pytest.raises(RefusedError, match=because):
        decode(encoded(wrong), FILE_SIZE)


@pytest.mark.parametrize("operand", [Constant(1 << 64), Constant(-(1 << 63) - 1), Memory("rax", 1 << 64)])
def test_numbers_of_more_than_64_bits_are_a_defect_of_the_worker(operand: Operand) -> None:
    with pytest.raises(OverflowError):
        encode(sample(site(arguments=[argument(operand)])))


def test_a_text_that_stands_there_twice() -> None:
    answer = encoded(sample(site("aaa"), site("bbb", 0x20)))
    with pytest.raises(RefusedError, match="twice"):
        decode(answer.replace(b"bbb", b"aaa"), FILE_SIZE)


def test_a_text_that_is_no_utf_8() -> None:
    with pytest.raises(RefusedError, match="UTF-8"):
        decode(encoded(SAMPLE).replace("é".encode(), b"\xed\xa0"), FILE_SIZE)


def parts_of(answer: bytes) -> list[list[list[Any]]]:
    """The texts, the lists of arguments, and then the columns of each table."""
    return [msgpack.decode(part) for part in msgpack.decode(answer[1:])]


def answer_of(parts: Sequence[object]) -> bytes:
    """What a worker says that does not look at its own bounds. Parts that are bytes are sent as they are."""
    return b"\1" + msgpack.encode([part if isinstance(part, bytes) else msgpack.encode(part) for part in parts])


def columns() -> list[tuple[int, int]]:
    return [(part, column) for part, held in enumerate(parts_of(encoded(SAMPLE))) for column in range(len(held))]


PARTS = ["texts", "lists", *(table.kind.__name__ for table in codec.TABLES)]


def test_an_answer_that_is_put_together_by_hand() -> None:
    assert decode(answer_of(parts_of(encoded(SAMPLE))), FILE_SIZE) == SAMPLE


@pytest.mark.parametrize(("part", "column"), columns())
def test_lengths_are_compared_with_their_bounds_before_anything_is_made(part: int, column: int) -> None:
    parts: list[Any] = parts_of(encoded(SAMPLE))
    sent = [msgpack.encode(values) for values in parts[part]]
    sent[column] = b"\xdd\xff\xff\xff\xff"  # an array of 2**32 - 1
    parts[part] = bytes([0x90 + len(sent)]) + b"".join(sent)
    with pytest.raises(RefusedError, match="of length <= "):
        decode(answer_of(parts), FILE_SIZE)


@pytest.mark.parametrize(
    ("part", "column"), [(part, at) for part, at in columns() if part >= 2 and len(codec.TABLES[part - 2].columns) > 1]
)
def test_columns_of_a_table_are_equally_long(part: int, column: int) -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[part][column].pop()
    with pytest.raises(RefusedError, match="differ in length"):
        decode(answer_of(parts), FILE_SIZE)


@pytest.mark.parametrize("part", range(len(PARTS)), ids=PARTS)
def test_columns_too_few_or_too_many(part: int) -> None:
    columns = parts_of(encoded(SAMPLE))[part]
    for wrong in (columns[:-1], [*columns, [0]]):
        parts: list[Any] = parts_of(encoded(SAMPLE))
        parts[part] = wrong
        with pytest.raises(RefusedError, match=f"Expected `array` of length {len(columns)}, got {len(wrong)}"):
            decode(answer_of(parts), FILE_SIZE)


OF_NO_FIELD: tuple[object, ...] = (1.0, "", "\0", b"x", [], [[]], {}, msgpack.Ext(1, b"x"))
FLAGS = {"signed", "is_float", "lacks_symbols"}
OPTIONAL = {"semaphore_offset", "function", "refused", "base", "index", "symbol", "build_id", "duplicates"}


@pytest.mark.parametrize(("part", "column"), columns())
@pytest.mark.parametrize(
    ("value", "fields"),
    [
        *((value, set[str]()) for value in OF_NO_FIELD),
        (None, OPTIONAL),
        (True, FLAGS),
        (1 << 41, {"displacement", "vaddr"}),
        (-(1 << 63), {"displacement"}),
        ((1 << 64) - 1, {"vaddr"}),
    ],
)
def test_values_that_other_fields_may_have(part: int, column: int, value: object, fields: set[str]) -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[part][column][0] = value
    possible = part >= 2 and codec.TABLES[part - 2].columns[column].name in fields
    assert (believe(answer_of(parts), FILE_SIZE) is not None) == possible


def references() -> list[tuple[int, int, int]]:
    """Where indices are, and how many things they are of."""
    texts, (lists, _), *tables = parts_of(encoded(SAMPLE))
    rows = {table.kind: len(columns[0]) for table, columns in zip(codec.TABLES, tables, strict=True)}
    operands = sum(rows[kind] for kind in get_args(Operand))
    counts = {str: len(texts[0]), Operand: operands, tuple[Argument, ...]: len(lists)}
    found = [(PARTS.index("lists"), 1, rows[Argument])]
    for part, table in enumerate(codec.TABLES, 2):
        targets = [column.target for column in table.columns]
        found += [(part, at, counts.get(target, 1)) for at, target in enumerate(targets) if target is not None]
    return found


@pytest.mark.parametrize(("part", "column", "count"), references())
def test_indices_beyond_what_they_are_of(part: int, column: int, count: int) -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[part][column][0] = count
    with pytest.raises(RefusedError, match=f"an index out of {count}"):
        decode(answer_of(parts), FILE_SIZE)


def test_lists_of_arguments_that_are_not_as_long_as_they_say() -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[1][0][0] += 1
    with pytest.raises(RefusedError, match="not as long as they claim"):
        decode(answer_of(parts), FILE_SIZE)


@pytest.mark.parametrize("count", [0, 2])
def test_an_answer_is_of_one_object(count: int) -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[-1] = [column * count for column in parts[-1]]
    with pytest.raises(RefusedError, match="objects"):
        decode(answer_of(parts), FILE_SIZE)


def test_tables_too_few_too_many_or_none() -> None:
    parts = parts_of(encoded(SAMPLE))
    for wrong in ([], parts[:-1], [*parts, parts[-1]], [b""] * len(parts), [b"\0" * 10] * len(parts)):
        with pytest.raises(RefusedError):
            decode(answer_of(wrong), FILE_SIZE)
    others: tuple[object, ...] = ({}, None, "parts", [1] * len(parts))
    raws = map(msgpack.encode, others)
    for answer in (msgpack.encode(parts), b"\xdd\xff\xff\xff\xff", *raws):
        with pytest.raises(RefusedError, match="Expected"):
            decode(b"\1" + answer, FILE_SIZE)


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a", b"\xdc\0\1", b"\xdd\0\0\0\1", b"\x9c"])
def test_nesting_of_any_depth(opener: bytes) -> None:
    parts = parts_of(encoded(SAMPLE))
    deep = opener * 1_000_000
    for answer in (b"\1" + deep, *(answer_of([*parts[:at], deep, *parts[at + 1 :]]) for at in range(len(parts)))):
        with pytest.raises(RefusedError):
            decode(answer, FILE_SIZE)


def test_more_bytes_of_texts_than_the_daemon_takes() -> None:
    parts = parts_of(encoded(SAMPLE))
    parts[0][0] += [f"{number:04}" + "t" * (1 << 20) for number in range(64)]
    with pytest.raises(RefusedError, match=r"texts of 671\d+ bytes"):
        decode(answer_of(parts), FILE_SIZE)
    sites = tuple(site(offset=number, function=f"{number:04}" + "t" * 16_000) for number in range(4300))
    with pytest.raises(ObjectUnreadableError, match=r"it has texts of \d+ bytes, more than 67108864"):
        encode(ParsedObject("x86-64", None, sites, ()))


def test_operands_of_several_kinds_are_bounded_together() -> None:
    parts: list[Any] = parts_of(encoded(SAMPLE))
    half = codec.MAX_DISTINCT_ARGUMENTS // 2 + 1
    parts[PARTS.index("Constant")] = [[0] * half]
    parts[PARTS.index("Register")] = [[parts[0][0].index("rdi")] * half, [0] * half]
    with pytest.raises(RefusedError, match="more operands than"):
        decode(answer_of(parts), FILE_SIZE)


def test_problems_are_bounded() -> None:
    parts: list[Any] = parts_of(encoded(SAMPLE))
    parts[PARTS.index("Problem")] = [column * (MAX_PROBLEMS + 1) for column in parts[PARTS.index("Problem")]]
    with pytest.raises(RefusedError, match="problems: "):
        decode(answer_of(parts), FILE_SIZE)


@pytest.mark.parametrize("length", [0, protocol.MAX_ANSWER_BYTES + 1, 2**64 - 1])
def test_lengths_beyond_the_bound(length: int) -> None:
    with pytest.raises(RefusedError):
        protocol.length_of(struct.pack("<Q", length))


@pytest.mark.parametrize("vaddr", [0, 1 << 63, (1 << 64) - 1])
def test_segments_up_to_the_files_end_may_lie_anywhere_in_memory(vaddr: int) -> None:
    for parsed in (mapped(0, FILE_SIZE, vaddr), mapped(FILE_SIZE - 1, 1, vaddr)):
        assert decode(encoded(parsed), FILE_SIZE) == parsed


def test_more_segments_than_the_daemon_takes() -> None:
    segments = SAMPLE.read_only * (MAX_READ_ONLY_SEGMENTS + 1)
    assert decode(encoded(replace(SAMPLE, read_only=segments[1:])), FILE_SIZE).read_only == segments[1:]
    with pytest.raises(ObjectUnreadableError, match="65 read only, more than 64"):
        encode(replace(SAMPLE, read_only=segments))
    parts = parts_of(encoded(SAMPLE))
    parts[PARTS.index("ReadOnlySegment")] = [[each] * (MAX_READ_ONLY_SEGMENTS + 1) for each in (0, 0, 1)]
    with pytest.raises(RefusedError, match="read only: Expected `array` of length <= 64"):
        decode(answer_of(parts), FILE_SIZE)


def test_an_object_that_is_more_than_the_daemon_takes() -> None:
    one = site()
    with pytest.raises(ObjectUnreadableError, match="500001 sites, more than 500000"):
        encode(ParsedObject("x86-64", None, (one,) * (MAX_NOTES + 1), ()))
