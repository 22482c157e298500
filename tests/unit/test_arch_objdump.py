"""What we say of the probes of `cross`, against what binutils say: readelf, objdump, nm and as of each target.

Every operand's text goes through the target's assembler, and objdump tells what the assembler took it for. The text's
own syntax decides here whether it is a register, memory or a value, and sums are the assembler's; nothing is ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from stapsdtd.model import Address, Argument, Constant, Memory, Operand, Register, Unavailable
from tests.support import require
from tests.unit import cross
from tests.unit.cross import LEVELS, LINKED, TARGETS, Target

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)

OBJECTS = len(LEVELS) * len(LINKED)
LEAST_SITES = 20 * OBJECTS
LEAST_OPERANDS = {"gcc": {"value": 7, "memory": 30, "register": 15}, "clang": {"value": 7, "memory": 30}}
LEAST_SYMBOLS = {"x86-64-gcc": 15, "i386-gcc": 20, "arm-gcc": 6, "arm-clang": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cross.prepared(tmp_path_factory)


def run(target: Target, tool: str, *arguments: str | Path) -> str:
    name = target.tool(tool)
    require(shutil.which(name), name)
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run([name, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


class Note(NamedTuple):
    provider: str
    name: str
    location_vaddr: int
    base_vaddr: int
    semaphore_vaddr: int
    arguments: str


class Segment(NamedTuple):
    offset: int
    vaddr: int
    file_size: int
    flags: str


class Readelf:
    """What readelf says of a file."""

    _NOTE = re.compile(
        r"NT_STAPSDT.* Provider: (.*)\n"
        r" +Name: (.*)\n"
        r" +Location: (\w+), Base: (\w+), Semaphore: (\w+)\n"
        r" +Arguments: (.*)\n"
    )
    _LOAD = re.compile(r"^  LOAD +(\w+) (\w+) \w+ (\w+) \w+ (...) ", re.MULTILINE)
    _BASE = re.compile(r" \.stapsdt\.base +PROGBITS +(\w+) ")

    def __init__(self, target: Target, path: Path) -> None:
        text = run(target, "readelf", "-nlSW", path)
        self.notes = [
            Note(provider, name, int(location, 16), int(base, 16), int(semaphore, 16), arguments)
            for provider, name, location, base, semaphore, arguments in self._NOTE.findall(text)
        ]
        self._segments = [
            Segment(int(offset, 16), int(vaddr, 16), int(size, 16), flags)
            for offset, vaddr, size, flags in self._LOAD.findall(text)
        ]
        base_section = self._BASE.search(text)
        assert base_section
        self.base_vaddr = int(base_section[1], 16)

    def offset(self, vaddr: int, flag: Literal["E", "W"]) -> int:
        """Where in the file an address is; its segment must have the flag."""
        [segment] = [each for each in self._segments if each.vaddr <= vaddr < each.vaddr + each.file_size]
        assert flag in segment.flags
        return vaddr - segment.vaddr + segment.offset


@each_target
def test_readelf_reads_the_same_notes(folder: Path, target: Target) -> None:
    """Providers, names, locations, semaphores and the arguments' text; and nothing was prelinked."""
    sites = semaphores = 0
    for path, parsed in cross.objects(folder, target):
        readelf = Readelf(target, path)
        assert {note.base_vaddr for note in readelf.notes} == {readelf.base_vaddr}
        ours = [
            (
                site.provider,
                site.name,
                site.site_offset,
                site.semaphore_offset,
                " ".join(argument.text for argument in site.arguments),
            )
            for site in parsed.sites
        ]
        assert ours == [
            (
                note.provider,
                note.name,
                readelf.offset(note.location_vaddr, "E"),
                readelf.offset(note.semaphore_vaddr, "W") if note.semaphore_vaddr else None,
                note.arguments,
            )
            for note in readelf.notes
        ]
        sites += len(readelf.notes)
        semaphores += len({note.semaphore_vaddr for note in readelf.notes} - {0})
    assert sites >= LEAST_SITES
    assert semaphores == 2 * OBJECTS


