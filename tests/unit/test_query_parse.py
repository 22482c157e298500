from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Expression, Field, Not, Operator, Or
from stapsdtd.query.parse import MAX_DEPTH, MAX_LENGTH, parse
from stapsdtd.query.program import MAX_TESTS
from tests.unit.queries import expressions, text_of

ARG0, ARG1 = ArgumentValue(0), ArgumentValue(1)
EQ, NE, LT, LE, GT, GE = Operator
PID_IS_1 = Comparison(Field.PID, EQ, 1)
PLACE = CgroupInfo(4711, 1)


def find_cgroup(path: str) -> CgroupInfo | None:
    return PLACE if path == "/system.slice" else None


def parsed(text: str) -> Expression:
    return parse(text, find_cgroup)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arg0", Comparison(ARG0, NE, 0)),
        ("pid", Comparison(Field.PID, NE, 0)),
        ("arg0 & 4", Comparison(ARG0, NE, 0, 4)),
        ("4 & arg0", Comparison(ARG0, NE, 0, 4)),
        ("arg0 & 0xff == 3", Comparison(ARG0, EQ, 3, 0xFF)),
        ("(arg0 & 0xff) == 3", Comparison(ARG0, EQ, 3, 0xFF)),
        ("((3)) == ((arg0) & (0xff))", Comparison(ARG0, EQ, 3, 0xFF)),
        ("arg0 & 0xff & 0x3c != 0", Comparison(ARG0, NE, 0, 0x3C)),
        ("arg0 & -8 == 16", Comparison(ARG0, EQ, 16, (1 << 64) - 8)),
        ("100 < arg1", Comparison(ARG1, GT, 100)),
        ("100 >= arg1", Comparison(ARG1, LE, 100)),
        ("7 == tid", Comparison(Field.TID, EQ, 7)),
        ("uid!=-1", Comparison(Field.UID, NE, -1)),
        ("gid<=0x10", Comparison(Field.GID, LE, 16)),
        ("arg12 == 0o17", Comparison(ArgumentValue(12), EQ, 15)),
        ("arg007 == 017", Comparison(ArgumentValue(7), EQ, 15)),
        ("arg0 == 00", Comparison(ARG0, EQ, 0)),
        ("arg0 == 18446744073709551615", Comparison(ARG0, EQ, (1 << 64) - 1)),
        ("arg0 == -9223372036854775808", Comparison(ARG0, EQ, -(1 << 63))),
        ('execname == "psql"', Comparison(Field.EXECNAME, EQ, b"psql")),
        ("comm != 'a\"b'", Comparison(Field.EXECNAME, NE, b'a"b')),
        ("'psql' == execname", Comparison(Field.EXECNAME, EQ, b"psql")),
        (r'execname == "\"\\\'\n\t\xff"', Comparison(Field.EXECNAME, EQ, b"\"\\'\n\t\xff")),
        ("execname == '☃'", Comparison(Field.EXECNAME, EQ, "☃".encode())),
        ("execname == ''", Comparison(Field.EXECNAME, EQ, b"")),
        ('cgroup == "/system.slice"', Comparison(Field.CGROUP, EQ, Cgroup("/system.slice", 4711, 1))),
        ("!pid", Not(Comparison(Field.PID, NE, 0))),
        ("!!pid", Comparison(Field.PID, NE, 0)),
        ("!arg0 == 1", Not(Comparison(ARG0, EQ, 1))),
        ("!arg0 & 4", Not(Comparison(ARG0, NE, 0, 4))),
        ("arg0 && arg1 && pid == 1", And((Comparison(ARG0, NE, 0), Comparison(ARG1, NE, 0), PID_IS_1))),
        ("arg0 || arg1 && pid == 1", Or((Comparison(ARG0, NE, 0), And((Comparison(ARG1, NE, 0), PID_IS_1))))),
        ("(arg0 || arg1) && pid == 1", And((Or((Comparison(ARG0, NE, 0), Comparison(ARG1, NE, 0))), PID_IS_1))),
        ("  pid\n==\t1  ", PID_IS_1),
        ("(" * 2000 + "pid == 1" + ")" * 2000, PID_IS_1),
        ("!" * 4000 + "pid == 1", PID_IS_1),
    ],
)
def test_expressions(text: str, expected: Expression) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 0, "it ends where a name"),
        ("arg0 ==", 7, "it ends where a name"),
        ("arg0 &&  ", 9, "it ends where a name"),
        ("(arg0", 5, "it ends before a parenthesis is closed"),
        ("arg0 == 1)", 9, "there is no parenthesis that this one closes"),
        ("()", 1, "')' stands where a name"),
        ("arg0 == == 1", 8, "'==' stands where a name"),
        ("arg0 == 3 4", 10, "'4' stands where an operator"),
        ("arg0 = 1", 5, "'=' cannot stand here; write =="),
        ("arg0 | arg1", 5, "write ||"),
        ("arg0 and arg1", 5, "write &&"),
        ("arg0 or arg1", 5, "write ||"),
        ("arg0 && not arg1", 8, "'not' cannot stand here; write !"),
        ("arg0 + 1", 5, "'+' cannot stand here"),
        ("é", 0, "'é' cannot stand here"),
        ("pid == \0", 7, "'\\x00' cannot stand here"),
        ('execname == "psql', 12, "the string that begins here does not end"),
        ("execname == 'psql\\'", 12, "the string that begins here does not end"),
        (
            "execname == psql",
            12,
            "'psql' is not known; there are arg0, arg1, …, pid, tid, uid, gid, execname and cgroup, and strings",
        ),
        ("arg == 1", 0, "'arg' is not known"),
        ("arg1000", 0, "'arg1000' is not known"),
        ("pid == 1 && " + "x" * 1000, 12, f"'{'x' * 40}…' is not known"),
        ("pid == 12ab", 7, "'12ab' is no number; write 255, 0xff or 0o377"),
        ("pid == 09", 7, "'09' is no number"),
        ("pid == 0x", 7, "'0x' is no number"),
        ("arg0 > 18446744073709551616", 7, "does not fit into 64 bits"),
        ("arg0 > -9223372036854775809", 7, "does not fit into 64 bits"),
        ("arg0 > " + "9" * 4000, 7, "does not fit into 64 bits"),
        ("1 < arg0 < 5", 9, "condition already; combine conditions with &&"),
        ("arg0 == (pid == 3)", 9, "condition already"),
        ("(pid == 3) & 4", 11, "& takes bits of a number, as in arg0 & 0x40; conditions are combined with &&"),
        ("arg0 & arg1", 5, "& takes bits"),
        ("3 & 4", 2, "& takes bits"),
        ("execname & 4", 0, "execname is a string, which has no bits"),
        ("arg0 == arg1", 8, "arg1 cannot be compared with arg0, only with a constant"),
        ("3 == 4", 0, "neither side"),
        ("pid && 5", 7, "this alone says nothing"),
        ("pid || 'a'", 7, "this alone says nothing"),
        ("pid || execname", 7, 'execname alone says nothing; write execname == "…"'),
        ("execname < 'a'", 9, "strings are compared with == and != only, not with <"),
        ("'a' >= execname", 4, "strings are compared with == and != only"),
        ("execname == 5", 12, "execname is a string"),
        ("arg0 == 'a'", 8, "arg0 is a number, and cannot be compared with a string"),
        ("execname == 'abcdefghijklmnop'", 12, 'has 16; write "abcdefghijklmno"'),
        ("execname == '☃☃☃☃☃☃'", 12, "has 18"),
        (r"execname == 'a\x00b'", 12, "no NUL"),
        (r"execname == 'ab\q'", 15, r"'\\q' is no escape"),
        (r"execname == 'ab\xg0'", 15, r"'\\x' is no escape"),
        ("cgroup == '/nobody'", 10, "there is no cgroup '/nobody'"),
        ("cgroup == '/a' && pid == 'b'", 10, "there is no cgroup"),
        ("pid || " * MAX_TESTS + "tid", 7 * MAX_TESTS, "one comparison more than the 64"),
    ],
)
def test_errors_name_the_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parsed(text)
    assert reason in raised.value.reason
    assert (raised.value.field, raised.value.column, raised.value.text) == ("where", column, text)


