"""Members in D are values of kernel functions, which come behind the functions' own arguments."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from stapsdtd.query.d.errors import DError, DSyntaxError
from stapsdtd.query.d.members import Function, has_members, values_of, with_values
from stapsdtd.query.d.nodes import Binary, Clause, Description, Integer, Member, Variable
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.text import text_of_clause

FUNCTIONS = [
    Function("vfs_read", ("file", "buf", "count", "pos"), ("file->f_pos", "return->x", "file->f_inode->i_ino")),
    Function("vfs_write", ("file", "buf", "count", "pos"), ("file->f_pos",)),
    Function("filp_close", ("filp", ""), ("filp->f_pos",)),
    Function("fput", ("file",), ("file->f_pos",), has_result=False),
    Function("wake_up_new_task", ("p",), ("p->comm", "p->pid"), ("p->comm",), has_result=False),
    Function("dget", ("entry",), ("return->d_name.name", "return->d_name.len")),
]


def find(description: Description) -> list[Function]:
    return [each for each in FUNCTIONS if fnmatchcase(each.name, description.function)]


def clause(text: str) -> Clause:
    (only,) = parse(text).clauses
    return only


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("args[0]->f_pos", "->f_pos"),
        ("args[0] -> f_path . dentry->d_name\n.name", "->f_path.dentry->d_name.name"),
        ("args[0]->cb[3]", "->cb[3]"),
        ("args[0]->a[ 3 ][4].b", "->a[3][4].b"),
        ("args[0].f_pos", ".f_pos"),
    ],
)
def test_syntax(text: str, path: str) -> None:
    (given,) = clause(f"fbt::f:entry {{ {text}; }}").statements or ()
    assert given == Member(Variable("args", keys=(Integer(0),)), path)
    assert text_of_clause(clause(f"fbt::f:entry {{ {text}; }}")).endswith(f"{{ args[0]{path}; }}")


def test_precedence() -> None:
    (given,) = clause("fbt::f:entry { -args[0]->x - args[1]->y; }").statements or ()
    assert isinstance(given, Binary)
    assert given.operator == "-"
    assert isinstance(given.right, Member)


@pytest.mark.parametrize("text", ["args[0]->", "args[0]->3", "args[0]->x[y]", "args[0]->x[1"])
def test_what_is_no_member(text: str) -> None:
    with pytest.raises(DSyntaxError):
        parse(f"fbt::f:entry {{ {text}; }}")


@pytest.mark.parametrize("text", ["arg0->x", "x->y", "self->x->y"])
def test_what_has_no_members(text: str) -> None:
    with pytest.raises(DError) as caught:
        parse(f"fbt::f:entry {{ {text}; }}")
    assert "only args[] of kernel functions have members, such as args[0]->f_pos" in caught.value.reason


@pytest.mark.parametrize(
    ("text", "values", "meant"),
    [
        (
            "fbt::vfs_read:entry /args[0]->f_pos > 5/ { @[args[0]->f_inode->i_ino] = sum(arg2); }",
            ["file->f_pos", "file->f_inode->i_ino"],
            "fbt::vfs_read:entry /args[4] > 5/ { @[args[5]] = sum(arg2); }",
        ),
        (
            "fbt::vfs_read:entry, fbt::vfs_write:entry { trace(args[0]->f_pos); }",
            ["file->f_pos", "file->f_pos"],
            "fbt::vfs_read:entry, fbt::vfs_write:entry { trace(args[4]); }",
        ),
        ("fbt::fput:entry { self->x = args[0]->f_pos; }", ["file->f_pos"], "fbt::fput:entry { self->x = args[1]; }"),
        (
            'fbt::dget:return { printf("%s %d", stringof(args[1]->d_name.name), args[1]->d_name.len); }',
            ["return->d_name.name", "return->d_name.len"],
            'fbt::dget:return { printf("%s %d", copyinstr(args[1]), args[2]); }',
        ),
        # an array of char is a string, also without stringof
        (
            'fbt::wake_up_new_task:entry /args[0]->comm == "x"/ { @[stringof(args[0]->comm), args[0]->pid] = sum(1); }',
            ["p->comm", "p->comm", "p->pid"],
            'fbt::wake_up_new_task:entry /copyinstr(args[1]) == "x"/ { @[copyinstr(args[1]), args[2]] = sum(1); }',
        ),
        # whatever else there is of strings stays
        (
            "fbt::vfs_read:entry { trace(stringof(args[1])); trace(args[0]->f_pos); }",
            ["file->f_pos"],
            "fbt::vfs_read:entry { trace(stringof(args[1])); trace(args[4]); }",
        ),
    ],
)
def test_members_are_values(text: str, values: list[str], meant: str) -> None:
    given = clause(text)
    assert has_members(given)
    assert [value for _, value in values_of(given, find)] == values
    assert with_values(given, find) == clause(meant)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("fbt::vfs_read:return { trace(args[0]->f_pos); }", 30, "only the result is available: args[1]"),
        ("fbt::vfs_read: { trace(args[0]->f_pos); }", 24, "use a separate clause"),
        ("fbt::vfs_read:entry { trace(args[4]->f_pos); }", 29, "vfs_read has no argument 4"),
        ("fbt::filp_close:entry { trace(args[1]->x); }", 31, "filp_close has no argument 1 with a name"),
        ("fbt::vfs_read:entry { trace(args[arg0]->f_pos); }", 29, "only args[N] has members"),
        ("fbt::vfs_read:entry { trace(x[0]->f_pos); }", 29, "only args[N] has members"),
    ],
)
def test_what_members_are_not_of(text: str, column: int, reason: str) -> None:
    with pytest.raises(DError) as caught:
        list(values_of(clause(text), find))
    assert reason in caught.value.reason
    assert caught.value.at.column == column


def test_functions_with_other_arguments_need_a_clause_of_their_own() -> None:
    given = clause("fbt::vfs_read:entry, fbt::fput:entry { trace(args[0]->f_pos); }")
    with pytest.raises(DError, match="different arguments"):
        with_values(given, find)


def test_members_of_probes_are_left_to_the_checker() -> None:
    assert not has_members(clause("fbt::vfs_read:entry, app:::go { trace(args[0]->f_pos); }"))
    assert not has_members(clause("fbt::vfs_read:entry { trace(args[0]); }"))