@each_target
def test_objdump_shows_a_nop_at_each_site(folder: Path, target: Target) -> None:
    sites = 0
    for path, parsed in cross.objects(folder, target):
        readelf = Readelf(target, path)
        text = run(target, "objdump", "-d", "--no-show-raw-insn", path)
        nops = re.findall(r"^ *([0-9a-f]+):\tnop\b", text, re.MULTILINE)
        offsets = {site.site_offset for site in parsed.sites}
        assert offsets <= {readelf.offset(int(nop, 16), "E") for nop in nops}
        sites += len(offsets)
    assert sites >= LEAST_SITES


class Syntax(NamedTuple):
    """How a text tells what it is, and which instruction takes it as its first or its last operand.

    What is neither register nor memory is a value, behind a prefix where the architecture has one.
    sum: what objdump prints for memory.
    """

    register: str
    use_register: str
    memory: str
    load_memory: str
    sum: str
    value_prefix: str = ""


_PARENTHESES = r"(?P<number>-?\w+)?(?:\(%?(?P<base>\w+)?(?:,%?(?P<index>\w+))?(?:,(?P<scale>[1248]))?\))?"
_BRACKETS = r"\[(?P<base>\w+)(?:, #(?P<number>-?\w+)|, (?P<index>\w+)(?:, lsl #(?P<shift>\w+))?)?\]"

SYNTAXES = {
    "x86-64": Syntax(r"%[^:]*", "test {0}, {0}", r"[^$%].*", "lea {}, %rax", _PARENTHESES, "$"),
    "i386": Syntax(r"%[^:]*", "test {0}, {0}", r"[^$%].*", "lea {}, %eax", _PARENTHESES, "$"),
    "aarch64": Syntax(r"[xw][0-9]+", "str {}, [sp]", r"\[.*\]", "ldrb w0, {}", _BRACKETS),
    "arm": Syntax(r"r[0-9]+|fp|ip|sp|lr", "str {}, [r0]", r"\[.*\]", "ldrb r0, {}", _BRACKETS, "#"),
    "riscv64": Syntax(r"[astx][0-9]+|[fsgt]p|ra", "sd {}, 0(a0)", r".*\(.*\)", "lb a0, {}", _PARENTHESES),
    "s390x": Syntax(r"%r[0-9]+", "stg {}, 0", r".*\(.*\)", "lay %r1, {}", _PARENTHESES),
    "ppc64le": Syntax(r"(?:%r)?[0-9]+", "std {}, 0(1)", r".*\(.*\)|.*,.*", "lbz 3, {}", _PARENTHESES, "i"),
}
AARCH64_LOADS = {2: "ldrh w0, {}", 4: "ldr w0, {}", 8: "ldr x0, {}"}
"""An index is shifted by the size of what is loaded, or not at all."""

ASSEMBLER_FLAGS = {"i386": ["--32"]}
OBJDUMP_FLAGS = {"arm": ["-M", "reg-names-raw"]}
ADDRESSES = {"i386": 1 << 32, "arm": 1 << 32}
"""How many there are, where not 1 << 64: sums wrap."""

PROGRAM_COUNTERS = {"x86-64": "rip", "i386": "eip", "arm": "r15"}
VALUE_DIRECTIVES = {1: ".byte", 2: ".2byte", 4: ".4byte", 8: ".8byte"}

_X86_FAMILIES = [
    "rax eax ax al ah", "rbx ebx bx bl bh", "rcx ecx cx cl ch", "rdx edx dx dl dh",
    "rsi esi si sil", "rdi edi di dil", "rbp ebp bp bpl", "rsp esp sp spl",
    *(f"r{number} r{number}d r{number}w r{number}b" for number in range(8, 16)),
]  # fmt: skip
WHOLE_REGISTERS = {
    "x86-64": {part: family.split()[0] for family in _X86_FAMILIES for part in family.split()},
    "i386": {part: family.split()[1] for family in _X86_FAMILIES for part in family.split()},
    "aarch64": {f"w{number}": f"x{number}" for number in range(31)},
}


def wrapped(number: int, architecture: str) -> int:
    return number % ADDRESSES.get(architecture, 1 << 64)


class Reading(NamedTuple):
    """What an operand is: a value, a register, or memory at the sum of a number and registers, each times a factor.

    number: of a register, the bit at which the operand begins.
    """

    kind: Literal["value", "register", "memory"]
    number: int
    registers: Mapping[str, int]