def test_text_may_not_be_too_long() -> None:
    assert parsed("pid == 1".ljust(MAX_LENGTH)) == PID_IS_1
    with pytest.raises(InvalidArgumentError, match="at most 4096 characters, this one 4097"):
        parsed("pid == 1".ljust(MAX_LENGTH + 1))


def nested(depth: int) -> str:
    text = "pid"
    for level in range(depth):
        text = f"({'uid' if level % 2 else 'tid'} {'&&' if level % 2 else '||'} {text})"
    return text


def test_conditions_may_not_be_nested_too_deep() -> None:
    parsed(nested(MAX_DEPTH))
    with pytest.raises(InvalidArgumentError, match="nested more than 32 deep") as raised:
        parsed(nested(MAX_DEPTH + 1))
    assert raised.value.column is not None
    with pytest.raises(InvalidArgumentError, match="nested more than 32 deep"):
        parsed(nested(300))


def test_field_is_named_in_the_error() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^filter: .* stands where"):
        parse("1 1", find_cgroup, "filter")


@given(expressions())
def test_what_is_written_out_is_read_back(expression: Expression) -> None:
    assert parsed(text_of(expression)) == expression


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(
            st.sampled_from(["arg0", "pid", "execname", "cgroup", "(", ")", "!", "&&", "||", "&", "==", "<", "5", "-1",
                             "0x1f", '"a"', "'/system.slice'", " ", "'", "\\"]),
            max_size=40,
        ).map(" ".join),
    )
)  # fmt: skip
def test_any_text_is_an_expression_or_an_error_with_a_column(text: str) -> None:
    problem: InvalidArgumentError | None = None
    try:
        parsed(text)
    except InvalidArgumentError as error:
        problem = error
    if problem is not None:
        assert problem.column is not None
        assert 0 <= problem.column <= len(text)
        assert len(problem.reason) < 300
