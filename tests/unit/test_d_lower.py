"""Which clauses of D programs the server can answer, and in what terms."""

from __future__ import annotations

import pytest

from stapsdtd.query.d.lower import Lowered
from tests.unit.d_plans import plan, reasons


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
        ("@[arg1, args[1]] = count()", ("count",), "", ("arg1", "arg1")),
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
        # without a sign in either language, or where it does not matter
        ("args[1] > 5", "arg1 > 5"),
        ("ntohs(arg0) >= 443 && htonll(arg0) > 1", "(ntohs(arg0) >= 443) && (htonll(arg0) > 1)"),
        ("arg1 == 5 || 7 != arg1", "(arg1 == 5) || (7 != arg1)"),
        ('execname == "psql" && !(pid != 7)', '(execname == "psql") && (!(pid != 7))'),
        ('probename == "go"', 'name == "go"'),
        ('probename != "go-on"', '!(name == "go__on" || name == "go-on")'),
        ('"go__on" == probename && pid == 1', '(name == "go__on" || name == "go-on") && (pid == 1)'),
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
        "a:::b { @ = sum(arg1); }",
        "a:::b { @ = sum(arg0 + 1); }",
        "a:::b { @[probeprov] = count(); }",
        "a:::b { @[timestamp] = count(); }",
        'a:::b /execname < "b"/ { @ = count(); }',
        'a:::b /probename == "a-b-c-d-e-f"/ { @ = count(); }',
        "a:::b { @ = stddev(arg3); }",
        "a:::b { @ = stddev(pid); }",
        "a:::b { @ = lquantize(arg0, 0, 10000, 1); }",
        "a:::b { @ = lquantize(arg0, 0, 10, 1, 2); }",
        "a:::b { @ = llquantize(arg0, 10, 0, 6, 5); }",
        "a:::b { @ = llquantize(arg0, 2, 0, 62, 2); }",
        "a:::b { @ = llquantize(arg0, 10, 0, 6, 10, 2); }",
        "a:::b { @ = quantize(arg0, 2); }",
        "a:::b /arg1 > 5/ { @ = count(); }",
        "a:::b /args[1] > -5/ { @ = count(); }",
        "a:::b /arg1 == -5/ { @ = count(); }",
        "a:::b /arg0 > pid/ { @ = count(); }",
        "a:::b /arg0/ { @ = count(); }",
        "a:::b /arg0 == 18446744073709551615/ { @ = count(); }",
        'a:::b /execname == "a\\"b"/ { @ = count(); }',
        "int x; a:::b /x == 1/ { @ = count(); }",
        "a:::b { @[copyinstr(arg1, 256)] = count(); }",
        "#pragma D option strsize=255\na:::b { @[execname] = count(); }",
        "a:::b { @ = count(); } tick-1s { printa(@); }",
        "a:::b { @ = count(); } a:::c { clear(@); }",
        "a:::b { @[copyinstr(arg0 + 8)] = count(); }",
    ],
)
def test_what_is_interpreted(clause: str) -> None:
    assert set(plan(clause)) == {None}


def test_longer_strings_are_keys() -> None:
    assert one("#pragma D option strsize=4k\na:::b { @[copyinstr(arg1)] = count(); }").by == ("str(arg1, 4095)",)


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


@pytest.mark.parametrize(
    ("clause", "reason"),
    [
        ("a:::b", "it prints each hit"),
        ("a:::b { trace(1); }", "it does more than add up"),
        ("a:::b { @ = quantize(arg0, 2); }", "quantize() counts each value more than once"),
        ("a:::b { @ = sum(arg0 + 1); }", "it needs arg0 + 1"),
        ("a:::b { @ = min(arg1); }", "arg1 is not everywhere a number of 64 bits with a sign"),
        ("a:::b /arg0/ { @ = count(); }", "arg0 is no comparison with a constant"),
        ("a:::b { @ = llquantize(arg0, 10, 0, 6, 5); }", "the server has not so many bins"),
        ("a:::b, BEGIN { @ = count(); }", "it is not of static probes alone"),
    ],
)
def test_why_clauses_are_interpreted(clause: str, reason: str) -> None:
    assert reasons(clause) == [reason]


@pytest.mark.parametrize("clause", ["a:::c { exit(0); }", "BEGIN, a:::c { if (arg0) { exit(1); } }"])
def test_nothing_is_added_up_behind_a_hit_that_exits(clause: str) -> None:
    assert reasons(f"a:::b {{ @ = count(); }} {clause}") == ["a hit may call exit()"] * 2


def test_a_timer_may_exit() -> None:
    (found,) = filter(None, plan("a:::b { @ = count(); } tick-1s { exit(0); }"))
    assert [each.functions for each in found] == [("count",)]
