"""Which clauses that take the time between probes are spans, and why others are not."""

from __future__ import annotations

import pytest

from tests.unit.d_plans import plan, reasons

START = "a:::b { self->t = timestamp; }"
TIME = "timestamp - self->t"
END = f"a:::c /self->t/ {{ @ = quantize({TIME}); self->t = 0; }}"


@pytest.mark.parametrize(
    ("statement", "functions", "value", "by"),
    [
        (f"@ = quantize({TIME})", ("values", "quantize"), "elapsed", ()),
        (f"@[pid, copyinstr(arg2)] = avg({TIME})", ("values", "sum"), "elapsed", ("pid", "str(arg2, 255)")),
        (f"@ = max(({TIME}) / 1000)", ("values", "max"), "(elapsed) / 1000", ()),
        (f"this->d = {TIME}; @ = min(this->d / 1000)", ("values", "min"), "(elapsed) / 1000", ()),
        (f"@ = lquantize({TIME}, 0, 1000, 10)", ("values", "lquantize(0, 1000, 10)"), "elapsed", ()),
        ("@ = count()", ("count",), "", ()),
    ],
)
def test_times_are_spans(statement: str, functions: tuple[str, ...], value: str, by: tuple[str, ...]) -> None:
    start, end = plan(f"{START} a:::c /self->t/ {{ {statement}; self->t = 0; }}")
    assert start == ()
    assert end is not None
    (found,) = end
    assert (found.functions, found.value, found.by, found.where) == (functions, value, by, "")
    assert found.start is not None
    assert (found.start.where, found.start.takes_latest) == ("", True)


@pytest.mark.parametrize(
    ("starts", "ends", "start_where", "where", "takes_latest"),
    [
        ("", "/self->t != 0/", "", "", True),
        ("", "/self->t > 0/", "", "", True),
        ("", "/arg0 > 9 && self->t/", "", "arg0 > 9", True),
        ("/arg0 == 1/", "/self->t && pid == 1 && arg0 != 2/", "arg0 == 1", "(pid == 1) && (arg0 != 2)", True),
        # where there is a time already, the first one counts
        ("/!self->t/", "/self->t/", "", "", False),
        ("/self->t == 0 && arg0 == 1/", "/self->t/", "arg0 == 1", "", False),
    ],
)
def test_predicates(starts: str, ends: str, start_where: str, where: str, takes_latest: bool) -> None:
    end = END.replace("/self->t/", ends)
    _, parts = plan(f"self uint64_t t; a:::b {starts} {{ self->t = timestamp; }} {end}")
    assert parts is not None
    (found,) = parts
    assert found.start is not None
    assert (found.start.where, found.where, found.start.takes_latest) == (start_where, where, takes_latest)


def test_two_aggregations_have_a_span_each() -> None:
    _, end = plan(f"{START} a:::c /self->t/ {{ @x = sum({TIME}); @y = max({TIME}); self->t = 0; }}")
    assert end is not None
    assert [(each.aggregation, each.value) for each in end] == [("x", "elapsed"), ("y", "elapsed")]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (END.replace("/self->t/", ""), "its predicate does not ask for self->t"),
        (END.replace("/self->t/", "/self->t || pid == 1/"), "its predicate does not ask for self->t"),
        (END.replace("/self->t/", "/self->t && self->t > 5/"), "it needs self->t"),
        (END.replace("self->t = 0;", ""), "it does not end with self->t = 0"),
        (END.replace("self->t = 0;", "self->t = 0; n++;"), "it does not end with self->t = 0"),
        (END.replace("@ =", "n++; @ ="), "it does more than add up times"),
        (END.replace(TIME, "self->t"), "self->t is not the time since the start"),
        (END.replace(TIME, f"{TIME} + 1"), "(timestamp - self->t) + 1 is not the time since the start"),
        (END.replace("quantize", "stddev"), "squares of times have too many bits"),
        (END.replace("/self->t/", "/self->t && arg1 > 5/"), "arg1 is not everywhere a number of 64 bits"),
        (END.replace("a:::c", "a:::b"), "a probe is of both clauses"),
        (END.replace("a:::c", "BEGIN"), "it is not of static probes alone"),
        (END.replace("@ =", f"@x = sum({TIME}); @y = max({TIME}); @ ="), "it adds up times more than 2 times"),
        (f"{END} tick-1s {{ printa(@); }}", "@ is printed or changed while the program runs"),
        (f"self int t; {END}", "self->t has not the 64 bits of a time"),
        # the hit's other clauses share it
        (
            f"a:::c /self->t/ {{ this->d = {TIME}; @ = sum(this->d); self->t = 0; }} a:::c {{ trace(this->d); }}",
            "this->d is of another clause, too",
        ),
        # somebody else may change the time
        (f"{END} a:::d {{ self->t = 0; }}", "it does more than add up"),
        (f"{END} a:::d {{ self->t = timestamp; }}", "it does more than add up"),
    ],
)
def test_what_is_interpreted(end: str, reason: str) -> None:
    found = reasons(f"{START} {end}")
    assert len(found) >= 2
    assert any(each.startswith(reason) for each in found)


def test_times_by_another_key_than_the_thread_are_interpreted() -> None:
    found = reasons("a:::b { t[arg0] = timestamp; } a:::c /t[arg0]/ { @ = sum(timestamp - t[arg0]); t[arg0] = 0; }")
    assert found == ["it does more than add up"] * 2


def test_a_start_that_keeps_more_is_interpreted() -> None:
    assert len(reasons(f"a:::b {{ self->t = timestamp; self->n = arg0; }} {END}")) == 2
