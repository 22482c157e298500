"""How kernel functions and their values are named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.selectors import IndexStep, MemberStep, parse


def test_function_alone() -> None:
    selector = parse("vfs_read")
    assert (selector.name.text, selector.name.is_glob, selector.module, selector.values) == (
        "vfs_read",
        False,
        None,
        (),
    )
    assert selector.matches_module("any")


def test_module_and_globs() -> None:
    selector = parse(" nf_conntrack*:nf_ct_[a-g]* ")
    assert selector.matches_module("nf_conntrack_ftp")
    assert not selector.matches_module("vmlinux")
    assert [selector.name.matches(name) for name in ("nf_ct_get", "nf_ct_put")] == [True, False]


def test_values() -> None:
    first, second, third = parse("f(sk->a . b[0x10] ,return, c[7]->d)").values
    assert (first.root, first.text, first.column) == ("sk", "sk->a . b[0x10]", 2)
    assert first.steps == (MemberStep("a", True, 4), MemberStep("b", False, 8), IndexStep(16, 11))
    assert (second.root, second.steps, third.text) == ("return", (), "c[7]->d")


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 0, "a function is expected"),
        ("(a)", 0, "a function is expected"),
        ("f(", 2, "the name of an argument"),
        ("f()", 2, "the name of an argument"),
        ("f(a", 3, "after a value"),
        ("f(a,)", 4, "the name of an argument"),
        ("f(a b)", 4, "after a value"),
        ("f(a->)", 5, "after ->"),
        ("f(a.3)", 4, "after ."),
        ("f(a[b])", 4, "a number"),
        ("f(a[1)", 5, "] is expected"),
        ("f(a[-1])", 4, "a number"),
        ("f(a) g", 5, "nothing is expected"),
        ("f g", 2, "( or the end"),
        ("vfs_*(a)", 0, "a glob does not name"),
        (f"f({','.join('a' * 13)})", 26, "more than 12 values"),
        ("x" * 1025, 1024, "longer than 1024"),
    ],
)
def test_mistakes_are_told_with_their_column(text: str, column: int | None, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match="functions: ") as raised:
        parse(text)
    assert reason in raised.value.reason
    assert raised.value.column == column


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
STEPS = st.lists(
    st.one_of(
        NAMES.map("->{}".format),
        NAMES.map(".{}".format),
        st.integers(0, 1 << 20).map("[{}]".format),
    ),
    max_size=6,
).map("".join)
PATHS = st.tuples(NAMES, STEPS).map("".join)


@given(name=NAMES, paths=st.lists(PATHS, min_size=1, max_size=12), blanks=st.sampled_from(["", " ", "\t "]))
def test_what_is_written_is_read(name: str, paths: list[str], blanks: str) -> None:
    text = f"{name}{blanks}({blanks}{f'{blanks},{blanks}'.join(paths)}{blanks})"
    values = parse(text).values
    assert [value.text for value in values] == paths
    assert all(text[value.column :].startswith(value.text) for value in values)
    assert all(first.column < second.column for value in values for first, second in pairwise(value.steps))


@given(st.text(alphabet="ab_*:()[]0x1.,-> \n", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    column = wrong_column(text)
    assert column is None or 0 <= column <= len(text)


def wrong_column(text: str) -> int | None:
    """Return the column of the mistake; None if there is none."""
    try:
        parse(text)
    except InvalidArgumentError as error:
        return error.column
    return None
