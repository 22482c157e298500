"""The encoded rows are run here as bpf/stapsdt.bpf.c runs them."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from stapsdtd.arch import parse_arguments
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.encode import Filter, LinkOf, encode_filters
from stapsdtd.capture.bpf.layout import OperandKind, Take
from stapsdtd.capture.bpf.operands import NotEncodableError, encode_value
from stapsdtd.functions.chain import Link, LinkKind
from stapsdtd.model import Address, Argument, Constant, Memory, Operand, Register, Unavailable
from stapsdtd.plan.values import Value
from stapsdtd.query.compile import compile_for
from stapsdtd.query.expression import Condition
from stapsdtd.query.program import ACCEPT, REJECT, Program, Relation, Source
from stapsdtd.query.program import Test as One
from tests.unit.queries import Row, accepts, expressions
from tests.unit.samples import argument, site

ARCHITECTURE = "x86-64"
ALL_BITS = (1 << 64) - 1
NO_COMM = bytes(16)
NOBODY = frozenset[int]()

# struct pt_regs (arch/x86/include/uapi/asm/ptrace.h), a word each
PT_REGS = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
    "orig_rax", "rip", "cs", "eflags", "rsp",
)  # fmt: skip

RELATIONS: Mapping[int, Callable[[int, int], bool]] = {
    Relation.EQ: operator.eq, Relation.NE: operator.ne, Relation.LT: operator.lt, Relation.LE: operator.le,
    Relation.GT: operator.gt, Relation.GE: operator.ge, Relation.SIGNED_LT: operator.lt,
    Relation.SIGNED_LE: operator.le, Relation.SIGNED_GT: operator.gt, Relation.SIGNED_GE: operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Hit:
    """memory: what can be read, by its address. ids: of the fields that a test can look at, by source and index."""

    registers: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[int, bytes] = field(default_factory=dict)
    ids: Mapping[tuple[int, int], int] = field(default_factory=dict)
    comm: bytes = b""


def rows_of(encoded: bytes, dtype: np.dtype[Any]) -> list[Any]:
    return list(np.frombuffer(encoded, dtype))


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def fetch(op: Any, hit: Hit) -> int | None:
    """What the program makes of an operand, None where it cannot be had."""

    def register(place: int) -> int:
        return hit.registers.get(PT_REGS[place], 0) if place < len(PT_REGS) else 0

    value = int(op["constant"])
    if op["kind"] == OperandKind.REGISTER:
        value = register(op["base"])
    elif op["kind"] != OperandKind.CONSTANT:
        value = value + register(op["base"]) + register(op["index"]) * int(op["scale"]) & ALL_BITS
        if op["kind"] == OperandKind.MEMORY:
            there = hit.memory.get(value, b"")
            if op["width"] > min(8, len(there)):
                return None
            value = int.from_bytes(there[: op["width"]], "little")
    value = value << int(op["left"]) & ALL_BITS
    return (signed(value) >> int(op["right"]) & ALL_BITS) if op["is_signed"] else value >> int(op["right"])


def run(tests: Sequence[Any], operands: Sequence[Any], hit: Hit) -> list[tuple[int, str]]:
    """What the program decides for each filter, in its order."""
    verdicts = []
    at = 0
    for _ in range(len(tests)):
        test = tests[at]
        jump = _decide(test, operands, hit)
        if jump < layout.JUMP_END:
            assert jump > at
            at = jump
            continue
        outcome = {ACCEPT: "accepted", REJECT: "filtered", layout.JUMP_EXCLUDE: "excluded"}[jump]
        verdicts.append((int(test["filter"]), outcome))
        at = int(test["next_filter"])
        if at == layout.JUMP_END:
            return verdicts
    pytest.fail("more steps than tests")


def _decide(test: Any, operands: Sequence[Any], hit: Hit) -> int:
    value: int | None
    match test["source"]:
        case Source.ARGUMENT:
            value = fetch(operands[test["index"]], hit)
            if value is None:
                return REJECT
        case Source.EXECNAME:
            value = int(test["comm"].tobytes() != hit.comm.ljust(16, b"\0"))
        case source:
            value = hit.ids[int(source), int(test["index"])]
    left, right = value & int(test["mask"]), int(test["value"])
    if test["relation"] >= Relation.SIGNED_LT:
        left, right = signed(left), signed(right)
    return int(test["on_true"] if RELATIONS[test["relation"]](left, right) else test["on_false"])


def encoded(value: Value, found: Argument) -> Any:
    (row,) = rows_of(encode_value(value, found, ARCHITECTURE), layout.OPERAND)
    return row


def number_in(found: Argument, **hit: Any) -> int | None:
    """What a record holds of an argument: its 64 bits, read by its sign."""
    row = encoded(Value(0), found)
    assert row["take"] == Take.NUMBER
    value = fetch(row, Hit(**hit))
    return signed(value) if value is not None and found.signed else value


def narrowed(raw: int, size: int, is_signed: bool) -> int:
    return int.from_bytes((raw & (1 << 8 * size) - 1).to_bytes(size, "little"), "little", signed=is_signed)


SIZES = st.sampled_from([1, 2, 4, 8])
WORDS = st.integers(0, ALL_BITS) | st.sampled_from([edge + near for edge in (1 << 31, 1 << 63) for near in (-1, 0, 1)])


@given(SIZES, st.booleans(), WORDS)
def test_register_is_narrowed_to_the_arguments_size_and_sign(size: int, is_signed: bool, raw: int) -> None:
    found = argument(Register("rdi"), size, signed=is_signed)
    assert number_in(found, registers={"rdi": raw}) == narrowed(raw, size, is_signed)


@given(st.booleans(), WORDS)
def test_second_byte_of_a_register(is_signed: bool, raw: int) -> None:
    found = argument(Register("rcx", first_bit=8), 1, signed=is_signed)
    assert number_in(found, registers={"rcx": raw}) == narrowed(raw >> 8, 1, is_signed)


@pytest.mark.parametrize(
    "name",
    ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{number}" for number in range(8, 16))],
)
def test_each_register_of_a_note_is_found_in_pt_regs(name: str) -> None:
    in_register, in_memory = parse_arguments(f"8@%{name} 8@8(%{name})", ARCHITECTURE)
    registers = {each: number << 32 for number, each in enumerate(PT_REGS)}
    assert number_in(in_register, registers=registers) == registers[name]
    assert number_in(in_memory, registers=registers, memory={registers[name] + 8: b"\5" + bytes(7)}) == 5


@given(SIZES, st.booleans(), st.binary(min_size=8, max_size=8), st.integers(-(1 << 31), (1 << 31) - 1), WORDS)
@example(4, True, b"\xfe\xff\xff\xff\0\0\0\0", -32, 16)
def test_memory_is_read_at_the_arguments_size_and_no_further(
    size: int, is_signed: bool, there: bytes, displacement: int, base: int
) -> None:
    memory = {base + displacement & ALL_BITS: there[:size]}
    found = argument(Memory("rbp", displacement), size, signed=is_signed)
    expected = int.from_bytes(there[:size], "little", signed=is_signed)
    assert number_in(found, registers={"rbp": base}, memory=memory) == expected


@given(st.sampled_from([1, 2, 4, 8]), st.integers(-(1 << 31), (1 << 31) - 1), WORDS, WORDS)
def test_index_is_scaled_and_added(scale: int, displacement: int, base: int, index: int) -> None:
    registers = {"rbp": base, "rcx": index}
    whole = base + index * scale + displacement & ALL_BITS
    found = argument(Memory("rbp", displacement, "rcx", scale), 4)
    assert number_in(found, registers=registers, memory={whole: b"\5\0\0\0"}) == 5
    alone = index * scale + displacement & ALL_BITS
    found = argument(Memory(None, displacement, "rcx", scale), 4)
    assert number_in(found, registers=registers, memory={alone: b"\6\0\0\0"}) == 6


def test_address_of_a_symbol_counts_from_the_site() -> None:
    found = argument(Address("rip", -16, "here"))
    assert number_in(found, registers={"rip": 0x401010}) == 0x401000
    narrow = argument(Address("rip", -16, "here"), 2)
    assert number_in(narrow, registers={"rip": 0x401010}) == 0x1000


def test_floating_point_number_travels_as_its_bytes() -> None:
    found = structs.replace(argument(Memory("rbp"), 4, signed=True), is_float=True)
    bits = struct.pack("<f", -1.5)
    assert number_in(found, registers={"rbp": 64}, memory={64: bits}) == int.from_bytes(bits, "little")


def test_memory_that_cannot_be_read_has_no_value() -> None:
    assert number_in(argument(Memory("rbp", -8)), registers={"rbp": 0x7000}, memory={0x7000: bytes(8)}) is None


@pytest.mark.parametrize("constant", [0, 5, -5, -(1 << 63), ALL_BITS])
def test_constant_is_whatever_the_registers_hold(constant: int) -> None:
    found = argument(Constant(constant), signed=constant < 0)
    assert number_in(found, registers=dict.fromkeys(PT_REGS, 77)) == constant


@pytest.mark.parametrize(
    ("operand", "pointer"),
    [(Register("rsi"), 0xFFFF800000000010), (Memory("rsp", 24), 0x8877665544332211), (Constant(0x404040), 0x404040)],
)
@pytest.mark.parametrize("is_signed", [True, False])
def test_string_is_where_the_operand_points(operand: Operand, pointer: int, is_signed: bool) -> None:
    row = encoded(Value(0, is_string=True, limit=64), argument(operand, signed=is_signed))
    hit = Hit({"rsi": 0xFFFF800000000010, "rsp": 0x1000}, {0x1018: 0x8877665544332211.to_bytes(8, "little")})
    assert (row["take"], fetch(row, hit)) == (Take.STRING, pointer)


@pytest.mark.parametrize("limit", [1, 64, layout.MAX_TEXT])
def test_strings_limit_makes_room_for_its_nul(limit: int) -> None:
    assert encoded(Value(0, is_string=True, limit=limit), argument())["limit"] == limit + 1


@pytest.mark.parametrize("size", [3, 16, layout.MAX_TEXT])
def test_raw_bytes_lie_at_the_address_itself(size: int) -> None:
    row = encoded(Value(0, limit=size), argument(Memory("rsp", -16), size))
    assert (row["take"], row["limit"]) == (Take.BYTES, size)
    # no memory is read on the way there
    assert fetch(row, Hit({"rsp": 0x7FFF_0000_1000})) == 0x7FFF_0000_0FF0


@pytest.mark.parametrize(
    ("operand", "pointer"), [(Register("rsi"), 0x5000), (Memory("rsp", 24), 0x6000), (Constant(0x404040), 0x404040)]
)
def test_buffer_is_where_the_operand_points(operand: Operand, pointer: int) -> None:
    row = encoded(Value(0, limit=16, is_buffer=True), argument(operand))
    hit = Hit({"rsi": 0x5000, "rsp": 0x1000}, {0x1018: (0x6000).to_bytes(8, "little")})
    assert (row["take"], row["limit"], fetch(row, hit)) == (Take.BYTES, 16, pointer)


@pytest.mark.parametrize(
    ("operand", "architecture", "reason"),
    [
        (Unavailable("no way to it"), ARCHITECTURE, "^no way to it$"),
        (Register("xmm0"), ARCHITECTURE, "^%xmm0 is no register of x86-64 that the kernel saves at a probe$"),
        (Register("eax"), ARCHITECTURE, "%eax is no register of x86-64"),
        (Memory("fs", 8), ARCHITECTURE, "%fs is no register of x86-64"),
        (Register("rdi"), "aarch64", "%rdi is no register of aarch64"),
        (Memory("rsp"), "aarch64", "%rsp is no register of aarch64"),
    ],
)
@pytest.mark.parametrize("value", [Value(0), Value(0, is_string=True, limit=8)])
def test_what_cannot_be_encoded_says_why(operand: Operand, architecture: str, reason: str, value: Value) -> None:
    with pytest.raises(NotEncodableError, match=reason):
        encode_value(value, argument(operand), architecture)


# filters

IS_ODD = Program((One(Source.ARGUMENT, 0, Relation.NE, 1, 0, NO_COMM, ACCEPT, REJECT),))


@dataclass(frozen=True)
class Wanted:
    """What a filter is made of, and what it means."""

    pids: frozenset[int] | None
    excluded: frozenset[int]
    predicate: Condition | None
    owners: frozenset[int] | None
    followed: int | None

    def verdict(self, arguments: Sequence[Argument], row: Row) -> str:
        if row.pid in self.excluded or (self.owners is not None and owner_of(row) not in self.owners):
            return "excluded"
        if self.followed is not None and not is_followed(self.followed, row):
            return "filtered"
        if self.followed is None and self.pids is not None and row.pid not in self.pids:
            return "filtered"
        is_accepted = self.predicate is None or accepts(self.predicate, site(arguments=arguments), row)
        return "accepted" if is_accepted else "filtered"

    def filter(self, arguments: Sequence[Argument]) -> Filter:
        program = None if self.predicate is None else compile_for(self.predicate, site(arguments=arguments))
        pids = self.pids if self.followed is None else None
        return Filter(pids, self.excluded, program, self.owners, self.followed)


def is_followed(scope: int, row: Row) -> bool:
    """Of each scope's processes, every second one is."""
    return (row.pid + scope) % 2 == 0


