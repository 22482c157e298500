from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.compile import MAX_TESTS
from stapsdtd.query.expression import (
    And,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Condition,
    Conditional,
    Field,
    Literal,
    Matched,
    Not,
    Operator,
    Or,
    StringAt,
    walk,
)
from stapsdtd.query.parse import MAX_LENGTH, parse
from stapsdtd.query.text import text_of as text_of_any
from stapsdtd.query.tree_builder import MAX_DEPTH
from tests.unit.queries import expressions, text_of

ARG0, ARG1 = ArgumentValue(0), ArgumentValue(1)
EQ, NE, LT, LE, GT, GE = Operator
ADD = Arithmetic.ADD
PID_IS_1 = Comparison(Field.PID, EQ, 1)
PLACE = CgroupInfo(4711, 1)


def find_cgroup(path: str) -> CgroupInfo | None:
    return PLACE if path == "/system.slice" else None


def parsed(text: str) -> Condition:
    return parse(text, find_cgroup)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arg0", Comparison(ARG0, NE, 0)),
        ("arg0 > 5ms", Comparison(ARG0, GT, 5_000_000)),
        ("arg0 > 2s || arg0 < 250us", Or((Comparison(ARG0, GT, 2_000_000_000), Comparison(ARG0, LT, 250_000)))),
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
        ("arg0 > 10 * 1000 * 1000", Comparison(ARG0, GT, 10_000_000)),
        ("arg0 & 1 << 6", Comparison(ARG0, NE, 0, 0x40)),
        ("- 5 < arg0", Comparison(ARG0, GT, -5)),
        ("arg0 + arg1 > 5", Compared(GT, Calculation(ADD, ARG0, ARG1), Literal(5))),
        ("arg0 == arg1", Compared(EQ, ARG0, ARG1)),
        ("arg0 | arg1", Compared(NE, Calculation(Arithmetic.OR, ARG0, ARG1), Literal(0))),
        ("5 > arg0 - 1", Compared(LT, Calculation(Arithmetic.SUBTRACT, ARG0, Literal(1)), Literal(5))),
        ("arg0 > 0.5", Compared(GT, ARG0, Literal(0.5))),
        ("ntohs(arg0) == 443", Compared(EQ, Calculation(Arithmetic.SWAP, ARG0, Literal(48)), Literal(443))),
        ("ntohl(arg0)", Compared(NE, Calculation(Arithmetic.SWAP, ARG0, Literal(32)), Literal(0))),
        ("htonll(arg0)", Compared(NE, Calculation(Arithmetic.SWAP, ARG0, Literal(0)), Literal(0))),
        ("arg0 == htons(443)", Comparison(ARG0, EQ, 0xBB01)),
        ("cpu == 1", Compared(EQ, Field.CPU, Literal(1))),
        ("provider == 'a'", Compared(EQ, Field.PROVIDER, Literal(b"a"))),
        ("str(arg0) ~ 'a*'", Matched(StringAt(ARG0), b"a*")),
        ("!str(arg0, arg1) ~ 'a*'", Not(Matched(StringAt(ARG0, ARG1), b"a*"))),
        ("buf(arg0, 2 * 2) == 'a\\x00bc'", Compared(EQ, BytesAt(ARG0, 4), Literal(b"a\0bc"))),
        ("'ab' != buf(arg0, 2)", Compared(NE, BytesAt(ARG0, 2), Literal(b"ab"))),
        ("buf(arg0, 8) == buf(arg1, 8)", Compared(EQ, BytesAt(ARG0, 8), BytesAt(ARG1, 8))),
        ("buf(arg0, 4096) ~ 'a*'", Matched(BytesAt(ARG0, 4096), b"a*")),
        ("arg0 ? pid == 1 : pid == 1", Conditional(Comparison(ARG0, NE, 0), PID_IS_1, PID_IS_1)),
        (
            "pid == 1 ? 1 : arg0 ? 2 : arg1",
            Compared(
                NE,
                Conditional(PID_IS_1, Literal(1), Conditional(Comparison(ARG0, NE, 0), Literal(2), ARG1)),
                Literal(0),
            ),
        ),
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
        ("(" * 700 + "pid == 1" + ")" * 700, PID_IS_1),
        ("!" * 1400 + "pid == 1", PID_IS_1),
    ],
)
def test_expressions(text: str, expected: Condition) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 0, "unexpected end; expected a name"),
        ("arg0 ==", 7, "unexpected end; expected a name"),
        ("arg0 &&  ", 9, "unexpected end; expected a name"),
        ("(arg0", 5, "missing closing parenthesis"),
        ("arg0 == 1)", 9, "unmatched closing parenthesis"),
        ("()", 1, "unexpected ')'; expected a name"),
        ("arg0 == == 1", 8, "unexpected '=='; expected a name"),
        ("arg0 == 3 4", 10, "unexpected '4'; expected an operator"),
        ("arg0 = 1", 5, "unexpected '='; write =="),
        ("arg0 and arg1", 5, "write &&"),
        ("arg0 or arg1", 5, "write ||"),
        ("arg0 && not arg1", 8, "unexpected 'not'; write !"),
        ("arg0 = 1 + 1", 5, "unexpected '='; write =="),
        ("arg0 + ", 7, "unexpected end; expected a name"),
        ("arg0 ? 1", 8, "? needs a :"),
        ("é", 0, "unexpected 'é'"),
        ("pid == \0", 7, "unexpected '\\x00'"),
        ('execname == "psql', 12, "unterminated string"),
        ("execname == 'psql\\'", 12, "unterminated string"),
        (
            "execname == psql",
            12,
            "unknown name 'psql'; the names are arg0, arg1, …, pid, tid, uid, gid, execname, cgroup, ",
        ),
        ("arg == 1", 0, "unknown name 'arg'"),
        ("arg1000", 0, "unknown name 'arg1000'"),
        ("pid == 1 && " + "x" * 1000, 12, f"unknown name '{'x' * 40}…'"),
        ("pid == 12ab", 7, "'12ab' is not a number; write 255, 0xff, 0o377 or, for a duration, 5ms"),
        ("arg0 > 5m", 7, "'5m' is not a number"),
        ("arg0 > 0xffms", 7, "'0xffms' is not a number"),
        ("arg0 > 20000000000s", 7, "'20000000000s' does not fit into 64 bits"),
        ("pid == 09", 7, "'09' is not a number"),
        ("pid == 0x", 7, "'0x' is not a number"),
        ("arg0 > 18446744073709551616", 7, "does not fit into 64 bits"),
        ("arg0 > -9223372036854775809", 7, "does not fit into 64 bits"),
        ("arg0 > " + "9" * 4000, 7, "does not fit into 64 bits"),
        ("1 < arg0 < 5", 9, "already a condition; combine conditions with &&"),
        ("arg0 == (pid == 3)", 9, "already a condition"),
        ("(pid == 3) & 4", 11, "& selects bits of a number, as in arg0 & 0x40; combine conditions with &&"),
        ("3 & 4", 0, "a constant is not a condition"),
        ("1 + (pid == 3)", 5, "+ takes numbers, not conditions"),
        ("execname + 4", 0, "execname is a string; + takes numbers"),
        ("5 * 'a'", 4, "this is a string; * takes numbers"),
        ("arg0 % 1.5", 7, "% takes integers"),
        ("arg0 / (2 - 2)", 8, "division by 0"),
        ("7 % 0.0 == arg0", 4, "% takes integers"),
        ("arg0 == 7 % 0", 12, "division by 0"),
        ("arg0 > 1.", 8, "unexpected '.'"),
        ("arg0 > 0x1.5", 7, "'0x1.5' is not a number"),
        ("arg0 ? 1 : 'a'", 11, "this is a string, and what ? chooses else a number"),
        ("arg0 ? 'a' : pid == 1", 13, "this is a condition, and what ? chooses else a string"),
        ("str(arg0)", 0, 'str(arg0) is not a condition; write str(arg0) == "…"'),
        ("str(arg0 + 1) == 'a'", 0, "str takes an argument of the probe, and a length"),
        ("str(arg0, 'a') == 'a'", 0, "str takes an argument of the probe, and a length"),
        ("str() == 'a'", 0, "str takes an argument of the probe, and a length"),
        ("str(arg0, 0) == 'a'", 10, "str takes a length of 1 to 4096 bytes"),
        ("str(arg0, 4097) == 'a'", 10, "str takes a length of 1 to 4096 bytes"),
        ("buf(arg0) == 'a'", 0, "buf takes an argument of the probe, and a length: buf(arg0, 16)"),
        ("buf(arg0 + 1, 4) == 'a'", 0, "buf takes an argument of the probe, and a length"),
        ("buf(arg0, arg1) == 'a'", 10, "buf takes a constant length of 1 to 4096 bytes"),
        ("buf(arg0, 0) == ''", 10, "buf takes a constant length of 1 to 4096 bytes"),
        ("buf(arg0, 4097) == ''", 10, "buf takes a constant length of 1 to 4096 bytes"),
        ("buf(arg0, 4)", 0, 'buf(arg0, 4) is not a condition; write buf(arg0, 4) == "…"'),
        ("pid == 1 && buf(arg0, 4) == 'abc'", 28, "buf(arg0, 4) has 4 bytes and this 3; they are never equal"),
        ("buf(arg0, 4) == buf(arg1, 8)", 16, "buf(arg0, 4) has 4 bytes and buf(arg1, 8) 8; they are never equal"),
        ("buf(arg0, 4) == arg1", 16, 'buf(arg0, 4) is bytes; write buf(arg0, 4) == "…"'),
        ("1 == buf(arg0, 4)", 0, 'buf(arg0, 4) is bytes; write buf(arg0, 4) == "…"'),
        ("buf(arg0, 4) == str(arg1)", 16, "buf(arg0, 4) is bytes and str(arg1) is a string; bytes are compared with"),
        ("execname == buf(arg0, 4)", 12, "execname is a string and buf(arg0, 4) is bytes; bytes are compared with"),
        ("buf(arg0, 4) < 'abcd'", 13, "strings and bytes support only == and !=, not <"),
        ("buf(arg0, 4) + 1 == 2", 0, "buf(arg0, 4) is bytes; + takes numbers"),
        ("(arg0 ? buf(arg1, 4) : 'abcd') == 'abcd'", 23, "this is a string, and what ? chooses else bytes"),
        ("ntohs() == 1", 0, "ntohs takes a number: ntohs(arg0)"),
        ("ntohl(arg0, 4) == 1", 0, "ntohl takes a number: ntohl(arg0)"),
        ("ntohl(execname) == 1", 6, "execname is a string; ntohl takes numbers"),
        ("ntohl(pid == 1) == 1", 6, "this is a condition; ntohl takes numbers"),
        ("ntohl(0.5) == arg0", 6, "ntohl takes integers"),
        ("strlen(arg0) == 1", 0, "unknown function 'strlen'; there are str(arg0)"),
        ("str(arg0) < 'a'", 10, "strings and bytes support only == and !=, not <"),
        ("str(arg0) == arg1", 13, 'str(arg0) is a string; write str(arg0) == "…"'),
        ("arg0 ~ 'a*'", 5, "~ compares a string with a glob"),
        ("str(arg0) ~ arg1", 12, "~ takes a glob in quotes"),
        (
            f"str(arg0) ~ '{'a' * 200}' || str(arg0) ~ '{'a' * 57}'",
            230,
            "an expression's globs are limited to 256 bytes in all",
        ),
        ("arg0 + 1 " * 1 + "+ 1 + arg1 " * 70 + "> 0", 706, "too many operations; the limit is 128"),
        ("execname & 4", 0, "execname is a string, which has no bits"),
        ("3 == 4", 0, "one side of a comparison must be"),
        ("pid && 5", 7, "a constant is not a condition"),
        ("pid || 'a'", 7, "a constant is not a condition"),
        ("pid || execname", 7, 'execname is not a condition; write execname == "…"'),
        ("execname < 'a'", 9, "strings and bytes support only == and !=, not <"),
        ("'a' >= execname", 4, "strings and bytes support only == and !="),
        ("execname == 5", 12, "execname is a string"),
        ("arg0 == 'a'", 8, "arg0 is a number and cannot be compared with a string; write str(arg0)"),
        ("execname == 'abcdefghijklmnop'", 12, 'has 16; write "abcdefghijklmno"'),
        ("execname == '☃☃☃☃☃☃'", 12, "has 18"),
        (r"execname == 'a\x00b'", 12, "cannot contain NUL"),
        (r"execname == 'ab\q'", 15, r"'\\q' is not an escape sequence"),
        (r"execname == 'ab\xg0'", 15, r"'\\x' is not an escape sequence"),
        ("cgroup == '/nobody'", 10, "no such cgroup: '/nobody'"),
        ("cgroup == '/a' && pid == 'b'", 10, "no such cgroup"),
        ("pid || " * MAX_TESTS + "tid", 7 * MAX_TESTS, "too many comparisons; the limit is 64"),
    ],
)
def test_errors_name_the_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parsed(text)
    assert reason in raised.value.reason
    assert (raised.value.field, raised.value.column, raised.value.text) == ("where", column, text)


