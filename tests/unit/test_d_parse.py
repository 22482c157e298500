"""D programs as syntax trees: what is understood, and what is said of the rest."""

from __future__ import annotations

import string as characters
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.query.d import statements
from stapsdtd.query.d.errors import DError, DSyntaxError
from stapsdtd.query.d.macros import substituted
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Branch,
    Call,
    Cast,
    Clause,
    Conditional,
    Declaration,
    Description,
    Expression,
    Integer,
    Macro,
    Option,
    Part,
    Position,
    Program,
    Scope,
    Statement,
    Step,
    String,
    Unary,
    Variable,
)
from stapsdtd.query.d.parse import MAX_LENGTH, parse
from stapsdtd.query.d.statements import MAX_DEPTH, StatementParser
from stapsdtd.query.d.text import text_of

X, Y = Variable("x"), Variable("y")
ONE, TWO, THREE = Integer(1), Integer(2), Integer(3)


def statements_of(text: str) -> tuple[Statement, ...]:
    (clause,) = parse(f"BEGIN {{ {text} }}").clauses
    assert clause.statements is not None
    return clause.statements


def expression_of(text: str) -> Statement:
    (expression,) = statements_of(text)
    return expression


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("1 + 2 * 3", Binary("+", ONE, Binary("*", TWO, THREE))),
        ("1 - 2 - 3", Binary("-", Binary("-", ONE, TWO), THREE)),
        ("1 << 2 + 3", Binary("<<", ONE, Binary("+", TWO, THREE))),
        ("x & 1 == 2", Binary("&", X, Binary("==", ONE, TWO))),
        ("x ^ 1 | 2 & 3", Binary("|", Binary("^", X, ONE), Binary("&", TWO, THREE))),
        ("x || y ^^ 1 && 2", Binary("||", X, Binary("^^", Y, Binary("&&", ONE, TWO)))),
        ("x < 1 != y >= 2", Binary("!=", Binary("<", X, ONE), Binary(">=", Y, TWO))),
        ("x ? 1 : y ? 2 : 3", Conditional(X, ONE, Conditional(Y, TWO, THREE))),
        ("x = y = 1", Assignment("=", X, Assignment("=", Y, ONE))),
        ("x <<= 1 + 2", Assignment("<<=", X, Binary("+", ONE, TWO))),
        ("-x % ~y", Binary("%", Unary("-", X), Unary("~", Y))),
        ("!x++", Unary("!", Step("++", X, is_postfix=True))),
        ("--x - -1", Binary("-", Step("--", X, is_postfix=False), Unary("-", ONE))),
        ("(1 + 2) * 3", Binary("*", Binary("+", ONE, TWO), THREE)),
        ("(unsigned  long)x / 2", Binary("/", Cast("unsigned long", X), TWO)),
        ("(char *)x", Cast("char *", X)),
        ("(string)(x)", Cast("string", X)),
        ("strings + id_type", Binary("+", Variable("strings"), Variable("id_type"))),
        ("0x1fUL", Integer(31, "ul")),
        ("017", Integer(15)),
        ("0", Integer(0)),
        ("'a'", Integer(97)),
        (r"'\n'", Integer(10)),
        ("'ab'", Integer(0x6162)),
        (r'"a\tb\x41\101\"\\"', String(b'a\tbAA"\\')),
        ('"/* no comment */ } / {"', String(b"/* no comment */ } / {")),
        ("self->x", Variable("x", Scope.SELF)),
        ("self -> names[1, x]", Variable("names", Scope.SELF, (ONE, X))),
        ("this->x", Variable("x", Scope.THIS)),
        ('a["b", 1]', Variable("a", keys=(String(b"b"), ONE))),
        ("args[2]", Variable("args", keys=(TWO,))),
        ("@ = count()", Assignment("=", Aggregation(""), Call("count"))),
        ("@a[x, 1] = sum(y)", Assignment("=", Aggregation("a", (X, ONE)), Call("sum", (Y,)))),
        ("printa(@a)", Call("printa", (Aggregation("a"),))),
        ('printf("%d", x)', Call("printf", (String(b"%d"), X))),
        ("$target + $1", Binary("+", Macro("target"), Macro("1"))),
        ("$$1", Macro("$1")),
        ("x /* of /all/ { */ + 1", Binary("+", X, ONE)),
    ],
)  # fmt: skip
def test_expressions(text: str, expression: Expression) -> None:
    assert expression_of(text) == expression


