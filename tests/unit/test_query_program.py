from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from stapsdtd.capture.bpf.encode import Filter, encode_filters
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import Argument, Constant, Memory, Site, Unavailable
from stapsdtd.query.columns import Hits, Values, run
from stapsdtd.query.compile import MAX_TESTS, compile_for, why_not
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Condition, Field, Operator, Or
from stapsdtd.query.parse import parse
from stapsdtd.query.program import ACCEPT, ENDS, REJECT, Operation, Program, Relation, Source
from stapsdtd.query.program import Test as One
from stapsdtd.query.scope import combined
from tests.fuzz.examples import examples
from tests.unit.queries import Row, accepts, expressions, value_of
from tests.unit.samples import RDI, argument, site

ALL_BITS = (1 << 64) - 1
NO_COMM = bytes(16)
COMMS = st.sampled_from([b"psql", b"postgres", b"fifteen bytes !", b""])
EQ, NE, LT, LE, GT, GE = Operator


def parsed(text: str) -> Condition:
    return parse(text, lambda _: None)


def site_of(*arguments: Argument) -> Site:
    return site(arguments=arguments)


UNSIGNED = site_of(*(argument(size=8) for _ in range(4)))


def test_the_example_of_the_docstring() -> None:
    program = compile_for(parsed('arg0 > 100 && (pid == 7 || execname == "psql")'), UNSIGNED)
    comm = b"psql".ljust(16, b"\0")
    assert program == Program(
        (
            One(Source.ARGUMENT, 0, Relation.GT, ALL_BITS, 100, NO_COMM, 1, REJECT),
            One(Source.PID, 0, Relation.EQ, ALL_BITS, 7, NO_COMM, ACCEPT, 2),
            One(Source.EXECNAME, 0, Relation.EQ, ALL_BITS, 0, comm, ACCEPT, REJECT),
        )
    )
    assert program.arguments == (0,)


def test_numbers_are_calculated_in_words() -> None:
    program = compile_for(parsed("arg0 > 100 && (pid == 7 || arg1 - 1 == arg2 * 4)"), UNSIGNED)
    calculated = Operation.SUBTRACT, Operation.MULTIPLY
    assert program == Program(
        (
            One(Source.ARGUMENT, 0, Relation.GT, ALL_BITS, 100, NO_COMM, 1, REJECT),
            One(Source.PID, 0, Relation.EQ, ALL_BITS, 7, NO_COMM, ACCEPT, 2),
            One(Source.ARGUMENT, 1, calculated[0], ALL_BITS, 1, NO_COMM, 3, 3, result=0),
            One(Source.ARGUMENT, 2, calculated[1], ALL_BITS, 4, NO_COMM, 4, 4, result=1),
            One(Source.WORD, 0, Relation.EQ, ALL_BITS, 0, NO_COMM, ACCEPT, REJECT, right=1),
        )
    )
    assert (program.arguments, program.words, program.uses_words) == ((0, 1, 2), 2, True)


@pytest.mark.parametrize(
    ("text", "sizes", "relations"),
    [
        ("arg0 < arg1", (4, -4), [Relation.SIGNED_LT]),
        ("arg0 < arg1", (8, 8), [Relation.LT]),
        ("arg0 < arg1", (-8, 8), [Relation.SIGNED_LT, Relation.LT]),
        ("arg0 < arg1", (8, -8), [Relation.SIGNED_LT, Relation.LT]),
        # where the second is negative, whether there is a first one
        ("!(arg0 == arg1)", (8, -8), [Relation.SIGNED_LT, Relation.EQ, Relation.EQ]),
        ("arg0 + 1 > -1", (8, 8), [Relation.EQ]),
        ("arg0 + 1 > 1", (8, 8), [Relation.GT]),
        ("arg0 + 1 > 1", (4, 8), [Relation.SIGNED_GT]),
    ],
)
def test_signs_decide_how_numbers_are_compared(text: str, sizes: tuple[int, int], relations: list[Relation]) -> None:
    at = site_of(*(argument(size=abs(size), signed=size < 0) for size in sizes))
    found = [test.relation for test in compile_for(parsed(text), at).tests if isinstance(test.relation, Relation)]
    assert found == relations


def test_cgroup_is_told_by_level_and_id() -> None:
    inside = Comparison(Field.CGROUP, NE, Cgroup("/a/b", 4711, 2))
    assert compile_for(inside, site()).tests == (
        One(Source.CGROUP, 2, Relation.NE, ALL_BITS, 4711, NO_COMM, ACCEPT, REJECT),
    )