def test_text_may_not_be_too_long() -> None:
    assert parsed("pid == 1".ljust(MAX_LENGTH)) == PID_IS_1
    with pytest.raises(InvalidArgumentError, match="limited to 4096 characters; this one has 4097"):
        parsed("pid == 1".ljust(MAX_LENGTH + 1))


def nested(depth: int) -> str:
    text = "pid"
    for level in range(depth):
        text = f"({'uid' if level % 2 else 'tid'} {'&&' if level % 2 else '||'} {text})"
    return text


def test_conditions_may_not_be_nested_too_deep() -> None:
    parsed(nested(MAX_DEPTH))
    with pytest.raises(InvalidArgumentError, match="nested more than 32 levels deep") as raised:
        parsed(nested(MAX_DEPTH + 1))
    assert raised.value.column is not None
    with pytest.raises(InvalidArgumentError, match="nested more than 32 levels deep"):
        parsed(nested(300))


@pytest.mark.parametrize(
    "text",
    ["arg0 ? " * (MAX_DEPTH + 1) + "1" + " : 0" * (MAX_DEPTH + 1), "(arg0 ? 1 : " * (MAX_DEPTH + 1) + "0" + ")" * 33],
)
def test_conditionals_may_not_be_nested_too_deep(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="nested more than 32 levels deep"):
        parsed(text)


def test_deepest_expression_is_evaluated_like_any_other() -> None:
    """Calculations do not count as nesting, so that these are as deep as an expression can be."""
    deepest = "(" * 120 + "arg0" + " + arg1)" * 120 + " == 120"
    for level in range(MAX_DEPTH):
        deepest = f"({'uid' if level % 2 else 'tid'} {'&&' if level % 2 else '||'} {deepest})"
    condition = parsed(deepest)
    assert len(list(walk(condition))) == 120 * 2 + 1 + 2 + 3 * MAX_DEPTH
    assert parsed(text_of_any(condition)) == condition


def test_field_is_named_in_the_error() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^filter: unexpected '1'"):
        parse("1 1", find_cgroup, "filter")


@given(expressions())
def test_what_is_written_out_is_read_back(expression: Condition) -> None:
    assert parsed(text_of(expression)) == expression


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(
            st.sampled_from(["arg0", "pid", "execname", "cgroup", "(", ")", "!", "&&", "||", "&", "==", "<", "5", "-1",
                             "0x1f", "1.5", "str(", "?",
                             ":", "+", "-", "*", "/", "~", "|", "<<", ",", '"a"', "'/system.slice'", " ", "'", "\\"]),
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