def test_statements() -> None:
    assert statements_of("") == ()
    assert statements_of(";; x; ; 1") == (X, ONE)
    assert statements_of("if (x) { 1; 2 } else if (y) { } else { 3; } x;") == (
        Branch(X, (ONE, TWO), (Branch(Y, (), (THREE,)),)), X,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "descriptions"),
    [
        ("a:b:c:d", [Description("a", "b", "c", "d")]),
        ("c:d", [Description(function="c", name="d")]),
        ("BEGIN", [Description(name="BEGIN")]),
        ("tick-10ms", [Description(name="tick-10ms")]),
        ("postgresql*:::query-*, :x::y-[ab]?", [Description("postgresql*", name="query-*"),
                                                Description("", "x", "", "y-[ab]?")]),
        ("a1:::b ,\n/* both */ $$1$target:::c", [Description("a1", name="b"), Description("$$1$target", name="c")]),
        (":::", [Description()]),
    ],
)  # fmt: skip
def test_descriptions(text: str, descriptions: list[Description]) -> None:
    (clause,) = parse(f"{text} {{ }}").clauses
    assert list(clause.descriptions) == descriptions


@pytest.mark.parametrize(
    ("text", "predicate"),
    [
        ("a:::b /x/ { }", X),
        ("a:::b\n/x / 2 > 1/\n{ }", Binary(">", Binary("/", X, TWO), ONE)),
        ("a:::b /x/ /* why */ { }", X),
        ("a:::b /x == '/'/ { }", Binary("==", X, Integer(47))),
        ("a:::b /x /2\n/y/{ }", Binary("/", Binary("/", X, TWO), Y)),
    ],
)
def test_predicates(text: str, predicate: Expression) -> None:
    (clause,) = parse(text).clauses
    assert clause.predicate == predicate


def test_comments_end_at_their_first_end() -> None:
    begin, end = parse("BEGIN /* a */ { x; } END /* b */, tick-1s { y; }").clauses
    assert (begin.descriptions, begin.statements) == ((Description(name="BEGIN"),), (X,))
    assert (end.descriptions, end.statements) == ((Description(name="END"), Description(name="tick-1s")), (Y,))


def test_many_comments_before_the_statements() -> None:
    (clause,) = parse("BEGIN\n" + "/* a */\n" * 5000 + "{ x; }").clauses
    assert clause.statements == (X,)


