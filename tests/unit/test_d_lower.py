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


def fits_signed(clause: Clause, index: int) -> bool:
    """The second argument is unsigned and has 64 bits."""
    del clause
    return index != 1


def plan(text: str) -> list[tuple[Lowered, ...] | None]:
    """What becomes of each clause; None for those that are interpreted."""
    program = parse(text)
    found = lowered(check(program, argument_type), fits_signed)
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
        "a:::b { @ = stddev(arg0); }",
        "a:::b { @ = lquantize(arg0, 0, 10, 3); }",
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


def test_the_end_may_look_at_what_was_added_up() -> None:
    first, second, end = plan(
        "a:::b { @x = count(); @y = sum(arg0); } a:::c { @x = count(); trace(1); } END { printa(@x); }"
    )
    assert first is not None
    assert [each.aggregation for each in first] == ["x", "y"]
    # both have their part in @x
    assert (second, end) == (None, None)
