"""What is said of D programs that cannot run, and the types of those that can."""

from __future__ import annotations

from collections import Counter

import pytest

from stapsdtd.catalog import selectors
from stapsdtd.query.d.check import check
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.expression_types import ExpressionTypes
from stapsdtd.query.d.needs import Needs, needs_of
from stapsdtd.query.d.nodes import Call, Clause, Expression, Option, Scope, walk
from stapsdtd.query.d.nodes import Integer as IntegerNode
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.probes import Moment, Tick, lenient_selector, meaning, selector_of
from stapsdtd.query.d.values import Integer, Pointer, String, Type

INT32, INT64 = Integer(32, is_signed=True), Integer(64, is_signed=True)
UINT32, UINT64 = Integer(32, is_signed=False), Integer(64, is_signed=False)
ARGUMENTS: list[Type] = [INT32, UINT64, String()]


def argument_type(clause: Clause, index: int) -> Type | None:
    del clause
    return ARGUMENTS[index] if index < len(ARGUMENTS) else None


def checked(text: str) -> Checked:
    return check(parse(text), argument_type)


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("1", INT32), ("1u", UINT32), ("1L", INT64), ("2147483648", INT64), ("4294967295U", UINT32),
        ("18446744073709551615", UINT64), ("'a' + 1", INT32), ('"a"', String()),
        ("pid", INT32), ("uid", UINT32), ("timestamp", UINT64), ("arg3", INT64), ("execname", String()),
        ("args[0]", INT32), ("args[1]", UINT64), ("args[2]", String()),
        ("pid + uid", UINT32), ("pid + 1L", INT64), ("uid + 1L", INT64), ("arg0 + timestamp", UINT64),
        ("(char)1 + (short)2", INT32), ("(uint8_t)1", Integer(8, is_signed=False)), ("(void *)arg0", Pointer()),
        ("(uid_t)arg0", UINT32), ("(unsigned long long)1", UINT64), ("(size_t)1", UINT64),
        ("(int16_t)1", Integer(16, is_signed=True)),
        ("arg0 < timestamp", INT32), ("!arg0", INT32), ("-uid", UINT32), ("~(char)1", INT32), ("arg0 && 1", INT32),
        ("uid << 40", UINT32), ("pid ? arg0 : 1", INT64), ('pid ? "a" : execname', String()),
        ("x = 5", INT32), ("x = arg0", INT64), ("self->n++", INT64), ("n[execname, 1] += 2", INT32),
        ("strlen(execname)", UINT64), ("copyinstr(arg0)", String()), ('index(execname, "a")', INT32),
    ],
)  # fmt: skip
def test_types(expression: str, kind: Type) -> None:
    program = checked(f"a:::b {{ {expression}; }}")
    (clause,) = program.program.clauses
    assert clause.statements is not None
    assert program.types[id(clause.statements[0])] == kind


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("(", " << 1)"), ("(1 + ", ")"), ("-(", ")"), ("(", " ? 1 : 2)"), ("(char)(", ")"), ("(1 && ", ")"),
        ("n[", " + 1]++"), ("n[", "] += 1"), ("n[", "] = 2"), ("n[", "]"),
    ],
)  # fmt: skip
def test_each_node_is_typed_once(before: str, behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, typed = ExpressionTypes._found, Counter[int]()

    def counting(types: ExpressionTypes, expression: Expression) -> Type:
        typed[id(expression)] += 1
        return found(types, expression)

    monkeypatch.setattr(ExpressionTypes, "_found", counting)
    depth = 20
    program = checked(f"a:::b {{ n[0] = 1; {before * depth}1{behind * depth}; }}").program
    (clause,) = program.clauses
    assert clause.statements is not None
    assert set(typed.values()) == {1}
    assert typed.keys() == {id(node) for statement in clause.statements for node, _ in walk(statement)}


@pytest.mark.parametrize(
    ("clauses", "line", "reason"),
    [
        ("BEGIN { trace(x); }", 1, "failed to resolve x: unknown variable name"),
        ("BEGIN\n{ self->y == 1; }", 2, "failed to resolve self->y: unknown variable name"),
        ('BEGIN { x = 1; x = "a"; }', 1, "operands have incompatible types: int = string"),
        ('BEGIN { x = "a"; x += "b"; }', 1, "operands have incompatible types: string += string"),
        ("BEGIN { n[1] = 1; n[1, 2] = 1; }", 1, "n has 1 keys, and here are 2"),
        ('BEGIN { n[1] = 1; n["a"] = 1; }', 1, "key #1 of n is a int, and here a string"),
        ("BEGIN { pid = 1; }", 1, "pid cannot be assigned to"),
        ("BEGIN { 1 = 2; }", 1, "1 cannot be assigned to"),
        ("BEGIN { execname + 1; }", 1, "an operand of + must be an integer, and execname is a string"),
        ("BEGIN { execname == 1; }", 1, "operands have incompatible types: string == int"),
        ('BEGIN { pid ? 1 : "a"; }', 1, "operands have incompatible types: int ?: string"),
        ("BEGIN /execname/ { }", 1, "the predicate must be an integer, and execname is a string"),
        ("BEGIN { if (execname) { } }", 1, "the condition must be an integer, and execname is a string"),
        ("BEGIN { (string)pid; }", 1, "cannot cast int to string; stringof() makes strings"),
        ("BEGIN { (foo_t)1; }", 1, "type foo_t is not known: types are integers, pointers to them and string"),
        ("BEGIN { (struct foo *)1; }", 1, "type struct foo * is not known"),
        ("BEGIN { ((foo_t **)1)->x; }", 1, "type foo_t ** is not known"),
        ("BEGIN { sizeof (struct foo); }", 1, "type struct foo is not known"),
        ("BEGIN { curpsinfo->pr_psargs; }", 1, "curpsinfo: kernel memory and registers are not read; execname, pid"),
        ("BEGIN { x = 1; x->y; }", 1, "->y: only args[] of kernel functions have members"),
        ("BEGIN { x = 1; y = &x; }", 1, "&: addresses of variables cannot be taken"),
        ("BEGIN { `max_pfn; }", 1, "`max_pfn: variables of the kernel are not read"),
        ("BEGIN { x = 1 / 0; }", 1, "expression contains division by zero"),
        ("BEGIN { x = 1;\nx %= ((7 - 7) * 999); }", 2, "expression contains division by zero"),
        ("BEGIN { this->x[1] = 1; }", 1, "this->x cannot be an associative array; self->x and x can"),
        ("this int x[int]; BEGIN { }", 1, "this->x cannot be an associative array"),
        ("int x[]; BEGIN { }", 1, "x[] has no types of keys; write 'int x[string];'"),
        ("BEGIN { (unsigned signed int)1; }", 1, "failed to resolve type unsigned signed int"),
        (f"BEGIN {{ (int {'*' * 17})1; }}", 1, "a type has more than 16 *"),
        (f"int {'*' * 30_000} x;", 1, "a type has more than 16 *"),
        ("a:::b { args[3]; }", 1, "index 3 is out of range for the args[] of the probes that match"),
        ("a:::b { args[pid]; }", 1, "args[] takes one integer constant"),
        ("BEGIN { pid[1]; }", 1, "pid is no associative array"),
        ("BEGIN { curthread; }", 1, "curthread: kernel memory and registers are not read"),
        ("BEGIN { nothing(1); }", 1, "undefined function name: nothing"),
        ("BEGIN { ustack(); }", 1, "ustack(): stacks are not captured yet"),
        ('BEGIN { system("x"); }', 1, "system(): actions that change what is traced are never allowed"),
        ("BEGIN { strlen(); }", 1, "strlen() takes 1 arguments, and here are 0"),
        ("BEGIN { substr(execname); }", 1, "substr() takes 2 to 3 arguments, and here are 1"),
        ("BEGIN { strlen(1); }", 1, "argument #1 of strlen() must be a string"),
        ("BEGIN { x = trace(1); }", 1, "trace() is an action, and a statement of its own"),
        ("BEGIN { count(); }", 1, "count() must be assigned to an aggregation, as in @ = count()"),
        ("BEGIN { @a += 1; }", 1, "@a must be assigned one of"),
        ("BEGIN { x = @a; }", 1, "@a is an aggregation, whose result is only printed"),
        ("BEGIN { @a = count(); @a = sum(1); }", 1, "@a was count() before, or had other parameters"),
        ("BEGIN { @a = lquantize(1, 0, 9, 1); @a = lquantize(1, 0, 9, 2); }", 1, "@a was lquantize() before"),
        ("BEGIN { @a = lquantize(1, pid, 9, 1); }", 1, "argument #2 of lquantize() must be an integer constant"),
        ("BEGIN { @a = lquantize(1, 9, 0, 1); }", 1, "the base, 9, must be less than the limit, 0"),
        ("BEGIN { @a[1] = count(); @a[1, 2] = count(); }", 1, "@a has 1 keys, and here are 2"),
        ("BEGIN { printa(@b); }", 1, "undefined aggregation: @b"),
        ("BEGIN { @a[1] = count(); clear(@a[1]); }", 1, "must be an aggregation without keys"),
        ("BEGIN { @a[1] = count(); @b = count(); printa(@a, @b); }", 1, "have different numbers of keys"),
        (
            'BEGIN { @a[1, "", 2] = count(); @b[1, 2, ""] = count(); printa(@a, @b); }',
            1,
            "key #2 of @a is a string, and in @b a int",
        ),
        ('BEGIN { printf("%d"); }', 1, "printf(): conversion #1 (%d) lacks an argument"),
        ('BEGIN { printf("%s", 1); }', 1, "takes a string; use stringof or copyinstr"),
        ("BEGIN { printf(execname); }", 1, "argument #1 of printf() must be a string constant"),
        ("int x; string x; BEGIN { }", 1, "identifier x was declared otherwise before"),
        ("int pid; BEGIN { }", 1, "identifier pid is a built-in variable"),
    ],
)  # fmt: skip
def test_errors(clauses: str, line: int, reason: str) -> None:
    with pytest.raises(DError) as caught:
        checked(clauses)
    assert reason in caught.value.reason
    assert caught.value.at.line == line


def test_declared_variables_have_their_types() -> None:
    program = checked('int8_t small; string names[int]; BEGIN { small = 300; names[1] = "a"; this->late = 1L; }')
    assert {name: declared.type for (_, name), declared in program.variables.items()} == {
        "small": Integer(8, is_signed=True), "names": String(), "late": INT64,
    }  # fmt: skip
    assert program.variables[Scope.GLOBAL, "names"].keys == (INT32,)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("BEGIN", Moment.BEGIN),
        ("dtrace:::END", Moment.END),
        ("tick-10ms", Tick("tick-10ms", 10_000_000)),
        ("profile:::tick-2s", Tick("tick-2s", 2_000_000_000)),
        ("tick-10", Tick("tick-10", 100_000_000)),
        ("tick-5hz", Tick("tick-5hz", 200_000_000)),
        ("postgresql*:::query-start", None),
        ("a:BEGIN", None),
    ],
)
def test_meanings_of_descriptions(text: str, meant: object) -> None:
    (clause,) = parse(text).clauses
    assert meaning(clause.descriptions[0]) == meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "syscall::read:entry",
            "provider syscall: stapsdt has static probes of programs, and kernel functions as fbt; for system calls",
        ),
        ("rawfbt:::entry", "for the kernel use bpftrace or perf"),
        ("pid123::malloc:entry", "for any function of a program use bpftrace's uprobe"),
        ("profile-997", "samples are not taken; tick-N is there"),
        ("tick-0s", "tick-0s is no timer; write tick-1s or tick-100ms"),
        ("tick-1us", "the shortest timer is tick-1ms"),
        ("ERROR", "does not match any probes; there are BEGIN and END"),
    ],
)
def test_refused_descriptions(text: str, reason: str) -> None:
    (clause,) = parse(text).clauses
    with pytest.raises(DError) as caught:
        meaning(clause.descriptions[0])
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("a12:::query-start", "a12:::query-start"),
        ("main:go", "::main:go"),
        ("a:::", "a:::*"),
        ("a:lib*::x", "a:lib*::x"),
    ],
)
def test_selectors(text: str, selector: str) -> None:
    (clause,) = parse(text).clauses
    assert selector_of(clause.descriptions[0]) == selector


