"""What sites decide of a filter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.model import FileOffset, Site
from stapsdtd.query import parse as query
from stapsdtd.query.at_site import NEVER, at_site
from stapsdtd.query.expression import And, Condition, Not, Or

SITE = Site("app", "entry", FileOffset(0), None, "work", (), 1)


def parsed(text: str) -> Condition:
    return query.parse(text, lambda _: None)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('name == "entry"', None),
        ('name != "entry"', NEVER),
        ('name ~ "en*" && pid == 1', parsed("pid == 1")),
        ('name == "return" || pid == 1', parsed("pid == 1")),
        ('function != "work" || name != "entry" || (arg7 > 5)', parsed("arg7 > 5")),
        ('function != "other" || arg7 > 5', None),
        ('provider == "app" && !(function == "work")', NEVER),
        # it may be unavailable, and the whole with it
        ('arg7 > 5 || name == "entry"', parsed('arg7 > 5 || name == "entry"')),
        ('arg7 > 5 && name == "return" && arg8 > 1', parsed('arg7 > 5 && name == "return"')),
        # of which module it is, a site does not know
        ('module == "app"', parsed('module == "app"')),
        ("pid == 1 || tid == 2", parsed("pid == 1 || tid == 2")),
    ],
)
def test_what_is_left(text: str, left: Condition | None) -> None:
    assert at_site(parsed(text), SITE) == left


def conditions() -> st.SearchStrategy[Condition]:
    leaves = st.sampled_from(['name == "entry"', 'name == "return"', "pid == 1", "tid == 2"]).map(parsed)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            inner.map(Not),
            st.lists(inner, min_size=2, max_size=3).map(tuple).map(And),
            st.lists(inner, min_size=2, max_size=3).map(tuple).map(Or),
        ),
    )


@given(conditions(), st.booleans(), st.booleans())
def test_the_same_hits_are_accepted(condition: Condition, is_1: bool, is_2: bool) -> None:
    truths = {
        parsed('name == "entry"'): True, parsed('name == "return"'): False, parsed("pid == 1"): is_1,
        parsed("tid == 2"): is_2, NEVER: False,
    }  # fmt: skip

    def truth(each: Condition) -> bool:
        match each:
            case Not(operand):
                return not truth(operand)
            case And(operands):
                return all(map(truth, operands))
            case Or(operands):
                return any(map(truth, operands))
            case _:
                return truths[each]

    left = at_site(condition, SITE)
    assert (left is None or truth(left)) == truth(condition)