def test_a_script() -> None:
    program = parse(
        """#!/usr/bin/env -S stapsdt d -s
#pragma D option quiet
#pragma D option aggsize=1m

/* what there is */
int counts[string, int];
self   unsigned long began /* of ; one */; this char *name;

c:::d
/self->began/
{ 1; }

e:::f
{ }
""",
        is_script=True,
    )
    assert program.options == (Option("quiet"), Option("aggsize", "1m"))
    assert program.declarations == (
        Declaration("counts", "int", keys=("string", "int")),
        Declaration("began", "unsigned long", Scope.SELF),
        Declaration("name", "char *", Scope.THIS),
    )
    assert program.clauses == (
        Clause((Description("c", name="d"),), Variable("began", Scope.SELF), (ONE,)),
        Clause((Description("e", name="f"),), None, ()),
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("BEGIN { x = ; }", 1, 13, 'syntax error near ";"'),
        ("BEGIN\n{\n  trace(1;\n}", 3, 10, 'syntax error near ";"'),
        ("BEGIN { x + }", 1, 13, "syntax error near the end of the clause"),
        ("BEGIN { x # 1 }", 1, 11, 'syntax error near "#"'),
        ("BEGIN { trace(1)", 1, 7, "the clause has no closing brace"),
        ("a:::b /x { }", 1, 7, "the predicate has no closing slash"),
        ("a:::b /x; y/ { }", 1, 8, "a predicate is one expression"),
        ("a:::b // { }", 1, 8, "a predicate is one expression"),
        ("a:b:c:d:e { }", 1, 1, "probe description a:b:c:d:e has more than 4 parts"),
        ("BEGIN { } }", 1, 11, 'syntax error near "}"'),
        ("a:::b, { }", 1, 8, 'syntax error near "{"'),
        ("BEGIN { } /* open", 1, 11, "end-of-file encountered before the end of the comment"),
        ("#define X 1\nBEGIN { }", 1, 1, "#define needs a preprocessor, which is not run"),
        ("#pragma D depends_on library x", 1, 1, "this pragma is not supported; '#pragma D option NAME' is"),
        ("BEGIN { }\n#!/bin/x", 2, 1, "#! belongs into the first line"),
        ("BEGIN x = 1;", 1, 7, 'syntax error near "x"'),
        ("a b c", 1, 3, 'syntax error near "b"'),
        ("BEGIN { }\nEND; BEGIN", 2, 4, 'syntax error near ";"'),
        ("a:::b /x/", 1, 10, "expected actions { } following the predicate"),
        ("a:::b /x/\nc:::d { }", 2, 1, "expected actions { } following the predicate"),
        ('BEGIN { trace("a); }', 1, 15, "the string has no closing quote"),
        ("BEGIN /'a/ { }", 1, 8, "the character constant has no closing quote"),
        ("BEGIN { x; /* open }", 1, 12, "end-of-file encountered before the end of the comment"),
        ("int x = 1;", 1, 1, "syntax error in a declaration, such as 'int counts[string];'"),
        ("int x", 1, 1, "syntax error in a declaration, such as 'int counts[string];'"),
        ('int x "a";', 1, 1, "syntax error in a declaration, such as 'int counts[string];'"),
        ("struct x { int a; };", 1, 1, "struct declarations are not supported"),
        ("inline int x = 1;", 1, 1, "inline declarations are not supported"),
        ("int;", 1, 1, "syntax error in a declaration, such as 'int counts[string];'"),
        ("BEGIN { 099 }", 1, 9, "invalid digit in octal constant 099"),
        ("BEGIN { 18446744073709551616 }", 1, 9, "integer constant is too large: 18446744073709551616"),
        ("BEGIN { '123456789' }", 1, 9, "character constant has more than 8 characters"),
        (f"BEGIN {{ {'(' * 9}{'~' * 70}1{')' * 9} }}", 1, 82, "nested more than 64 levels deep"),
        ("x" * (MAX_LENGTH + 1), 1, 1, "programs are limited to 65536 characters; this one has 65537"),
    ],
)
def test_errors_say_where(text: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(DSyntaxError) as caught:
        parse(text)
    assert (caught.value.reason, caught.value.at) == (reason, (line, column))
    assert str(caught.value) == f"line {line}, column {column}: {reason}"


@pytest.mark.parametrize(
    ("text", "last", "description"),
    [
        ("a", Part.PROVIDER, Description("a")),
        ("b", Part.MODULE, Description(module="b")),
        ("a:b", Part.MODULE, Description("a", "b")),
        ("c", Part.FUNCTION, Description(function="c")),
        ("a::c", Part.FUNCTION, Description("a", "", "c")),
        ("a:b:c:d", Part.NAME, Description("a", "b", "c", "d")),
    ],
)
def test_options_say_what_the_last_part_is(text: str, last: Part, description: Description) -> None:
    (bare,) = parse(text, last).clauses
    assert (bare.descriptions, bare.predicate, bare.statements) == ((description,), None, None)
    (whole,) = parse(f"{text}, {text} /x/ {{ 1; }}", last).clauses
    assert (whole.descriptions, whole.predicate, whole.statements) == ((description,) * 2, X, (ONE,))
    with pytest.raises(DSyntaxError, match=f"has more than {int(last)} part"):
        parse(f"{text}{':x' * 4}", last)


def test_a_script_has_no_descriptions_alone() -> None:
    for text in ("a:::b", "a:::b\nc:::d\n{ }"):
        with pytest.raises(DSyntaxError, match="expected a predicate or actions"):
            parse(text, is_script=True)


@pytest.mark.parametrize("opened", ['"', "'", "/*"])
@pytest.mark.parametrize("before", ["BEGIN { ", "BEGIN /", "int x "])
def test_what_is_not_closed_is_found_at_once(before: str, opened: str) -> None:
    # the search would take minutes if it began again at each of them
    escaped = "/* " if opened == "/*" else f"\\{opened}"
    text = f"{before}{opened}{escaped * (MAX_LENGTH // 3 - 20)}"
    with pytest.raises(DSyntaxError) as caught:
        parse(text)
    assert caught.value.at == (1, len(before) + 1)


def test_parentheses_may_be_many() -> None:
    assert expression_of("(" * 30_000 + "x" + ")" * 30_000) == X


@pytest.mark.parametrize("chain", ["if (x) {{ {} }}", "if (x) {{ }} else {}"])
def test_branches_may_not_be_nested_too_deep(chain: str) -> None:
    def nested(depth: int) -> str:
        text = "if (x) { }"
        for _ in range(depth - 1):
            text = chain.format(text)
        return text

    assert isinstance(expression_of(nested(MAX_DEPTH - 1)), Branch)
    for depth in (MAX_DEPTH + 1, 500):
        with pytest.raises(DSyntaxError, match="nested more than 64 levels deep"):
            statements_of(nested(depth))


@pytest.mark.parametrize(
    ("text", "column", "near"),
    [
        ("x = ", 14, "the end of the clause"),
        ("1 + 2 = x", 15, '"="'),
        ("x ? 1", 15, "the end of the clause"),
        ("x ? 1 : y = 2", 19, '"="'),
        ("f(1,)", 13, '")"'),
        ("x[]", 11, '"]"'),
        ("(1]", 11, '"]"'),
        ("f(1 2)", 13, '"2"'),
        ("x ? f(1 : 2", 17, '":"'),
        ("(int 1", 14, '"1"'),
        ("self->", 16, "the end of the clause"),
        ("if (1, 2) { }", 14, '","'),
        ("if (1) 2", 16, '"2"'),
        ("1 }", 11, '"}"'),
        ("''", 9, '"\'"'),
    ],
)
def test_syntax_errors_in_statements(text: str, column: int, near: str) -> None:
    with pytest.raises(DSyntaxError) as caught:
        StatementParser(f"BEGIN {{ {text} ", 8, len(text) + 9, lambda offset: Position(1, offset + 1)).parse()
    assert (caught.value.reason, caught.value.at) == (f"syntax error near {near}", (1, column))


def test_each_character_is_looked_at_once() -> None:
    # each of these would take minutes if it were not
    many = 100_000
    for text in (" " * many, "/* a */" * many, '"' + "\\" * many, "x->a" + " " * many, "'" * many, "@" + "a" * many):
        assert sum(len(token.text) for token in statements._tokens(text, 0, len(text))) <= len(text)


def test_macros_are_replaced() -> None:
    program = parse("p$target:::$2 /pid == $target && execname == $$2/ { @[$1] = count(); x[$3]++; if ($1) { $4 } }")
    replaced = substituted(program, {"target": "47", "1": "0x10", "2": "go-on", "3": "-7", "4": "010"})
    (clause,) = replaced.clauses
    assert clause.descriptions == (Description("p47", name="go-on"),)
    assert clause.predicate == Binary(
        "&&", Binary("==", Variable("pid"), Integer(47)), Binary("==", Variable("execname"), String(b"go-on"))
    )
    assert clause.statements == (
        Assignment("=", Aggregation("", (Integer(16),)), Call("count")),
        Step("++", Variable("x", keys=(Unary("-", Integer(7)),)), is_postfix=True),
        Branch(Integer(16), (Integer(8),)),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("BEGIN { $2 }", "macro argument $2 is not defined"),
        ("p$target:::a", "macro variable $target is not defined"),
        ("BEGIN { $1 }", "$1 is 'x y', which is no integer; $$1 is the string"),
        ("BEGIN { $3 }", f"integer constant is too large: {1 << 64}"),
    ],
)
def test_macros_that_cannot_be_replaced(text: str, reason: str) -> None:
    with pytest.raises(DError) as caught:
        substituted(parse(text), {"1": "x y", "3": str(1 << 64)})
    assert caught.value.reason == reason


