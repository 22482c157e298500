"""What D programs compute, hit by hit."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.query.d import texts
from stapsdtd.query.d.check import check
from stapsdtd.query.d.interpret import Program
from stapsdtd.query.d.machine import Hit
from stapsdtd.query.d.nodes import Clause
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.print_aggregations import Sorting
from stapsdtd.query.d.records import Records
from stapsdtd.query.d.values import Integer, String, Type

ARGUMENTS: list[Type] = [Integer(32, is_signed=True), Integer(64, is_signed=False), String()]
HIT = Hit(
    7, "shop4711", "shop", "sell", "a-sale", pid=4711, tid=4712, uid=1000, gid=100, cpu=1, execname="shop",
    timestamp=5_000, walltimestamp=10**18, arguments={0: -5, 1: 2**64 - 1, 3: 9}, strings={2: "an apple"},
)  # fmt: skip


class Ran:
    """A program that was run for some hits. faults: why clauses ended."""

    def __init__(self, text: str, *hits: Hit, max_rows: int = 100) -> None:
        self.shown: list[str] = []
        self.faults: list[str] = []

        def argument_type(clause: Clause, index: int) -> Type | None:
            del clause
            return ARGUMENTS[index] if index < len(ARGUMENTS) else None

        self.program = Program(
            check(parse(text), argument_type),
            Records(self.shown.append, is_quiet=True),
            Sorting(),
            lambda _, reason: self.faults.append(reason),
            max_rows,
        )
        for hit in hits or (HIT,):
            if self.program.run(self.program.checked.program.clauses, hit):
                break

    @property
    def text(self) -> str:
        return "".join(self.shown)

    def rows(self, name: str = "") -> dict[tuple[object, ...], int]:
        aggregation = self.program.aggregations[name]
        return {key: aggregation.number(row) for key, row in aggregation.rows.items()}


def shown(expression: str, format_: str = "%d", *hits: Hit) -> str:
    return Ran(f'a:::b {{ printf("{format_}", {expression}); }}', *hits).text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7 / 2", 3), ("-7 / 2", -3), ("-7 % 3", -1), ("7 % -3", 1), ("1 << 4 | 1", 17), ("-16 >> 2", -4),
        ("2147483647 + 1", -2147483648), ("2147483647L + 1", 2147483648), ("(uint8_t)300", 44), ("(char)200", -56),
        ("!5", 0), ("!0", 1), ("~0", -1), ("1 ^^ 1", 0), ("1 ^^ 0", 1), ("5 && 0", 0), ("0 || 3", 1),
        ("-1 < 1u", 0), ("-1L < 1u", 1), ("arg0", -5), ("args[0] / 2", -2), ("args[1] > 5", 1), ("arg1 > 5", 0),
        ("args[1] / 2 == 9223372036854775807", 1), ("arg3 + arg9", 9), ("pid + tid + uid + gid + cpu", 10524),
        ("timestamp", 5000), ("walltimestamp / 1000000000", 10**9), ("id", 7), ("pid == 4711 ? 1 : 2", 1),
        ('execname == "shop"', 1), ('"a" < "b"', 1), ("execname != probename", 1),
        ('probename == "a-sale"', 1), ('"a__sale" == probename', 1), ('probename != "a_sale"', 1),
        ("strlen(args[2])", 8), ('index(args[2], "p")', 4), ('index(args[2], "p", 5)', 5), ('index(args[2], "x")', -1),
        ("sizeof_like = 3", 3), ("(x = 4) + x", 8), ("x++ + ++x", 2), ("x -= 3", -3),
        ("n[1, execname]++ + n[1, execname]", 1), ("ntohs(0x1234)", 0x3412), ("htonl(1)", 1 << 24),
        ("ntohl(arg0) == 0xfbffffff", 1), ("ntohll(1) >> 56", 1), ("ntohs(256) - 2 < 0", 1),
    ],
)  # fmt: skip
def test_numbers(expression: str, value: int) -> None:
    assert shown(expression) == str(value)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("args[2]", "an apple"), ("copyinstr(arg2)", "an apple"), ("copyinstr(arg2, 2)", "an"),
        ('strjoin(probeprov, strjoin(":", probename))', "shop4711:a-sale"), ("substr(args[2], 3)", "apple"),
        ("substr(args[2], 3, 2)", "ap"), ("substr(args[2], -5, 3)", "app"),
        ("substr(args[2], -10, 4)", "an"), ("substr(args[2], -10, 1)", ""), ("substr(args[2], 1, -5)", "n "),
        ('strstr(args[2], "app")', "apple"),
        ('strstr(args[2], "x")', ""), ('basename("/usr/lib/")', "lib"), ('dirname("/usr/lib")', "/usr"),
        ("stringof(execname)", "shop"), ("probemod", "shop"), ("probefunc", "sell"),
        ('pid ? "yes" : "no"', "yes"),
    ],
)  # fmt: skip
def test_strings(expression: str, text: str) -> None:
    assert shown(expression, "%s") == text


@pytest.mark.parametrize("change", ["n[++i]++", "++n[++i]", "n[++i] += 1", "n[++i] = 1"])
def test_keys_of_what_is_changed_are_evaluated_once(change: str) -> None:
    ran = Ran(f"a:::b {{ {change}; trace(i); trace(n[1]); }}")
    assert ran.text == "11"


def test_variables_live_where_they_belong() -> None:
    program = """
        int seen[int];
        a:::b { all++; self->mine++; }
        a:::b { printf("%d %d %d\\n", all, self->mine, seen[tid]); seen[tid] = 1; }
    """
    ran = Ran(program, HIT, replace(HIT, tid=1), HIT, replace(HIT, pid=1))
    assert ran.text == "1 1 0\n2 1 0\n3 2 1\n4 1 1\n"


def test_clause_variables_live_through_the_clauses_of_one_hit() -> None:
    program = """
        this int x;
        a:::b { trace(this->x); this->x = 5; }
        a:::b /this->x == 5/ { this->x++; }
        a:::b { trace(1 / (arg0 + 5)); this->x = 0; }
        a:::b { trace(this->x); trace(","); }
    """
    # whether the third one fails or not
    assert Ran(program, HIT, replace(HIT, arguments={0: -4}), HIT).text == "06,010,06,"


@pytest.mark.parametrize(
    "leaving", ["exit(3); trace(2);", "if (arg0) { exit(3); trace(2); } trace(2);", "exit(3); exit(4); @ = count();"]
)
def test_nothing_runs_behind_exit(leaving: str) -> None:
    ran = Ran(f"a:::b {{ trace(1); }} a:::b {{ {leaving} }} a:::b {{ trace(3); }}", HIT, HIT)
    assert ran.text == "1"
    assert ran.program.exit_status == 3
    assert not any(aggregation.rows for aggregation in ran.program.aggregations.values())


def test_zero_frees_an_element() -> None:
    ran = Ran("a:::b { self->x = 1; n[1] = 2; names[1] = execname; } a:::b { self->x = 0; n[1] = 0; }")
    assert set(ran.program.variables.shared) == {("names", (1,))}
    assert ran.program.variables.of_threads == {}


def test_elements_without_room_are_counted() -> None:
    ran = Ran("a:::b { n[tid] = 1; }")
    ran.program.variables.max_elements = 3
    for tid in range(10):
        ran.program.run(ran.program.checked.program.clauses, replace(HIT, tid=tid))
    # one was there already
    assert len(ran.program.variables.shared) == 3
    assert ran.program.variables.dropped == 8


def test_predicates_and_branches_choose() -> None:
    ran = Ran(
        "a:::b /arg0 > 0/ { trace(1); }"
        "a:::b /arg0 < 0/ { if (pid == 1) { trace(2) } else if (tid) { trace(3) } trace(4); }"
    )
    assert ran.text == "34"


@pytest.mark.parametrize(
    ("statements", "fault", "text"),
    [
        ("trace(1); trace(1 / zero); trace(2);", "divide-by-zero", ""),
        ("trace(copyinstr(arg0));", "copyinstr(arg0): invalid address", ""),
        ("@ = count(); trace(args[2]); @ = count();", "arg2: swapped out", ""),
        ("normalize(@, zero);", "divide-by-zero", ""),
    ],
)
def test_a_fault_ends_a_clause_alone(statements: str, fault: str, text: str) -> None:
    hit = replace(HIT, strings={2: None}, missing={2: "swapped out"})
    ran = Ran(f"int zero; a:::b {{ @ = count(); }} a:::b {{ {statements} }} a:::b {{ trace(9); }}", hit)
    assert (ran.faults, ran.text) == ([fault], f"{text}9")


def test_a_field_that_is_not_known_is_a_fault() -> None:
    assert Ran("a:::b { trace(uid); }", replace(HIT, uid=None)).faults == ["uid is not known of this hit"]


def test_aggregations() -> None:
    hits = [replace(HIT, tid=tid, arguments={0: value}) for tid, value in ((1, 5), (2, -3), (1, 7))]
    ran = Ran(
        "a:::b { @c[tid] = count(); @s[tid, execname] = sum(arg0); @l = min(arg0); @g = max(arg0); @v = avg(arg0);"
        " @q = quantize(arg0, tid); }",
        *hits,
    )
    assert ran.rows("c") == {(1,): 2, (2,): 1}
    assert ran.rows("s") == {(1, "shop"): 12, (2, "shop"): -3}
    assert (ran.rows("l"), ran.rows("g"), ran.rows("v")) == ({(): -3}, {(): 7}, {(): 3})
    ((row,),) = [ran.program.aggregations["q"].rows.values()]
    assert sum(row.bins.values()) == 4


def test_aggregations_are_changed_and_printed() -> None:
    hits = [replace(HIT, tid=tid) for tid in (1, 1, 1, 2, 2, 3)]
    ran = Ran("a:::b { @[tid] = count(); }", *hits)
    more = Ran(
        'a:::b { @[tid] = count(); } a:::b /arg3 == 1/ { trunc(@, 2); printa("%d=%@d ", @); normalize(@, 2);'
        ' printa("%@d ", @); denormalize(@); clear(@); printa("%@d ", @); }',
        *hits,
        replace(HIT, tid=1, arguments={3: 1}),
    )
    assert ran.rows() == {(1,): 3, (2,): 2, (3,): 1}
    assert more.text == "2=2 1=4 1 2 0 0 "
    assert Ran("a:::b { @[tid] = count(); }", *hits, max_rows=2).program.aggregations[""].dropped == 1


def test_exit() -> None:
    ran = Ran("a:::b { exit(300); trace(1); }")
    assert (ran.program.exit_status, ran.text) == (44, "")


def test_a_line_begins_before_a_clause_prints() -> None:
    shown_lines: list[str] = []
    program = Program(
        check(parse("a:::b { } a:::c { x = 1; } a:::d { trace(1); }"), lambda *_: None),
        Records(shown_lines.append, is_quiet=False),
        Sorting(),
        lambda *_: None,
    )
    program.run(program.checked.program.clauses, HIT)
    lines = "".join(shown_lines).splitlines()
    assert lines[0].split() == ["CPU", "ID", "FUNCTION:NAME"]
    assert [line.split() for line in lines[1:]] == [["1", "7", "sell:a-sale"], ["1", "7", "sell:a-sale", "1"]]


@given(st.text(max_size=20), st.integers(-25, 25), st.integers(-25, 25))
def test_parts_of_a_text_are_of_it(text: str, start: int, length: int) -> None:
    part = texts.substr(text, start, length)
    assert part in text
    assert length < 0 or len(part) <= length
    if 0 <= start <= len(text):
        assert texts.substr(text, start) == text[start:]
        assert length < 0 or part == text[start : start + length]


@given(st.lists(st.sampled_from(["/", "a", "bc", "."]), max_size=6).map("".join))
def test_paths_are_divided_as_the_shell_does(path: str) -> None:
    for command, divide in ("basename", texts.basename), ("dirname", texts.dirname):
        if path.strip("/") or command == "dirname":
            # POSIX leaves open what the name of an empty path is
            assert divide(path or ".") == SHELL[command](path or ".")


def _basename(path: str) -> str:
    stripped = path.rstrip("/")
    return stripped.split("/")[-1] if stripped else "/"


def _dirname(path: str) -> str:
    stripped = path.rstrip("/")
    if not stripped:
        return "/"
    if "/" not in stripped:
        return "."
    return stripped[: stripped.rindex("/")].rstrip("/") or "/"


SHELL = {"basename": _basename, "dirname": _dirname}

VARIABLES = {"int8_t": "c", "uint16_t": "s", "int": "i", "unsigned int": "u", "long": "l", "unsigned long": "m"}
VALUES = {"c": -100, "s": 65_000, "i": -2_000_000_000, "u": 4_000_000_000, "l": -(2**62), "m": 2**64 - 3}


def expressions(count: int) -> Iterator[str]:
    """Yield expressions that C defines, with -fwrapv, for the compiler to be asked."""
    chance = random.Random(20)

    def leaf() -> str:
        return chance.choice(
            [*VALUES, str(chance.randrange(100)), f"{chance.randrange(2**33)}L", f"{chance.randrange(100)}u"]
        )

    def made(depth: int) -> str:
        if not depth:
            return leaf()
        left, right = made(depth - 1), made(chance.randrange(depth))
        match chance.randrange(8):
            case 0:
                return f"({left} {chance.choice(['/', '%'])} {chance.choice(['7', '3u', '1000L', '-5'])})"
            case 1:
                return f"({left} {chance.choice(['<<', '>>'])} {chance.randrange(31)})"
            case 2:
                return f"({chance.choice('-~!')}{left})"
            case 3:
                return f"(({chance.choice([*VARIABLES, 'char', 'uint8_t', 'short'])}){left})"
            case 4:
                return f"({left} ? {right} : {leaf()})"
            case 5:
                return f"({left} {chance.choice(['<', '<=', '==', '!=', '>', '&&', '||'])} {right})"
            case _:
                return f"({left} {chance.choice('+-*&|^')} {right})"

    for _ in range(count):
        yield made(4)


def test_integers_are_those_of_the_c_compiler(tmp_path: Path) -> None:
    asked = list(expressions(400))
    declared = "".join(
        f"volatile {kind} {name} = {VALUES[name]}{'UL' if name == 'm' else ''};\n" for kind, name in VARIABLES.items()
    )
    printed = "".join(f'printf("%lld\\n", (long long)({each}));\n' for each in asked)
    source = tmp_path / "asked.c"
    source.write_text(f"#include <stdint.h>\n#include <stdio.h>\n{declared}int main(void) {{\n{printed}}}\n")
    subprocess.run(["gcc", "-w", "-fwrapv", "-fsigned-char", "-o", tmp_path / "asked", source], check=True)
    answers = subprocess.run([tmp_path / "asked"], capture_output=True, text=True, check=True).stdout.split()
    variables = "".join(f"{kind} {name};" for kind, name in VARIABLES.items())
    assigned = "".join(f"{name} = {value};" for name, value in VALUES.items())
    statements = "".join(f'printf("%d ", (long)({each}));' for each in asked)
    ran = Ran(f"{variables} a:::b {{ {assigned} {statements} }}")
    assert ran.faults == []
    wrong = [
        (one, ours, theirs)
        for one, ours, theirs in zip(asked, ran.text.split(), answers, strict=True)
        if ours != theirs
    ]
    assert wrong == []
