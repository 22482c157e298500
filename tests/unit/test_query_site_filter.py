from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from stapsdtd.model import Argument, Capture, Site, SiteCapture, Unavailable
from stapsdtd.query import compile as compile_module
from stapsdtd.query.compile import MAX_OPERATIONS, TOO_LONG, operations
from stapsdtd.query.emitter import Emitter
from stapsdtd.query.expression import Condition
from stapsdtd.query.parse import parse
from stapsdtd.query.site_filter import SiteFilter, evaluated_late
from stapsdtd.query.text import text_of
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import RDI, argument, captured, site

FLOAT = Argument("8@%xmm0", 8, signed=True, is_float=True, operand=RDI)
LATE = "engines test and calculate integers, no strings, bytes or floating-point numbers"
LONG = " + ".join(["arg0"] * MAX_OPERATIONS)


def where(text: str) -> Condition:
    return parse(text, lambda _: None)


def text(condition: Condition | None) -> str | None:
    return None if condition is None else text_of(condition)


def two(*captures: Capture) -> SiteCapture:
    return captured(site(arguments=[argument(), argument()]), *captures)


def late_at(condition: Condition | None, sites: Sequence[Site]) -> dict[Condition, str]:
    return finish(evaluated_late(condition, sites))


@pytest.mark.parametrize(
    ("whole", "tested", "evaluated"),
    [
        ("arg0 == 1 && pid == 7", "(arg0 == 1) && (pid == 7)", None),
        ("arg0 + 1 == 1", "(arg0 + 1) == 1", None),
        ("arg0 + 0.5 == 1", None, "(arg0 + 0.5) == 1"),
        ("arg0 == 1 && str(arg1) == 'a'", "arg0 == 1", 'str(arg1) == "a"'),
        ("(str(arg1) ~ 'a' && arg0 == 1) && (pid == 7 && execname ~ 'b')", "(arg0 == 1) && (pid == 7)",
         '(str(arg1) ~ "a") && (execname ~ "b")'),
        ("arg0 == 1 || execname ~ 'a'", None, '(arg0 == 1) || (execname ~ "a")'),
        ("arg0 == 1 || elapsed / 1000 > arg1", "(arg0 == 1) || ((elapsed / 1000) > arg1)", None),
        ("elapsed > 5ms && execname ~ 'b'", "elapsed > 5000000", 'execname ~ "b"'),
    ],
)  # fmt: skip
def test_each_part_is_tested_where_that_is_possible(whole: str, tested: str | None, evaluated: str | None) -> None:
    found = SiteFilter.of(where(whole), two())
    assert (text(found.tested), text(found.evaluated)) == (tested, evaluated)


def test_nothing_is_tested_where_no_engine_makes_what_is_filtered() -> None:
    found = SiteFilter.of(where("elapsed > 5 && arg0 == 1"), two(), in_engine=False)
    assert (text(found.tested), text(found.evaluated)) == (None, "(elapsed > 5) && (arg0 == 1)")


def test_what_engines_tested_before_they_test_as_it_is() -> None:
    condition = where("(arg0 == 1 && pid == 7) && uid == 0")
    assert SiteFilter.of(condition, two()).tested is condition


def test_what_takes_too_many_operations_is_late_at() -> None:
    """Those of all parts count together, from left to right."""
    longest = where(f"{LONG} == 1")
    assert operations(longest) == MAX_OPERATIONS
    assert SiteFilter.of(longest, two()).evaluated is None
    whole = where(f"arg1 == 1 && {LONG} == 1 && arg0 < arg1 && pid == 7")
    found = SiteFilter.of(whole, two())
    assert (found.tested, text(found.evaluated)) == (where(f"arg1 == 1 && {LONG} == 1 && pid == 7"), "arg0 < arg1")
    assert late_at(whole, []) == {where("arg0 < arg1"): TOO_LONG}