@pytest.mark.parametrize(
    ("selector", "lenient"),
    [
        ("a:::go", "a:::[g]o"),
        ("a:m:f:_x", "a:m:f:_[x]"),
        ("a:::a-b", "a:::[a]-b"),
        ("a:::g*", "a:::g*"),
        ("a:::_", "a:::_"),
    ],
)
def test_lenient_selectors_match_the_same(selector: str, lenient: str) -> None:
    assert lenient_selector(selector) == lenient
    name = selector.rpartition(":")[2]
    assert selectors.parse(lenient).matches_name(name.replace("*", "o"))
    assert selectors.parse(lenient).is_glob or name == "_"


def test_needs() -> None:
    program = checked(
        'a:::b /arg3 > 1 && uid == 0/ { printf("%s %s", copyinstr(arg1), args[2]); @[gid] = sum(args[0]); }'
        "a:::c { if (pid) { trace((int)arg9); } copyinstr((char *)arg4, 8); }"
    )
    needs = needs_of(program, program.program.clauses)
    assert needs == Needs(frozenset({0, 1, 3, 4, 9}), frozenset({1, 2, 4}), fields=("gid", "uid"))
    assert needs.captures == "arg0, arg1, arg3, arg4, arg9, arg1:str, arg2:str, arg4:str"
    wrong = checked("a:::b { copyinstr(arg0 + 8); }")
    with pytest.raises(DError) as caught:
        needs_of(wrong, wrong.program.clauses)
    assert caught.value.reason.startswith("copyinstr() takes an argument, such as arg0, and not arg0 + 8: memory is")