def owner_of(row: Row) -> int:
    """Some processes belong to nobody, as the program puts it."""
    return row.pid if row.pid < 4 else (1 << 32) - 1


COMMS = st.sampled_from([b"psql", b"fifteen bytes !", b""])
PIDS = st.integers(0, 5)
SCOPES = (0, 1, 63)
WANTED = st.builds(
    Wanted,
    st.none() | st.frozensets(PIDS, min_size=1, max_size=3),
    st.frozensets(PIDS, max_size=2),
    st.none() | expressions(comms=COMMS),
    st.none() | st.frozensets(PIDS, max_size=3),
    st.none() | st.sampled_from(SCOPES),
)
ARGUMENTS = st.tuples(
    *(st.builds(argument, st.just(Memory("rsp", 8 * number)), SIZES, signed=st.booleans()) for number in range(4))
)
ROWS = st.builds(
    Row,
    PIDS,
    PIDS,
    COMMS,
    st.fixed_dictionaries(dict.fromkeys(range(4), st.none() | st.integers(0, 3) | WORDS)),
)


ENTERED = LinkOf(3, Link(LinkKind.ENTERED, 2))
RETURNED = LinkOf(63, Link(LinkKind.RETURNED, 0))
WITHIN = LinkOf(0, Link(LinkKind.WITHIN, 15))


