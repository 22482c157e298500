"""What D programs make of memory behind a probe's arguments: copyin(), pointers to it, and tracemem()."""

from __future__ import annotations

import pytest

from stapsdtd.query.d.captured import Place
from stapsdtd.query.d.check import check
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.interpret import Program
from stapsdtd.query.d.machine import Hit
from stapsdtd.query.d.needs import Needs, needs_of
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.print_aggregations import Sorting
from stapsdtd.query.d.records import Records
from stapsdtd.query.d.text import text_of
from stapsdtd.query.d.values import INT64, Bytes, Integer, Pointer, Type

MEMORY = b"\xfe\xff\xff\xff\x01\0\0\0"
NUMBERS = {Place(0, 0, 8): MEMORY, Place(0, 4, 8): MEMORY[4:], Place(1, 0, 6): b"abc\0de"}


def checked(text: str) -> Checked:
    return check(parse(text), lambda *_: INT64)


def needs(text: str) -> Needs:
    program = checked(text)
    return needs_of(program, program.program.clauses)


def run(statements: str, memory: dict[Place, bytes | None] | None = None) -> tuple[str, list[str]]:
    """What a clause prints, and why it ended."""
    shown: list[str] = []
    faults: list[str] = []
    program = checked(f"a:::b {{ {statements} }}")
    hit = Hit(
        1, "a", "", "", "b", arguments={0: 4096, 1: 8192}, memory=NUMBERS if memory is None else memory,
        missing={Place(0, 0, 8): "page not present"},
    )  # fmt: skip
    running = Program(program, Records(shown.append, is_quiet=True), Sorting(), lambda _, reason: faults.append(reason))
    running.run(program.program.clauses, hit)
    return "".join(shown), faults


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("copyin(arg0, 8)", Bytes()),
        ("(int *)copyin(arg0, 8)", Bytes(Integer(32, is_signed=True))),
        ("*(uint16_t *)copyin(arg0, 8)", Integer(16, is_signed=False)),
        ("*(char **)copyin(arg0, 8)", Pointer(Integer(8, is_signed=True))),
        ("(char *)arg0", Pointer(Integer(8, is_signed=True))),
        ("sizeof (uint32_t)", Integer(64, is_signed=False)),
    ],
)
def test_types(expression: str, kind: Type) -> None:
    program = checked(f"a:::b {{ {expression}; }}")
    statements = program.program.clauses[0].statements
    assert statements is not None
    assert program.types[id(statements[0])] == kind
    assert parse(text_of(program.program)) == program.program


@pytest.mark.parametrize(
    ("statements", "printed"),
    [
        ("trace(*(int *)copyin(arg0, 8));", "-2"),
        ("trace(*(uint32_t *)copyin(arg0, 8));", "4294967294"),
        ("trace(*(int *)copyin(arg0 + 4, sizeof (int)));", "1"),
        ("trace(*(long *)copyin(args[0], 8));", str((1 << 32) + 0xFFFFFFFE)),
        ("trace(*(void **)copyin(arg0, 8));", str((1 << 32) + 0xFFFFFFFE)),
        ("trace(*(int *)copyin(arg0, 8) + 3);", "1"),
        ("this->p = (int *)copyin(arg0, 8); trace(*this->p); trace(*(uint8_t *)this->p);", "-2254"),
        ("trace(stringof(copyin(arg1, 6)));", "abc"),
        ('printf("<%s>", (string)copyin(arg1, 6));', "<abc>"),
        ('printf("<%s>", copyin(arg1, 6));', "<abc>"),
        ("trace(sizeof (int) + sizeof (char *) + sizeof (string));", "268"),
        ("trace(strlen(stringof(copyin(arg1, 6))));", "3"),
        ("trace(10 * 2);", "20"),
    ],
)
def test_values(statements: str, printed: str) -> None:
    assert run(statements) == (printed, [])


@pytest.mark.parametrize(
    ("action", "count"),
    [
        ("trace(copyin(arg1, 6))", 6),
        ("tracemem(copyin(arg1, 6), 6)", 6),
        ("tracemem(copyin(arg1, 6), 4)", 4),
        ("tracemem(copyin(arg1, 6), 4, 2)", 2),
        # a limit that is none is ignored
        ("tracemem(copyin(arg1, 6), 4, -1)", 4),
        ("tracemem(copyin(arg1, 6), 4, 5)", 4),
    ],
)
def test_memory_is_printed_as_a_table(action: str, count: int) -> None:
    title = "             0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f  0123456789abcdef"
    codes = " ".join(f"{byte:02x}" for byte in b"abc\0de"[:count])
    assert run(f"{action};") == (f"\n{title}\n         0: {codes:<47}  {'abc.de'[:count]}\n", [])