def test_options() -> None:
    program = parse("#pragma D option quiet\n#pragma D option aggsize=1m\n#pragma D option aggsortpos=2\nBEGIN")
    options = options_of([*program.options, Option("aggsortrev")])
    assert options.is_quiet
    assert (options.sorting.position, options.sorting.is_reverse, options.sorting.by_key) == (2, True, False)
    for name, value, reason in [
        ("nosuch", "", "invalid option or value: nosuch"),
        ("destructive", "", "option destructive: programs that change what is traced are never allowed"),
        ("aggsortpos", "x", "invalid option or value: aggsortpos=x"),
        ("strsize", "0", "invalid value for option strsize: 0; strings have 1 to 4096 bytes"),
        ("strsize", "4097", "invalid value for option strsize: 4097; strings have 1 to 4096 bytes"),
        ("strsize", "", "invalid value for option strsize: ; strings have 1 to 4096 bytes"),
        ("quiet", "please", "invalid option or value: quiet=please"),
        ("bufsize", "1 m", "invalid value for option bufsize: 1 m"),
    ]:
        with pytest.raises(DError) as caught:
            options_of([Option(name, value)])
        assert caught.value.reason == reason


def test_strings_have_the_size_that_an_option_says() -> None:
    text = "#pragma D option strsize=1k\nint x[string]; a:::b { trace(sizeof (string)); copyinstr(arg0); }"
    program = checked(text)
    (clause,) = program.program.clauses
    assert clause.statements is not None
    assert clause.statements[0] == Call("trace", (IntegerNode(1024, "ul"),))
    assert needs_of(program, [clause]).captures == "arg0, arg0:str[1023]"
    (other,) = parse("a:::b { sizeof (string); }", settings=[Option("strsize", "5")]).clauses
    assert other.statements == (IntegerNode(5, "ul"),)