class Assembled(NamedTuple):
    """What the assembler took a text for, and the symbol whose address the linker is to add."""

    reading: Reading
    relocation: str | None = None
    symbol: str | None = None

    def linked(self, symbols: Mapping[str, int], architecture: str) -> Reading:
        kind, number, registers = self.reading
        assert self.symbol
        number += symbols[self.symbol]
        match self.relocation:
            case "R_X86_64_PC32":
                assert registers == {"rip": 1}
                # the instruction ends with these 4 bytes, and its end is what counts
                number, registers = number + 4, {}
            case "R_386_GOTOFF":
                number -= symbols["_GLOBAL_OFFSET_TABLE_"]
            case relocation:
                assert relocation in ("R_X86_64_32S", "R_386_32", "R_ARM_ABS32")
        return Reading(kind, wrapped(number, architecture), registers)


def assemble(target: Target, arguments: Iterable[Argument], source: Path) -> dict[str, Assembled]:
    """What the assembler takes each argument's text for. source: where to write what it is given."""
    syntax = SYNTAXES[target.architecture]
    arguments = list({argument.text: argument for argument in arguments}.values())
    text, values = [".syntax unified"] if target.architecture == "arm" else [], []
    for number, argument in enumerate(arguments):
        operand = argument.text.partition("@")[2]
        if re.fullmatch(syntax.register, operand):
            text.append(f"o{number}: {syntax.use_register.format(operand)}")
        elif re.fullmatch(syntax.memory, operand):
            text.append(f"o{number}: {_load(target.architecture, operand, argument.size).format(operand)}")
        else:
            values.append(argument)
    data = [
        f".balign 8, 0; {VALUE_DIRECTIVES[value.size]} {value.text.partition('@')[2].removeprefix(syntax.value_prefix)}"
        for value in values
    ]
    source.write_text("\n".join([*text, ".data", *data, ""]))
    output = source.with_suffix(".o")
    run(target, "as", *ASSEMBLER_FLAGS.get(target.architecture, []), "-o", output, source)
    found = {arguments[label].text: each for label, each in _read_instructions(target, output).items()}
    found |= _read_values(target, output, values)
    assert set(found) == {argument.text for argument in arguments}
    return found


def _load(architecture: str, operand: str, size: int) -> str:
    if architecture == "ppc64le" and "(" not in operand:
        return "lbzx 3, {}"
    default = SYNTAXES[architecture].load_memory
    return AARCH64_LOADS.get(size, default) if architecture == "aarch64" else default


_INSTRUCTION = re.compile(
    r"<o(?P<label>[0-9]+)>:\n"
    r" *[0-9a-f]+:\t(?P<mnemonic>\S+)\s+(?P<operands>.*?)(?:\s+(?:#|@|;|//) .*)?\n"
    r"(?:\t+[0-9a-f]+: (?P<relocation>\w+)\t(?P<symbol>[\w.]+)(?P<addend>[+-]\w+)?\n)?"
)


def _read_instructions(target: Target, output: Path) -> dict[int, Assembled]:
    """What objdump sees behind each label."""
    flags = OBJDUMP_FLAGS.get(target.architecture, [])
    text = run(target, "objdump", "-dr", "--no-show-raw-insn", *flags, output)
    return {int(found["label"]): _read_instruction(target.architecture, found) for found in _INSTRUCTION.finditer(text)}


def _read_instruction(architecture: str, found: re.Match[str]) -> Assembled:
    first, _, last = found["operands"].partition(",")
    if found["mnemonic"] == SYNTAXES[architecture].use_register.split()[0]:
        name = first.removeprefix("%")
        whole = WHOLE_REGISTERS.get(architecture, {}).get(name, name)
        return Assembled(Reading("register", 8 if name in ("ah", "bh", "ch", "dh") else 0, {whole: 1}))
    if found["mnemonic"] == "lea":
        memory = found["operands"].rpartition(",")[0]
    else:
        memory = f"({last})" if found["mnemonic"] == "lbzx" else last.strip()
    parts = re.fullmatch(SYNTAXES[architecture].sum, memory)
    assert parts, found[0]
    group = parts.groupdict("")
    number = int(group["number"] or "0", 0) + int(found["addend"] or "0", 0)
    factor = int(group.get("scale") or 1) << int(group.get("shift") or 0)
    registers = Counter({group["base"]: 1}) + Counter({group["index"]: factor})
    for nothing in ("", "0"):  # 0 is how ppc64le prints it
        registers.pop(nothing, None)
    reading = Reading("memory", wrapped(number, architecture), registers)
    return Assembled(reading, found["relocation"], found["symbol"])