def test_captures_of_the_filter_follow_those_of_the_client() -> None:
    found = SiteFilter.of(where('str(arg1, 4) == "a" && arg0 * 0.5 == 3 && arg0 == 5'), two(Capture(1)))
    assert found.captures == (Capture(1), Capture(1, is_string=True, max_bytes=4), Capture(0))
    assert found.width == 1
    nothing = SiteFilter.of(None, two(Capture(1)))
    assert (nothing.captures, nothing.tested, nothing.evaluated) == ((Capture(1),), None, None)


def test_floating_point_arguments_are_evaluated_late_where_they_are() -> None:
    float_site = site(arguments=[FLOAT, argument()])
    condition = where("arg0 > 1 && arg1 == 2")
    found = SiteFilter.of(condition, captured(float_site, Capture(1)))
    assert (text(found.tested), text(found.evaluated)) == ("arg1 == 2", "arg0 > 1")
    assert late_at(condition, [two().site]) == {}
    assert late_at(condition, [two().site, float_site]) == {
        where("arg0 > 1"): "cannot filter by arg0: 8@%xmm0 is a floating-point number"
    }


def test_what_is_evaluated_late_is_told_with_the_reason() -> None:
    assert late_at(None, []) == {}
    assert late_at(where("arg0 == 1 && cpu < arg1 * 0.5 && arg1 & arg0 && execname ~ 'a'"), []) == {
        where("cpu < arg1 * 0.5"): LATE, where("execname ~ 'a'"): LATE,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        ("arg2 == 1", None),  # the engine's to refuse
        ("arg2 + 1 == 1", None),
        ("arg2 + 0.5 == 1", "it has 2 arguments, so there is no arg2"),
        ("str(arg1) == 'a'", "cannot filter by str(arg1): not a pointer"),
        ("arg1 + 0 == 1 && uid + 0.5 == 1", "cannot filter by uid: unknown"),
    ],
)
def test_why_not(whole: str, reason: str | None) -> None:
    reasons = {"uid": "unknown", 1: "not a pointer"}
    found = SiteFilter.of(where(whole), two(Capture(1)))
    asked = found.why_not(lambda capture, _: reasons[capture.subject])
    assert asked == reason


def test_argument_that_nobody_can_read_is_left_to_the_engine() -> None:
    unreadable: Site = site(arguments=[replace(argument(), operand=Unavailable("no way"))])
    found = SiteFilter.of(where("arg0 == 1"), captured(unreadable))
    assert (text(found.tested), found.evaluated) == ("arg0 == 1", None)


def test_a_filter_is_compiled_once_for_all_sites_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[tuple[Argument, ...]]()

    def emitter(arguments: tuple[Argument, ...]) -> Emitter:
        compiled.append(arguments)
        return Emitter(arguments)

    monkeypatch.setattr(compile_module, "Emitter", emitter)
    whole = "arg0 + arg1 == 4711 && arg0 - arg1 == 4712 && str(arg1) == 'a'"
    sites = [site(provider=f"p{number}", arguments=[argument(), argument()]) for number in range(3)]
    for at in sites:
        # each clause has one of its own
        assert SiteFilter.of(where(whole), captured(at)).evaluated == where("str(arg1) == 'a'")
        assert list(late_at(where(whole), [at])) == [where("str(arg1) == 'a'")]
    assert len(compiled) == 2


def test_looking_for_what_is_evaluated_late_gives_way() -> None:
    """Names are compared at each of the sites."""
    sites = [site(provider=f"p{number}") for number in range(2_000)]
    names = " || ".join(f"provider == 'q{number}'" for number in range(60))
    assert len(list(evaluated_late(where(names), sites))) > 10


def test_what_is_kept_of_a_filter_is_not_another_ones() -> None:
    for whole, is_tested in (("arg0 + 4711 == arg1", True), ("arg0 + 4711.0 == arg1", False)):
        assert (SiteFilter.of(where(whole), two()).evaluated is None) is is_tested