def test_cgroup_deeper_than_a_test_can_look_is_refused() -> None:
    """Users may nest theirs as they like."""
    deepest, deeper = (Comparison(Field.CGROUP, EQ, Cgroup("/a", 4711, level)) for level in (255, 256))
    assert encode_filters([(0, Filter(None, frozenset(), compile_for(deepest, site())))], {})
    reason = why_not(deeper, site().arguments)
    assert reason == "cannot filter by a cgroup 256 levels deep; the limit is 255"
    assert why_not(And((deepest, deeper)), site().arguments) == reason


@pytest.mark.parametrize(
    ("text", "size", "signed", "expected"),
    [
        ("arg0 < -5", 4, True, (Relation.SIGNED_LT, ALL_BITS, ALL_BITS - 4)),
        ("arg0 >= 5", 8, True, (Relation.SIGNED_GE, ALL_BITS, 5)),
        ("arg0 == -5", 8, True, (Relation.EQ, ALL_BITS, ALL_BITS - 4)),
        ("arg0 > 5", 4, False, (Relation.GT, ALL_BITS, 5)),
        ("arg0 & 0xff > 5", 4, True, (Relation.GT, 0xFF, 5)),
        ("arg0 & -1 > 5", 4, True, (Relation.GT, ALL_BITS, 5)),
        ("arg0 < 0", 4, False, REJECT),
        ("arg0 >= 0", 4, False, ACCEPT),
        ("arg0 == -1", 8, False, REJECT),
        ("arg0 != -1", 8, False, ACCEPT),
        ("arg0 == 256", 1, False, REJECT),
        ("arg0 < 256", 1, False, ACCEPT),
        ("arg0 > 254", 1, False, (Relation.GT, ALL_BITS, 254)),
        ("arg0 > 127", 1, True, REJECT),
        ("arg0 >= -128", 1, True, ACCEPT),
        ("arg0 < 18446744073709551615", 8, True, ACCEPT),
        ("arg0 & 0xf0 == 0x0f", 8, True, REJECT),
        ("arg0 & 0x100", 1, False, REJECT),
        ("arg0 & 0x100", 1, True, (Relation.NE, 0x100, 0)),
        ("arg0 & 0 == 0", 8, False, ACCEPT),
        ("pid < 0", 4, True, REJECT),
        ("uid == 4294967296", 4, True, REJECT),
        ("uid != -1", 4, True, ACCEPT),
    ],
)
def test_size_and_sign_decide(text: str, size: int, signed: bool, expected: object) -> None:
    program = compile_for(parsed(text), site_of(argument(size=size, signed=signed)))
    told: object = program.start
    if program.tests:
        (test,) = program.tests
        assert (program.start, test.on_true, test.on_false) == (0, ACCEPT, REJECT)
        told = (test.relation, test.mask, test.value)
    assert told == expected


@pytest.mark.parametrize(
    ("text", "tests", "start"),
    [
        ("pid == 1 || arg0 >= 0", 1, 0),
        ("arg0 >= 0 || pid == 1", 0, ACCEPT),
        ("arg0 < 0 && pid == 1", 0, REJECT),
        ("pid == 1 && arg0 < 0", 0, REJECT),
        ("!(pid == 1 || arg0 >= 0) || tid == 2", 2, 0),
        ("(arg0 < 0 && pid == 1) || tid == 2", 1, 0),
        ("(arg0 < 0 || pid == 1) && tid == 2", 2, 0),
    ],
)
def test_what_no_jump_leads_to_is_left_out(text: str, tests: int, start: int) -> None:
    program = compile_for(parsed(text), UNSIGNED)
    assert (len(program.tests), program.start) == (tests, start)


@pytest.mark.parametrize(
    ("operand", "size", "is_float", "reason"),
    [
        (Unavailable("no way to %xmm0"), 8, False, "cannot filter by arg0: no way to %xmm0"),
        (RDI, 8, True, "cannot filter by arg0: 8@%rdi is a floating-point number"),
        (RDI, 16, False, "cannot filter by arg0: 8@%rdi has 16 bytes and is not an integer"),
        (Memory("rbp", -4), 4, False, None),
        (Constant(5), 4, False, None),
    ],
)
def test_why_not(operand: object, size: int, is_float: bool, reason: str | None) -> None:
    found = replace(argument(size=size), operand=operand, is_float=is_float)
    assert why_not(parsed("pid == 1 || arg0"), site_of(found).arguments) == reason
    assert why_not(parsed("pid == 1"), site_of(found).arguments) is None
    if reason is not None:
        with pytest.raises(ValueError, match="cannot filter by"):
            compile_for(parsed("arg0"), site_of(found))