def hit_of(row: Row) -> Hit:
    """Argument i is in memory at rsp + 8 * i."""
    stack = {0x1000 + 8 * number: raw.to_bytes(8, "little") for number, raw in row.arguments.items() if raw is not None}
    ids = {(int(Source.PID), 0): row.pid, (int(Source.TID), 0): row.tid, (int(Source.OWNER), 0): owner_of(row)}
    ids |= {(int(Source.FOLLOWED), scope): is_followed(scope, row) for scope in SCOPES}
    return Hit({"rsp": 0x1000}, stack, ids, row.comm)


@settings(max_examples=300)
@given(st.lists(WANTED, min_size=1, max_size=4), ARGUMENTS, st.permutations(range(4)), st.lists(ROWS, max_size=8))
def test_filters_decide_as_they_are_meant(
    wanted: list[Wanted], arguments: tuple[Argument, ...], places: list[int], rows: list[Row]
) -> None:
    """places: where the plan has each argument's operand."""
    bits = [7 * number + 3 for number in range(len(wanted))]
    filters = [(bit, each.filter(arguments)) for bit, each in zip(bits, wanted, strict=True)]
    tests = rows_of(encode_filters(filters, dict(enumerate(places))), layout.TEST)
    by_place = {
        place: encoded(Value(number), found)
        for number, (found, place) in enumerate(zip(arguments, places, strict=True))
    }
    operands = [by_place[place] for place in range(len(arguments))]
    for row in rows:
        expected = [(bit, each.verdict(arguments, row)) for bit, each in zip(bits, wanted, strict=True)]
        assert run(tests, operands, hit_of(row)) == expected