def _read_values(target: Target, output: Path, values: Iterable[Argument]) -> dict[str, Assembled]:
    """What objdump sees in the data, where each has 8 bytes."""
    text = run(target, "objdump", "-sr", "-j", ".data", output)
    data = bytes.fromhex("".join(re.findall(r"^ [0-9a-f]{4,} ((?:[0-9a-f]+ )+) ", text, re.MULTILINE)))
    relocations = {
        int(offset, 16): (relocation, symbol)
        for offset, relocation, symbol in re.findall(r"^([0-9a-f]{8,}) (\w+) +([\w.]+)$", text, re.MULTILINE)
    }
    order: Literal["big", "little"] = "big" if target.architecture == "s390x" else "little"
    found = {}
    for at, value in zip(range(0, len(data), 8), values, strict=True):
        number = int.from_bytes(data[at : at + value.size], order, signed=value.signed)
        found[value.text] = Assembled(Reading("value", number, {}), *relocations.get(at, (None, None)))
    return found


def what_we_say(operand: Operand, architecture: str, location_vaddr: int = 0) -> Reading:
    """With the location in place of the program counter."""
    counter = PROGRAM_COUNTERS.get(architecture, "")
    match operand:
        case Constant(value):
            return Reading("value", value, {})
        case Register(name, first_bit):
            return Reading("register", first_bit, {name: 1})
        case Address(base, displacement):
            assert base == counter
            return Reading("value", wrapped(location_vaddr + displacement, architecture), {})
        case Memory(base, displacement, index, scale):
            registers = Counter({base: 1} if base else {}) + Counter({index: scale} if index else {})
            number = displacement + location_vaddr * registers.pop(counter, 0)
            return Reading("memory", wrapped(number, architecture), registers)
        case Unavailable(reason):
            raise AssertionError(reason)


def names_symbol(argument: Argument) -> bool:
    return isinstance(argument.operand, Memory | Address) and argument.operand.symbol is not None


@each_target
def test_the_assembler_reads_the_same_operands(folder: Path, target: Target) -> None:
    """Registers, the sums where memory is, and constants."""
    arguments = [
        argument
        for _, parsed in cross.objects(folder, target)
        for site in parsed.sites
        for argument in site.arguments
        if not isinstance(argument.operand, Unavailable) and not names_symbol(argument)
    ]
    ours = {argument.text: Assembled(what_we_say(argument.operand, target.architecture)) for argument in arguments}
    assert ours == assemble(target, arguments, folder / f"{target.id}.s")
    counts: Counter[str] = Counter(each.reading.kind for each in ours.values())
    least = LEAST_OPERANDS["clang" if target.compiler == "clang" else "gcc"]
    assert all(counts[kind] >= count for kind, count in least.items()), counts


@pytest.mark.parametrize("target", [each for each in TARGETS if each.id in LEAST_SYMBOLS], ids=lambda target: target.id)
def test_symbols_are_where_nm_finds_them(folder: Path, target: Target) -> None:
    """At each site, with the registers and the offset that the assembler reads."""
    count = 0
    for path, parsed in cross.objects(folder, target):
        notes = Readelf(target, path).notes
        located = [
            (note.location_vaddr, argument)
            for note, site in zip(notes, parsed.sites, strict=True)
            for argument in site.arguments
            if names_symbol(argument)
        ]
        if not located:
            continue
        theirs = assemble(target, [argument for _, argument in located], folder / f"{path.name}.s")
        lines = [line.split() for line in run(target, "nm", "--defined-only", path).splitlines()]
        symbols = {name: int(vaddr, 16) for vaddr, _, name in lines}
        for location_vaddr, argument in located:
            ours = what_we_say(argument.operand, target.architecture, location_vaddr)
            assert ours == theirs[argument.text].linked(symbols, target.architecture), argument
        count += len(located)
    assert count >= LEAST_SYMBOLS[target.id]