NAMES = st.sampled_from(["x", "y", "arg0", "execname", "probename", "stringy"])
LEAVES: st.SearchStrategy[Expression] = st.one_of(
    st.builds(Integer, st.integers(0, (1 << 64) - 1), st.sampled_from(["", "u", "ul", "ull"])),
    st.builds(String, st.binary(max_size=8)),
    st.builds(Macro, st.sampled_from(["target", "1", "$2"])),
    st.builds(Variable, NAMES, st.sampled_from(Scope)),
)
BINARY = ["+", "-", "*", "/", "%", "<<", ">>", "<", "<=", ">", ">=", "==", "!=", "&", "^", "|", "&&", "^^", "||"]


def larger(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    several = st.lists(parts, max_size=3).map(tuple)
    keys = st.lists(parts, min_size=1, max_size=3).map(tuple)
    targets: st.SearchStrategy[Expression] = st.one_of(
        st.builds(Variable, NAMES, st.sampled_from(Scope), keys), st.builds(Aggregation, NAMES, several)
    )
    return st.one_of(
        targets,
        st.builds(Call, st.sampled_from(["count", "printf", "strlen"]), several),
        st.builds(Unary, st.sampled_from("+-!~"), parts),
        st.builds(Step, st.sampled_from(["++", "--"]), targets, st.booleans()),
        st.builds(Binary, st.sampled_from(BINARY), parts, parts),
        st.builds(Conditional, parts, parts, parts),
        st.builds(Assignment, st.sampled_from(["=", "+=", "<<=", "|="]), targets, parts),
        st.builds(Cast, st.sampled_from(["int", "uint8_t", "unsigned long", "void *", "string"]), parts),
    )


EXPRESSIONS = st.recursive(LEAVES, larger, max_leaves=12)
PARTS = st.text(st.sampled_from(characters.ascii_lowercase + "*?-_0"), max_size=5)


def branches(inner: st.SearchStrategy[Statement]) -> st.SearchStrategy[Statement]:
    bodies = st.lists(inner, max_size=2).map(tuple)
    return st.one_of(inner, st.builds(Branch, EXPRESSIONS, bodies, bodies))


STATEMENTS = st.lists(st.recursive(EXPRESSIONS, branches, max_leaves=3), max_size=3).map(tuple)
CLAUSES = st.builds(
    Clause,
    st.lists(st.builds(Description, PARTS, PARTS, PARTS, PARTS), min_size=1, max_size=2).map(tuple),
    st.none() | EXPRESSIONS,
    STATEMENTS,
)


@given(st.builds(Program, st.lists(CLAUSES, max_size=3).map(tuple)))
def test_a_printed_program_is_the_same(program: Program) -> None:
    assert parse(text_of(program)) == program


@given(st.text(st.sampled_from("BEGINa:x,/{}();@[]=+-'\"\\#$*! \n1"), max_size=60))
def test_no_text_is_anything_but_a_program_or_an_error(text: str) -> None:
    with suppress(DSyntaxError):
        assert isinstance(parse(text), Program)