def test_jumps_reach_over_hundreds_of_tests() -> None:
    many = frozenset(range(1000, 1400))
    filters = [(0, Filter(many, many, IS_ODD)), (63, Filter(many, NOBODY, IS_ODD))]
    tests = rows_of(encode_filters(filters, {0: 0}), layout.TEST)
    operands = [encoded(Value(0), argument())]

    def verdicts(pid: int, number: int) -> list[tuple[int, str]]:
        return run(tests, operands, Hit({"rdi": number}, ids={(int(Source.PID), 0): pid}))

    assert verdicts(1399, 1) == [(0, "excluded"), (63, "accepted")]
    assert verdicts(1399, 2) == [(0, "excluded"), (63, "filtered")]
    assert verdicts(1400, 1) == [(0, "filtered"), (63, "filtered")]


@pytest.mark.parametrize("source", [Source.UID, Source.GID, Source.TID, Source.PID, Source.CGROUP])
def test_only_arguments_are_looked_up_among_the_plans_operands(source: Source) -> None:
    program = Program((One(source, 2, Relation.EQ, ALL_BITS, 4711, NO_COMM, ACCEPT, REJECT),))
    tests = rows_of(encode_filters([(1, Filter(None, NOBODY, program))], {2: 0}), layout.TEST)
    assert run(tests, [], Hit(ids={(int(source), 2): 4711})) == [(1, "accepted")]
    assert run(tests, [], Hit(ids={(int(source), 2): 4712})) == [(1, "filtered")]


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("number", [4, 5, 6, 1 << 63])
def test_relations_and_masks_survive(relation: Relation, number: int) -> None:
    program = Program((One(Source.PID, 0, relation, ALL_BITS - 0x100, 5, NO_COMM, ACCEPT, REJECT),))
    tests = rows_of(encode_filters([(0, Filter(None, NOBODY, program))], {}), layout.TEST)
    compared = signed(number) if relation.name.startswith("SIGNED") else number
    expected = "accepted" if RELATIONS[relation](compared, 5) else "filtered"
    assert run(tests, [], Hit(ids={(int(Source.PID), 0): number | 0x100})) == [(0, expected)]


