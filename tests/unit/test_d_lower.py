"""Which clauses of D programs the server can answer, and in what terms."""

from __future__ import annotations

import pytest

from stapsdtd.query.d.check import check
from stapsdtd.query.d.lower import Lowered, lowered
from stapsdtd.query.d.nodes import Clause
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.values import Integer, String, Type

TYPES: list[Type] = [Integer(32, is_signed=True), Integer(64, is_signed=False), String()]


def argument_type(clause: Clause, index: int) -> Type | None:
    del clause
    return TYPES[index]


def fits(clause: Clause, index: int, bits: int) -> bool:
    """The second argument is unsigned and has 64 bits, the fourth is signed."""
    del clause
    return index not in {1, 3} or (index == 3 and bits == 64)


def plan(text: str) -> list[tuple[Lowered, ...] | None]:
    """What becomes of each clause; None for those that are interpreted."""
    program = parse(text)
    found = lowered(check(program, argument_type), fits)
    return [found.get(id(clause)) for clause in program.clauses]


def one(text: str) -> Lowered:
    ((found,),) = [each for each in plan(text) if each is not None]
    return found


@pytest.mark.parametrize(
    ("statement", "functions", "value", "by"),
    [
        ("@ = count()", ("count",), "", ()),
        ("@[copyinstr(arg1)] = count()", ("count",), "", ("str(arg1, 255)",)),
        ("@[copyinstr(arg1, 8), pid, execname] = count()", ("count",), "", ("str(arg1, 8)", "pid", "execname")),
        ("@[args[2], arg0, args[0]] = count()", ("count",), "", ("str(arg2, 255)", "arg0", "arg0")),
        ("@[probemod, probefunc, probename] = count()", ("count",), "", ("module", "function", "name")),
        ("@[tid, uid, gid, cpu] = count()", ("count",), "", ("tid", "uid", "gid", "cpu")),
        ("@ = sum(arg0)", ("values", "sum"), "arg0", ()),
        ("@ = avg(args[0])", ("values", "sum"), "arg0", ()),
        ("@ = min(arg0)", ("values", "min"), "arg0", ()),
        ("@ = max(pid)", ("values", "max"), "pid", ()),
        ("@[pid] = quantize(arg0)", ("values", "quantize"), "arg0", ("pid",)),
        ("@ = lquantize(arg0, 0, 100, 10)", ("values", "lquantize(0, 100, 10)"), "arg0", ()),
        ("@ = lquantize(arg0, -5, 5)", ("values", "lquantize(-5, 5, 1)"), "arg0", ()),
        # what is less than a step up to the limit has no bin of its own
        ("@ = lquantize(arg0, 0, 105, 10)", ("values", "lquantize(0, 100, 10)"), "arg0", ()),
        ("@ = llquantize(arg0, 10, 0, 6, 20)", ("values", "llquantize(10, 0, 6, 20)"), "arg0", ()),
        ("@ = llquantize(arg0, 2, 3, 20, 2)", ("values", "llquantize(2, 3, 20, 2)"), "arg0", ()),
    ],
)
def test_aggregations(statement: str, functions: tuple[str, ...], value: str, by: tuple[str, ...]) -> None:
    found = one(f"a:::b {{ {statement}; }}")
    assert (found.functions, found.value, found.by, found.where, found.aggregation) == (functions, value, by, "", "")


@pytest.mark.parametrize(
    ("predicate", "where"),
    [
        ("arg0 > 5", "arg0 > 5"),
        ("5 < arg0", "5 < arg0"),
        ("arg0 <= -1", "arg0 <= -1"),
        ('execname == "psql" && !(pid != 7)', '(execname == "psql") && (!(pid != 7))'),
        ('copyinstr(arg2) == "a b" || uid == 0', '(str(arg2, 255) == "a b") || (uid == 0)'),
    ],
)
def test_predicates(predicate: str, where: str) -> None:
    assert one(f"a:::b /{predicate}/ {{ @ = count(); }}").where == where


@pytest.mark.parametrize(
    "clause",
    [
        "a:::b { trace(1); }",
        "a:::b { @ = count(); trace(1); }",
        "a:::b { @ = count(); x = 1; }",
        "a:::b { }",
        "a:::b",
        "BEGIN { @ = count(); }",
        "tick-1s { @ = count(); }",
        "a:::b, BEGIN { @ = count(); }",
        "a:::b { @[arg1] = count(); }",
        "a:::b { @ = sum(arg1); }",
        "a:::b { @ = sum(arg0 + 1); }",
        "a:::b { @[probeprov] = count(); }",
        "a:::b { @[timestamp] = count(); }",
        "a:::b { @ = stddev(arg3); }",
        "a:::b { @ = stddev(pid); }",
        "a:::b { @ = lquantize(arg0, 0, 10000, 1); }",
        "a:::b { @ = lquantize(arg0, 0, 10, 1, 2); }",
        "a:::b { @ = llquantize(arg0, 10, 0, 6, 5); }",
        "a:::b { @ = llquantize(arg0, 2, 0, 62, 2); }",
        "a:::b { @ = llquantize(arg0, 10, 0, 6, 10, 2); }",
        "a:::b { @ = quantize(arg0, 2); }",
        "a:::b /arg1 > 5/ { @ = count(); }",
        "a:::b /arg0 > pid/ { @ = count(); }",
        "a:::b /arg0/ { @ = count(); }",
        "a:::b /arg0 == 18446744073709551615/ { @ = count(); }",
        'a:::b /execname == "a\\"b"/ { @ = count(); }',
        "int x; a:::b /x == 1/ { @ = count(); }",
        "a:::b { @[copyinstr(arg1, 256)] = count(); }",
        "a:::b { @ = count(); } tick-1s { printa(@); }",
        "a:::b { @ = count(); } a:::c { clear(@); }",
    ],
)
def test_what_is_interpreted(clause: str) -> None:
    assert set(plan(clause)) == {None}


def test_a_standard_deviation_takes_exact_sums() -> None:
    ((values, *squares),) = [each for each in plan("a:::b /pid == 1/ { @x[cpu] = stddev(arg0); }") if each is not None]
    assert (values.functions, values.value, values.squares) == (("values", "sum"), "arg0", 0)
    assert [(each.value, each.squares) for each in squares] == [
        ("(arg0 * arg0) >> 32", 1 << 32), ("(arg0 * arg0) & 4294967295", 1),
    ]  # fmt: skip
    assert {(each.aggregation, each.where, each.by) for each in (values, *squares)} == {("x", "pid == 1", ("cpu",))}


def test_the_end_may_look_at_what_was_added_up() -> None:
    first, second, end = plan(
        "a:::b { @x = count(); @y = sum(arg0); } a:::c { @x = count(); trace(1); } END { printa(@x); }"
    )
    assert first is not None
    assert [each.aggregation for each in first] == ["x", "y"]
    # both have their part in @x
    assert (second, end) == (None, None)
