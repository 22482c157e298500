"""Every value delivered is the one that gdb reads at that note.

The notes are generated: arguments with a size and without one, in any order, and operands of every form that gdb knows.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stapsdtd.client import Value
from tests.support import TARGETS, Daemon, Recorder, require, wait_for

pytestmark = pytest.mark.kernel

NOTES = 1000
MOST_ARGUMENTS = 8
TABLE_BYTES = 256
PROVIDER = "judged"
INDEXED = "tracefs cannot add a base and an index"


@dataclass(frozen=True, slots=True)
class Machine:
    """word: bytes of a register. widths: the names of parts of registers, by their width in bytes. bases: registers
    that point to the middle of a table. index: a register with a small number.

    wait: reads a byte of standard input. leave: ends the program.
    """

    flags: Sequence[str]
    word: int
    widths: dict[int, Sequence[str]]
    bases: Sequence[str]
    index: str
    wait: str
    leave: str

    @property
    def values(self) -> Sequence[str]:
        """The registers that hold any number."""
        return [name for name in self.widths[self.word] if name not in (*self.bases, self.index)]


X86_64 = Machine(
    flags=("-no-pie", "-static", "-nostdlib"),
    word=8,
    widths={
        8: ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", *(f"r{number}" for number in range(8, 16))),
        4: ("eax", "ebx", "ecx", "edx", "esi", "edi", "ebp", *(f"r{number}d" for number in range(8, 16))),
        2: ("ax", "bx", "cx", "dx", "si", "di", "bp", *(f"r{number}w" for number in range(8, 16))),
        1: ("al", "ah", "bl", "bh", "cl", "ch", "dl", "dh", "sil", "dil", "bpl"),  # gdb has other names for r8b to r15b
    },
    bases=("rbx", "rbp"),
    index="rcx",
    wait="xor %eax, %eax; xor %edi, %edi; lea byte, %rsi; mov $1, %edx; syscall",
    leave="mov $60, %eax; xor %edi, %edi; syscall",
)
I386 = Machine(
    flags=("-m32", "-no-pie", "-static", "-nostdlib"),
    word=4,
    widths={
        4: ("eax", "ebx", "ecx", "edx", "esi", "edi", "ebp"),
        2: ("ax", "bx", "cx", "dx", "si", "di", "bp"),
        1: ("al", "ah", "bl", "bh", "cl", "ch", "dl", "dh"),
    },
    bases=("ebx", "ebp"),
    index="ecx",
    wait="mov $3, %eax; xor %ebx, %ebx; lea byte, %ecx; mov $1, %edx; int $0x80",
    leave="mov $1, %eax; xor %ebx, %ebx; int $0x80",
)


def _operand(machine: Machine, size: int, random_: random.Random) -> str:
    """Return an operand that has at least so many bytes."""
    displacement = random_.randrange(-TABLE_BYTES // 2, TABLE_BYTES // 2 - 4 * 8 - machine.word)
    base = random_.choice(machine.bases)
    forms: list[Callable[[], str]] = [
        lambda: f"${random_.choice([random_.randrange(-128, 128), random_.randrange(-(1 << 31), 1 << 31)])}",
        lambda: f"%{random_.choice(machine.widths[size])}",
        lambda: f"%{random_.choice(machine.widths[machine.word])}",
        lambda: f"{displacement}(%{base})",
        lambda: f"(%{base})",
        lambda: f"{displacement}(%{base},%{machine.index},{random_.choice([1, 2, 4, 8])})",
    ]
    return random_.choice(forms)()


def _argument(machine: Machine, random_: random.Random) -> str:
    size = random_.choice([each for each in (1, 2, 4, 8) if each <= machine.word])
    if random_.random() < 0.4:
        return _operand(machine, machine.word, random_)
    return f"{random_.choice(['', '-'])}{size}@{_operand(machine, size, random_)}"


def _source(machine: Machine, notes: Sequence[str], random_: random.Random) -> str:
    """Return a program that waits for a byte of input, and then has the same values in its registers at every note."""
    word = f".{machine.word}byte"
    points = [f"mov ${random_.getrandbits(8 * machine.word)}, %{name}" for name in machine.values]
    points += [f"lea table + {TABLE_BYTES // 2}, %{base}" for base in machine.bases]
    nops = [
        f'nop\n.pushsection .note.stapsdt, "", "note"\n.balign 4\n.4byte 8, 2f-1f, 3\n.asciz "stapsdt"\n'
        f'1: {word} probes + {number}, base, 0\n.asciz "{PROVIDER}"\n.asciz "note{number}"\n.asciz "{text}"\n'
        f"2: .balign 4\n.popsection"
        for number, text in enumerate(notes)
    ]
    code = [machine.wait, *points, f"mov $3, %{machine.index}"]
    table = ", ".join(str(random_.getrandbits(8)) for _ in range(TABLE_BYTES))
    return "\n".join(
        [
            *(".globl _start, probes, probe_count", f".set probe_count, {len(notes)}"),
            # without which gdb sees no notes
            *('.section .stapsdt.base, "aG", "progbits", .stapsdt.base, comdat', "base: .space 1"),
            *(".data", f"table: .byte {table}", "byte: .byte 0", ".text", "_start:", *code),
            *("probes:", *nops, machine.leave, '.section .note.GNU-stack, "", @progbits'),
            "",
        ]
    )


def _judged(program: Path, folder: Path) -> dict[int, list[str]]:
    """Return what gdb reads at each note, by address."""
    require(shutil.which("gdb"), "gdb")
    told = folder / "values"
    subprocess.run(
        ["gdb", "-nx", "-batch", "-x", TARGETS / "gdb_values.py", program],
        input=b"\n",
        env={**os.environ, "GDB_VALUES": str(told)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = [line.split() for line in told.read_text().splitlines()]
    return {int(address, 16): values for address, *values in rows}


@pytest.mark.parametrize("machine", [X86_64, I386], ids=["x86-64", "i386"])
def test_every_note_has_the_values_that_gdb_reads(
    daemon: Daemon, engine: str, tmp_path: Path, machine: Machine
) -> None:
    random_ = random.Random(machine.word)
    notes = [
        " ".join(_argument(machine, random_) for _ in range(random_.randint(1, MOST_ARGUMENTS))) for _ in range(NOTES)
    ]
    program, source = tmp_path / "program", tmp_path / "program.S"
    source.write_text(_source(machine, notes, random_))
    subprocess.run(["gcc", *machine.flags, "-o", program, source], check=True)
    judged = list(_judged(program, tmp_path).values())
    with (
        subprocess.Popen([program], stdin=subprocess.PIPE) as running,
        Recorder(daemon.target, f"{PROVIDER}:*", pids=[running.pid], kernel_buffer_kib=16384) as recorder,
    ):
        wait_for(lambda: len(recorder.armed()) == NOTES, "all notes to be armed")
        running.communicate(b"\n")
    assert [event.probe.name for event in recorder.events] == [f"note{number}" for number in range(NOTES)]
    for event, text, told in zip(recorder.events, notes, judged, strict=True):
        assert [argument.text for argument in event.site.arguments] == text.split()
        wrong = {
            argument.text: (event.unavailable.get(place, value), expected)
            for place, (argument, value, expected) in enumerate(
                zip(event.site.arguments, event.values, told, strict=True)
            )
            if not (engine == "ftrace" and INDEXED in event.unavailable.get(place, ""))
            and _bits(value, argument.size) != _bits(int(expected, 16), argument.size)
        }
        assert wrong == {}, text


def _bits(value: Value, size: int) -> int | None:
    """Narrow a value: gdb widens what has no size of its own."""
    return value % (1 << 8 * size) if isinstance(value, int) else None