def test_nothing_is_printed_of_nothing() -> None:
    assert run("tracemem(copyin(arg1, 6), 4, 0);") == ("", [])


@pytest.mark.parametrize(
    ("statement", "memory", "fault"),
    [
        ("trace(*(int *)copyin(arg0, 8));", {Place(0, 0, 8): None}, "copyin(arg0): page not present"),
        ("trace(copyin(arg0, 4));", {}, "copyin(arg0): invalid address"),
        ("trace(*(long *)copyin(arg0 + 4, 4));", NUMBERS, "invalid address"),
        ("trace(*self->never);", NUMBERS, "invalid address"),
        ("tracemem(copyin(arg1, 6), 7);", NUMBERS, "invalid address"),
    ],
)
def test_what_is_not_there_ends_the_clause(statement: str, memory: dict[Place, bytes | None], fault: str) -> None:
    text = f"{statement} trace(5); self->never = (int *)copyin(arg0, 8);"
    if "never" in statement:
        text = f"if (0) {{ self->never = (int *)copyin(arg0, 8); }} {statement} trace(5);"
    assert run(text, memory) == ("", [fault])


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("copyin(arg0);", "copyin() takes 2 arguments, and here are 1"),
        ("copyin(arg0, arg1);", "argument #2 of copyin() must be an integer constant"),
        ("copyin(arg0, 0);", "copyin() copies 1 to 4096 bytes behind an argument"),
        ("copyin(arg0, 4097);", "copyin() copies 1 to 4096 bytes behind an argument"),
        ("copyin(arg0 + 4090, 8);", "copyin() copies 1 to 4096 bytes behind an argument"),
        ("copyin(arg0, -1);", "copyin() copies 1 to 4096 bytes behind an argument"),
        ("copyin(timestamp, 4);", "copyin() takes an argument, such as arg0 or arg0 + 8, and not timestamp: memory is"),
        ("copyin(arg0 - 8, 4);", "copyin() takes an argument, such as arg0 or arg0 + 8, and not arg0 - 8: memory is"),
        (
            "copyin((int *)arg0 + 1, 4);",
            "copyin() takes an argument, such as arg0 or arg0 + 8, and not ((int *)arg0) +",
        ),
        (
            "*(int *)arg0;",
            "cannot dereference (int *)arg0: memory is captured when the probe fires; write *(int *)copyin(",
        ),
        ("*arg0;", "cannot dereference a long long; write *(int *)copyin(arg0, sizeof (int))"),
        ("*copyin(arg0, 4);", "cannot dereference a void *; write *(int *)copyin(arg0, sizeof (int))"),
        ("copyin(arg0, 4) + 1;", "an operand of + must be an integer"),
        ("copyin(arg0, 4) == copyin(arg1, 4);", "memory cannot be compared; use stringof()"),
        ('copyin(arg0, 4) == "a";', "operands have incompatible types: void * == string"),
        ("@[copyin(arg0, 4)] = count();", "a key cannot be memory; use stringof()"),
        ("x[copyin(arg0, 4)] = 1;", "a key cannot be memory; use stringof()"),
        ("x = copyin(arg0, 4); x = 1;", "operands have incompatible types: void * = int"),
        ("strlen(copyin(arg0, 4));", "argument #1 of strlen() must be a string"),
        ("tracemem(arg0, 4);", "argument #1 of tracemem() must be what copyin() has copied"),
        ("*(int *)copyin(arg0, 4) = 1;", "cannot be assigned to"),
        ("copyinstr(*(char **)copyin(arg0, 8));", "copyinstr() takes an argument, such as arg0, and not *((char * *)"),
        ("sizeof (pid);", "type pid is not known"),
    ],
)
def test_what_is_refused(statement: str, reason: str) -> None:
    with pytest.raises(DError) as caught:
        needs(f"a:::b {{ {statement} }}")
    assert reason in caught.value.reason
    assert caught.value.at.line == 1


def test_needs() -> None:
    text = "a:::b { copyin(arg0, 8); copyin(16 + arg1, 4); copyin((char *)args[0], sizeof (long)); }"
    assert needs(text).memory == {Place(0, 0, 8), Place(1, 16, 20)}
