"""What `stapsdt kernel trace` understands."""

from __future__ import annotations

import click
import pytest

from stapsdtd.cli.function_selectors import functions_of
from stapsdtd.cli.kernel_selectors import TracedFunction, TracedValue, parse


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("vfs_read", "vfs_read", None),
        ("nf_conntrack:nf_ct_*", "nf_conntrack:nf_ct_*", None),
        ("f(a)", "f", (TracedValue("a"),)),
        ("f( a -> b [ 3 ] . c , return )", "f", (TracedValue("a->b[3].c"), TracedValue("return"))),
        ("f(a > 5, b->c != 0x10, return < 0)", "f",
         (TracedValue("a", test="> 5"), TracedValue("b->c", test="!= 0x10"), TracedValue("return", test="< 0"))),
        ('f(str(a->name) == "x, (y")', "f", (TracedValue("a->name", is_string=True, test='== "x, (y"'),)),
        ("f(ntohs(a->port) == 443, htonl( b ))", "f",
         (TracedValue("a->port", test="== 443", turned="ntohs"), TracedValue("b", turned="htonl"))),
        ("f(a & 0x40 == 0x40, b)", "f", (TracedValue("a", test="& 0x40 == 0x40"), TracedValue("b"))),
        ("f(a->b >= (1 << 3))", "f", (TracedValue("a->b", test=">= (1 << 3)"),)),
    ],
)  # fmt: skip
def test_functions_and_values(text: str, name: str, values: tuple[TracedValue, ...] | None) -> None:
    assert parse(text) == TracedFunction(text, name, values)


def test_values_of_the_return() -> None:
    function = parse("f(a, return, return->b, returned)")
    assert [each.is_of_return for each in function.values or ()] == [False, True, True, False]


@pytest.mark.parametrize("text", ["", "f(", "f(a", "f(a,)", "f(5)", "f(a b)", "f(str(a)", "f(a) b", "f g"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"write FUNCTION|is no value"):
        parse(text)


def test_functions_of_selectors() -> None:
    selectors = [
        "fbt:vmlinux:vfs_read:entry(arg0)",
        "fbt:vmlinux:vfs_read:return",
        "fbt::vfs_*:entry",
        "fbt:ext4::entry",
    ]
    assert functions_of(selectors) == ("vmlinux:vfs_read", "vfs_*", "ext4:*")
    assert functions_of(["postgresql:query__start", "fbt:entry", "a:fbt:b:c"]) == ()