def test_argument_beyond_the_sites_own() -> None:
    assert why_not(parsed("arg2"), site_of(argument(), argument()).arguments) == (
        "it has 2 arguments, so there is no arg2 to filter by"
    )
    # also where it would never be looked at
    assert why_not(parsed("arg0 < 0 && arg2"), site_of(argument()).arguments) is not None


def test_too_many_tests() -> None:
    def several(count: int) -> Condition:
        return Or(tuple(Comparison(Field.PID, EQ, pid) for pid in range(count)))

    assert why_not(several(MAX_TESTS), site().arguments) is None
    assert why_not(several(MAX_TESTS + 1), site().arguments) == "the expression needs 65 tests here; the limit is 64"


@st.composite
def hits(draw: st.DrawFn) -> tuple[Site, list[Row]]:
    """A site of four arguments, and rows that it fired for."""
    operands = st.just(RDI) | st.builds(Constant, st.integers(-(1 << 63), ALL_BITS))
    made = st.builds(argument, operands, st.sampled_from([1, 2, 4, 8]), signed=st.booleans())
    found = site_of(*(draw(made) for _ in range(4)))
    raw = st.none() | st.integers(0, 3) | st.integers(ALL_BITS - 3, ALL_BITS) | st.integers(0, ALL_BITS)
    ids = st.integers(0, 3) | st.integers(0, (1 << 31) - 1)
    rows = st.lists(st.builds(Row, ids, ids, COMMS, st.fixed_dictionaries(dict.fromkeys(range(4), raw))), max_size=20)
    return found, draw(rows)


def columns_of(found: Site, rows: Sequence[Row]) -> Hits:
    arguments = {}
    for index, each in enumerate(found.arguments):
        is_constant = isinstance(each.operand, Constant)
        raw = [row.arguments[index] for row in rows]
        data = [value_of(each, number or 0) for number in raw]
        unreadable = None if is_constant else np.array([number is None for number in raw], np.bool_)
        column = np.array(data, np.int64) if each.signed else np.array(data, np.uint64)
        arguments[index] = Values(column, unreadable)
    return Hits(
        np.array([row.pid for row in rows], np.int32),
        np.array([row.tid for row in rows], np.int32),
        np.array([row.comm for row in rows], "S16"),
        arguments,
        np.zeros(len(rows), np.uint16),
        np.zeros(len(rows), np.int64),
    )


@examples(200)
@given(expressions(comms=COMMS), hits())
@example(And((Comparison(ArgumentValue(0), EQ, 1), Comparison(ArgumentValue(1), LT, 0))), (UNSIGNED, []))
def test_columns_say_what_the_expression_says(expression: Condition, fired: tuple[Site, list[Row]]) -> None:
    found, rows = fired
    program = compile_for(expression, found)
    for number, test in enumerate(program.tests):
        for jump in (test.on_true, test.on_false, test.on_missing):
            assert jump in ENDS or number < jump < len(program.tests)
    expected = [accepts(expression, found, row) for row in rows]
    assert run(program, columns_of(found, rows)).accepted.tolist() == expected


@pytest.mark.parametrize("field", [Field.UID, Field.GID])
def test_columns_do_not_know_everything(field: Field) -> None:
    program = compile_for(Comparison(field, EQ, 1), site())
    with pytest.raises(ValueError, match=f"{field.name} is not available"):
        run(program, columns_of(site(), [Row(1, 1, b"a", {})]))


class TestScope:
    WHERE = Comparison(Field.PID, EQ, 1)
    CGROUP = Cgroup("/a", 2, 1)

    def test_nothing(self) -> None:
        assert combined(None, [], [], []) is None

    def test_one_kind_alone(self) -> None:
        assert combined(self.WHERE, [], [], []) == self.WHERE
        assert combined(None, [5, 5], [], []) == Comparison(Field.UID, EQ, 5)
        assert combined(None, [], [b"a", b"b"], []) == Or(
            (Comparison(Field.EXECNAME, EQ, b"a"), Comparison(Field.EXECNAME, EQ, b"b"))
        )

    def test_all_kinds(self) -> None:
        assert combined(self.WHERE, [5], [b"a"], [self.CGROUP]) == And(
            (
                Comparison(Field.UID, EQ, 5),
                Comparison(Field.CGROUP, EQ, self.CGROUP),
                Comparison(Field.EXECNAME, EQ, b"a"),
                self.WHERE,
            )
        )

    def test_too_much(self) -> None:
        assert combined(self.WHERE, range(63), [], []) is not None
        with pytest.raises(InvalidArgumentError, match="65 comparisons; the limit is 64"):
            combined(self.WHERE, range(64), [], [])