@pytest.mark.parametrize("pids", [None, frozenset({7})])
@pytest.mark.parametrize(("program", "is_wanted"), [(None, {1: True, 2: True}), (IS_ODD, {1: True, 2: False})])
def test_calls_go_on_a_chain_if_they_are_wanted_and_come_off_in_any_case(
    pids: frozenset[int] | None, program: Program | None, is_wanted: dict[int, bool]
) -> None:
    """What a hit does not tell is not asked: a test of the chain changes it."""
    operands = [encoded(Value(0), argument())]
    for link in (ENTERED, RETURNED, WITHIN):
        filters = [(5, Filter(pids, NOBODY, program, link=link)), (9, Filter(None, NOBODY, IS_ODD))]
        tests = rows_of(encode_filters(filters, {0: 0}), layout.TEST)
        (of_chain,) = [test for test in tests if test["source"] == Source.LINK]
        kind, position = divmod(int(of_chain["link"]), 1 << layout.LINK_BITS)
        assert (kind, position, of_chain["index"]) == (link.link.kind, link.link.position, link.chain)
        for number, passes in is_wanted.items():
            other = (9, "accepted" if number % 2 else "filtered")
            for on_chain in (0, 1):
                ids = {(int(Source.PID), 0): 7, (int(Source.LINK), link.chain): on_chain}
                if link is not RETURNED and not passes:
                    del ids[int(Source.LINK), link.chain]
                own = (5, "accepted" if passes and on_chain else "filtered")
                assert run(tests, operands, Hit({"rdi": number}, ids=ids)) == [own, other]
        if pids:
            hit = Hit({"rdi": 1}, ids={(int(Source.PID), 0): 8})
            assert run(tests, operands, hit) == [(5, "filtered"), (9, "accepted")]


def test_no_filters_are_no_tests() -> None:
    assert encode_filters([], {}) == b""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Filter(None, NOBODY, None), True),
        (Filter(None, NOBODY, Program((), ACCEPT)), True),
        (Filter(None, NOBODY, Program((), REJECT)), False),
        (Filter(None, NOBODY, IS_ODD), False),
        (Filter(None, frozenset({1}), None), False),
        (Filter(frozenset({1}), NOBODY, None), False),
        (Filter(NOBODY, NOBODY, None), False),
        (Filter(None, NOBODY, None, frozenset({1})), False),
        (Filter(None, NOBODY, None, NOBODY), False),
        (Filter(None, NOBODY, None, followed=0), False),
        (Filter(None, NOBODY, None, link=ENTERED), False),
    ],
)
def test_which_filters_accept_all(wanted: Filter, expected: bool) -> None:
    assert wanted.accepts_all is expected


def test_filter_names_the_arguments_that_it_reads() -> None:
    second = replace(IS_ODD.tests[0], index=2, on_false=1)
    program = Program((second, replace(second, index=0), replace(second, source=Source.CGROUP, index=5)))
    assert Filter(frozenset({9}), NOBODY, program).arguments == (0, 2)
    assert Filter(frozenset({9}), NOBODY, None).arguments == ()


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(frozenset({1, 2, 3}), NOBODY, None),
        Filter(None, frozenset({4, 5}), None),
        Filter(frozenset({1, 2, 3}), frozenset({4, 5}), IS_ODD),
        Filter(None, NOBODY, Program((), REJECT)),
        Filter(None, NOBODY, None, link=ENTERED),
        Filter(frozenset({1, 2}), frozenset({4}), IS_ODD, frozenset({1000}), link=RETURNED),
    ],
)
def test_steps_are_as_many_as_the_tests_laid_out(wanted: Filter) -> None:
    assert wanted.steps == len(rows_of(encode_filters([(0, wanted)], {0: 0}), layout.TEST))


@pytest.mark.parametrize("excluded", [NOBODY, frozenset({8})])
def test_scope_without_processes_accepts_none(excluded: frozenset[int]) -> None:
    tests = rows_of(encode_filters([(0, Filter(NOBODY, excluded, None))], {}), layout.TEST)
    assert run(tests, [], Hit(ids={(int(Source.PID), 0): 7})) == [(0, "filtered")]
