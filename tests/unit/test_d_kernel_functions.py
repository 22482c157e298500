"""What D means by arguments of kernel functions."""

from __future__ import annotations

import pytest

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.kernel_functions import descriptions, selector_of, with_results
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.text import text_of_clause


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "fbt::f:return /arg1 < 0/ { @[args[1]] = sum(arg1); }",
            "fbt::f:return /arg0 < 0/ { @[args[0]] = sum(arg0); }",
        ),
        ("fbt::f:return { self->arg1 = (arg1 ? arg1 : -1); }", "fbt::f:return { self->arg1 = (arg0 ? arg0 : -1); }"),
        ("fbt::f:entry { trace(arg1); }", "fbt::f:entry { trace(arg1); }"),
        ("fbt:m:f: { @ = count(); }", "fbt:m:f: { @ = count(); }"),
        ("fbt*::f:return { trace(arg0); }", "fbt*::f:return { trace(arg0); }"),
    ],
)
def test_results(text: str, meant: str) -> None:
    assert with_results(parse(text)) == parse(meant)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("fbt::f:return { trace(arg0); }", 23),
        ("fbt::f:return { trace(arg2); }", 23),
        ("fbt::f:return { trace(args[0]); }", 23),
        ("fbt::f: { trace(arg1); }", 17),
        ("fbt::f:return,fbt::f:entry { trace(arg1); }", 36),
        ("fbt::f:return,probe:::go { if (1) { trace(arg1); } }", 43),
    ],
)
def test_what_arguments_do_not_mean(text: str, column: int) -> None:
    with pytest.raises(DError) as caught:
        with_results(parse(text))
    assert caught.value.at.column == column


def test_functions_that_are_described() -> None:
    program = parse("fbt::vfs_*:entry,fbt:ext4::{} f*::a:b{} fbt:::return{}")
    assert [selector_of(each) for each in descriptions(program)] == ["vfs_*", "ext4:*", "*"]
    assert text_of_clause(program.clauses[1]).startswith("f*")
