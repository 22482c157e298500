"""Objects changed at random, mostly where their structure is: a case is a function of seed and number alone."""

from __future__ import annotations

import functools
import os
import random
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.elf_builder import (
    AARCH64,
    ARM,
    DATA_VADDR,
    I386,
    LOONGARCH,
    NOP,
    PPC64,
    RISCV,
    S390,
    SHT_DYNSYM,
    SHT_NOTE,
    SHT_PROGBITS,
    SHT_STRTAB,
    SHT_SYMTAB,
    TEXT_VADDR,
    X86_64,
    ByteOrder,
    Elf,
    Section,
    Symbol,
)

SOURCE = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

unsigned short app_first_semaphore __attribute__((section(".probes")));
unsigned short app_second_semaphore __attribute__((section(".probes")));
struct pair { long a, b; } table[4];
static double ratio = 0.5;

__attribute__((noinline)) void first(long a, unsigned char b, short c, struct pair *p)
{
    STAP_PROBE6(app, first, a, b, c, p->b, p[a].a, (char)b);
    STAP_PROBE4(app, second, ratio, table[2].a, (short)-9, "text");
}

int main(int argc, char **argv)
{
    first(argc, 1, 2, table);
    return argv == 0;
}
"""

COMPILATIONS = {
    "pie": ("-O2",),
    "fixed": ("-O0", "-no-pie", "-fno-pie"),
    "library": ("-O2", "-shared", "-fPIC"),
    "bare": ("-O1", "-shared", "-fPIC", "-nostdlib", "-s"),
    "object": ("-O2", "-c"),
    "m32-pie": ("-O1", "-m32", "-nostdlib", "-fPIE", "-pie", "-Wl,-e,main"),
    "m32-library": ("-O2", "-m32", "-nostdlib", "-shared", "-fPIC"),
}

ARGUMENTS: dict[tuple[int, int, ByteOrder], tuple[bytes, bytes]] = {
    (X86_64, 64, "<"): (NOP, b"8@%rdi -4@-8(%rbp) 8@NBuffers(%rip) 8@$table+8 2@8(%rax,%rcx,4) 24@(%rsp) 8f@(%rax)"),
    (X86_64, 32, "<"): (NOP, b"8@%rdi -4@-8(%rbp)"),
    (I386, 32, "<"): (NOP, b"4@%eax -4@-8(%ebp) 4@NBuffers 8f@table@GOTOFF(%ebx) -1@%ah 4@$5"),
    (ARM, 32, "<"): (bytes.fromhex("00f020e3"), b"4@r0 -4@[fp, #-8] 4@[r2, r0, lsl #2] 4@#NBuffers 4@[r1, r2]"),
    (AARCH64, 64, "<"): (bytes.fromhex("1f2003d5"), b"8@x0 -4@[sp, 96] 8@NBuffers 8@[x0, x1, lsl 3] 4@w3 8@#-1"),
    (RISCV, 64, "<"): (bytes.fromhex("13000000"), b"8@a1 -4@-88(s0) 8@NBuffers 8@5"),
    (S390, 64, ">"): (bytes.fromhex("0707") * 2, b"8@%r2 -4@-28(%r15) 8@0(%r5,%r4) 8@NBuffers 4@71"),
    (PPC64, 64, "<"): (bytes.fromhex("00000060"), b"8@3 -4@8(3) 8@%r4 8@i42 8@NBuffers 8@0(8)"),
    (PPC64, 64, ">"): (bytes.fromhex("60000000"), b"8@3 -4@8(3)"),
    (LOONGARCH, 64, "<"): (bytes.fromhex("00004003"), b"8@$r4 -4@[$r4, 8] 8@NBuffers 8@5"),
}

_OPERANDS = b"""
%rax %ah %ax %r15b %eip %rip (%rip) NBuffers(%rip) -8(%rbp) 0x7fffffff(%rbp) -0x80000000(%rax) 8(%rax,%rbx,8)
8(%rax,%rbx,3) table(,%rax,8) $5 $-1 $18446744073709551615 $99999999999999999999 $0x8000000000000000 $sym+9999999999
NBuffers NBuffers+2147483647 -2147483648+NBuffers 18446744073709551615 %fs:8 %xmm0 %eax (%eax,%ebx,4) d@GOTOFF(%eax)
NBuffers@GOTOFF(%ebx) table@GOTOFF+2147483647(%eax) x0 w0 xzr sp [sp,8] [x0,x1,lsl#4] [sp,-1] r0 r15 [r2,r0,lsl#31]
[r0,#-4096] #5 #NBuffers a0 -88(s0) zero %r2 0(%r5,%r4) 3 8(3) i42 $r4 [$r4,8] [$r4,$r5] 0 -0 010 +8+4-2 () [] (,) %
$ @ f@ 0x 8@ 1f@(%rax) 2f@(%rax) 3@(%rax) 4096@(%rsp) 4097@(%rsp) 0@(%rax) -99999999@%rax 8f@$1 -8@$-1 1@%ah 8@%ah
\xff\xfe \xc3\xa9 \xe2\x80\xa8 \xc2\x85 \xed\xa0\x80 NBuffers\xc3\xa9(%rip) -8f@%rax 16f@(%rax) 4f@NBuffers(%rip)
""".split()

_BYTES_OF_TEXT = b" \n\r\t\v\0:'\"\\%$()[]@#,;+-=|/*fx0189aZ_.\x7f\x80\xc3\xff"

_EXTREMES = (0, 1, 2, 3, 4, 7, 8, 11, 0xFF, 0xFFF1, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32)
_EXTREMES_OF_WORDS = (*_EXTREMES, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class Field:
    at: int
    width: int


@dataclass(slots=True)
class Sample:
    """An object, and where in it fields lie that a parser believes; kinds share their chances."""

    name: str
    image: bytes
    order: ByteOrder = "<"
    fields: dict[str, list[Field]] = field(default_factory=dict)
    blocks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    texts: list[tuple[int, int]] = field(default_factory=list)


def built(machine: int, bits: int, order: ByteOrder) -> bytes:
    nop, arguments = ARGUMENTS[machine, bits, order]
    elf = Elf(nop * 16, bits=bits, byte_order=order, machine=machine)
    step = len(nop)
    elf.notes = b"".join(
        (
            elf.note(arguments=arguments, semaphore=DATA_VADDR),
            elf.note(TEXT_VADDR + step, name=b"other", arguments=arguments, semaphore=DATA_VADDR + 2),
            elf.note(TEXT_VADDR + 2 * step, b"p r\no:v", b"n\xffm\"e'", b":"),
            elf.note(TEXT_VADDR, arguments=arguments, semaphore=DATA_VADDR),
        )
    )
    elf.symbols = [
        Symbol(b"main", TEXT_VADDR, 2 * step),
        Symbol(b"f", TEXT_VADDR + 2 * step),
        Symbol(b"NBuffers", DATA_VADDR + 8, 8, kind=1, section=2),
        Symbol(b"table", DATA_VADDR + 16, 32, kind=1, binding=0, section=2),
        Symbol(b"_GLOBAL_OFFSET_TABLE_", DATA_VADDR, kind=1, section=2),
    ]
    elf.symbols_kind = SHT_DYNSYM if machine in {RISCV, S390} else SHT_SYMTAB
    elf.more_sections = [
        Section(b".note.gnu.build-id", SHT_NOTE, elf.raw_note(b"12345678", b"GNU\0")),
        Section(b".got", SHT_PROGBITS, bytes(8), DATA_VADDR + 64),
    ]
    return elf.build()


@functools.cache
def samples() -> tuple[Sample, ...]:
    """Everything that this machine's compiler can make, and built objects of all architectures."""
    images = {
        f"built-{m}-{bits}-{'big' if order == '>' else 'little'}": built(m, bits, order) for m, bits, order in ARGUMENTS
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "app.c"
        source.write_text(SOURCE)
        for name, flags in COMPILATIONS.items():
            target = Path(folder) / name
            # -m32 does not find the header where Debian has it
            found = ("-idirafter", "/usr/include/x86_64-linux-gnu")
            command = ["gcc", "-w", *flags, *found, "-Wl,-z,noseparate-code", "-o", str(target), str(source)]
            try:
                done = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "LC_ALL": "C"})
            except FileNotFoundError:
                break
            if done.returncode == 0:
                images[f"gcc-{name}"] = target.read_bytes()
    return tuple(_charted(name, image) for name, image in images.items())


_SHDR_64 = ((0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (48, 8), (56, 8))
_SHDR_32 = tuple((4 * i, 4) for i in range(10))
_PHDR_64 = ((0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8))
_PHDR_32 = tuple((4 * i, 4) for i in range(8))
_SYM_64 = ((0, 4), (4, 1), (5, 1), (6, 2), (8, 8), (16, 8))
_SYM_32 = ((0, 4), (4, 4), (8, 4), (12, 1), (13, 1), (14, 2))
_EHDR_64 = ((16, 2), (18, 2), (20, 4), (24, 8), (32, 8), (40, 8), (48, 4), *((52 + 2 * i, 2) for i in range(6)))
_EHDR_32 = ((16, 2), (18, 2), (20, 4), (24, 4), (28, 4), (32, 4), (36, 4), *((40 + 2 * i, 2) for i in range(6)))


def _charted(name: str, image: bytes) -> Sample:
    """Find the structure of a right object."""
    wide = image[4] == 2
    order: ByteOrder = "<" if image[5] == 1 else ">"
    chart = Sample(name, image, order)

    def number(at: int, width: int) -> int:
        return int.from_bytes(image[at : at + width], "little" if order == "<" else "big")

    def rows(kind: str, start: int, count: int, size: int, form: tuple[tuple[int, int], ...]) -> None:
        chart.blocks.setdefault(kind, []).extend((start + size * i, size) for i in range(count))
        fields = (Field(start + size * i + at, width) for i in range(count) for at, width in form)
        chart.fields.setdefault(kind, []).extend(fields)

    header = _EHDR_64 if wide else _EHDR_32
    chart.fields["header"] = [Field(i, 1) for i in range(4, 16)] + [Field(*each) for each in header] * 2
    chart.blocks["header"] = [(0, 64 if wide else 52)]
    word = 8 if wide else 4
    segments_at, sections_at = (number(*each) for each in header[4:6])
    segments, sections = number(*header[9]), number(*header[11])
    rows("segments", segments_at, segments, 56 if wide else 32, _PHDR_64 if wide else _PHDR_32)
    section_form, section_size = (_SHDR_64, 64) if wide else (_SHDR_32, 40)
    rows("sections", sections_at, sections, section_size, section_form)
    for at, _ in chart.blocks["sections"]:
        kind = number(at + 4, 4)
        begin, size = (number(at + section_form[i][0], section_form[i][1]) for i in (4, 5))
        if kind == SHT_NOTE:
            for note_at, descriptor_at, note_end in _notes(image, order, begin, size):
                chart.blocks.setdefault("notes", []).append((note_at, note_end - note_at))
                own = [Field(note_at + 4 * i, 4) for i in range(3)]
                chart.fields.setdefault("notes", []).extend(own)
                if image[note_at + 12 : note_at + 20] == b"stapsdt\0":
                    addresses = [Field(descriptor_at + word * i, word) for i in range(3)]
                    chart.fields["notes"].extend(addresses * 3)
                    chart.texts.append((descriptor_at + 3 * word, note_end))
        elif kind in {SHT_SYMTAB, SHT_DYNSYM}:
            row = 24 if wide else 16
            rows("symbols", begin, size // row, row, _SYM_64 if wide else _SYM_32)
        elif kind == SHT_STRTAB and size:
            chart.blocks.setdefault("strings", []).append((begin, size))
            chart.fields.setdefault("strings", []).extend(Field(begin + i, 1) for i in range(size))
    chart.fields = {kind: fields for kind, fields in chart.fields.items() if fields}
    chart.blocks = {kind: blocks for kind, blocks in chart.blocks.items() if blocks}
    return chart


def _notes(image: bytes, order: ByteOrder, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    at = begin
    while at + 12 <= begin + size:
        owner, descriptor, _ = struct.unpack_from(f"{order}III", image, at)
        descriptor_at = at + 12 + owner + 3 & ~3
        yield at, descriptor_at, descriptor_at + descriptor
        at = descriptor_at + descriptor + 3 & ~3


class Mutator:
    """Makes case `number` of a seed."""

    def __init__(self, seed: int, chosen: tuple[Sample, ...] | None = None) -> None:
        self._seed = seed
        self._samples = samples() if chosen is None else chosen

    def case(self, number: int) -> tuple[str, bytes]:
        """A description and the file."""
        rng = random.Random(f"{self._seed}/{number}")
        sample = rng.choice(self._samples)
        image = bytearray(sample.image)
        done = []
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8))):
            change = rng.choices(_CHANGES, _WEIGHTS)[0]
            change(rng, sample, image)
            done.append(change.__name__.strip("_"))
        return f"{sample.name}: {', '.join(done)}", bytes(image)


def _some_field(rng: random.Random, sample: Sample) -> Field:
    return rng.choice(sample.fields[rng.choice(list(sample.fields))])


def _some_block(rng: random.Random, sample: Sample) -> tuple[int, int]:
    return rng.choice(sample.blocks[rng.choice(list(sample.blocks))])


def _put(image: bytearray, at: int, data: bytes) -> None:
    """In place: a file that was cut stays so."""
    room = max(0, len(image) - at)
    image[at : at + len(data)] = data[:room]


def _put_number(image: bytearray, sample: Sample, place: Field, value: int) -> None:
    packed = (value % (1 << 8 * place.width)).to_bytes(place.width, "little" if sample.order == "<" else "big")
    _put(image, place.at, packed)


def _flip(rng: random.Random, sample: Sample, image: bytearray) -> None:
    place = _some_field(rng, sample)
    at = place.at + rng.randrange(place.width)
    if at < len(image):
        image[at] ^= 1 << rng.randrange(8)


def _flip_anywhere(rng: random.Random, _: Sample, image: bytearray) -> None:
    if image:
        image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)


def _extreme(rng: random.Random, sample: Sample, image: bytearray) -> None:
    near_end = tuple(len(sample.image) + delta for delta in (-8, -2, -1, 0, 1))
    value = rng.choice(near_end if rng.random() < 0.25 else _EXTREMES_OF_WORDS)
    _put_number(image, sample, _some_field(rng, sample), value)


def _nudge(rng: random.Random, sample: Sample, image: bytearray) -> None:
    place = _some_field(rng, sample)
    old = int.from_bytes(image[place.at : place.at + place.width], "little" if sample.order == "<" else "big")
    _put_number(image, sample, place, old + rng.choice((-0x1000, -8, -4, -2, -1, 1, 2, 4, 8, 0x1000)))


def _swap_fields(rng: random.Random, sample: Sample, image: bytearray) -> None:
    first, second = _some_field(rng, sample), _some_field(rng, sample)
    width = min(first.width, second.width)
    one, other = (bytes(image[place.at : place.at + width]) for place in (first, second))
    _put(image, first.at, other)
    _put(image, second.at, one)


def _swap_rows(rng: random.Random, sample: Sample, image: bytearray) -> None:
    blocks = sample.blocks[rng.choice(list(sample.blocks))]
    (first, first_size), (second, second_size) = rng.choice(blocks), rng.choice(blocks)
    size = min(first_size, second_size)
    one, other = bytes(image[first : first + size]), bytes(image[second : second + size])
    _put(image, first, other)
    if rng.random() < 0.5:
        _put(image, second, one)


def _zero_block(rng: random.Random, sample: Sample, image: bytearray) -> None:
    at, size = _some_block(rng, sample)
    _put(image, at, rng.choice((b"\0", b"\0", b"\xff", b"\x90")) * size)


def _move_block(rng: random.Random, sample: Sample, image: bytearray) -> None:
    (source, size), (target, _) = _some_block(rng, sample), _some_block(rng, sample)
    _put(image, target, bytes(image[source : source + size]))


def _cut(rng: random.Random, sample: Sample, image: bytearray) -> None:
    if rng.random() < 0.5:
        del image[rng.randrange(len(sample.image)) :]
    else:
        del image[_some_field(rng, sample).at + rng.randrange(3) :]


def _duplicate(rng: random.Random, _: Sample, image: bytearray) -> None:
    """Everything behind it moves."""
    at = rng.randrange(len(image) + 1)
    length = rng.choice((1, 2, 4, 8, 64, 4096))
    image[at:at] = image[max(0, at - length) : at]


def _drop(rng: random.Random, _: Sample, image: bytearray) -> None:
    at = rng.randrange(len(image) + 1)
    del image[at : at + rng.choice((1, 2, 4, 8, 64, 4096))]


def _text_byte(rng: random.Random, sample: Sample, image: bytearray) -> None:
    begin, end = rng.choice(sample.texts)
    for _ in range(rng.choice((1, 1, 2, 6))):
        _put(image, rng.randrange(begin, end), bytes([rng.choice(_BYTES_OF_TEXT)]))


def _operand(rng: random.Random, sample: Sample, image: bytearray) -> None:
    """Other arguments, as many as there is room for."""
    begin, end = rng.choice(sample.texts)
    arguments_at = begin
    for _ in range(2):
        arguments_at = sample.image.find(b"\0", arguments_at) + 1
    room = end - arguments_at - 1
    if room <= 0:
        return
    text = b""
    while len(text) < room:
        size = rng.choice((b"8@", b"4@", b"-4@", b"-8@", b"2@", b"1@", b"8f@", b"4f@", b"16@", b"", b"-2147483648@"))
        text += size + rng.choice(_OPERANDS) + rng.choice((b" ", b" ", b" ", b"\n", b",", b""))
    cut = text.rfind(b" ", 0, room + 1)
    _put(image, arguments_at, text[: cut if cut > 0 else room].ljust(room))


def _longer_text(rng: random.Random, sample: Sample, image: bytearray) -> None:
    """The last text reaches on to whatever follows."""
    begin, end = rng.choice(sample.texts)
    for at in range(begin, min(end, len(image))):
        if image[at] == 0 and rng.random() < 0.6:
            image[at] = rng.choice(b" aA:\n")


Change = Callable[[random.Random, Sample, bytearray], None]

_CHANGES: tuple[Change, ...] = (
    _flip,
    _extreme,
    _nudge,
    _swap_fields,
    _swap_rows,
    _zero_block,
    _move_block,
    _cut,
    _text_byte,
    _operand,
    _longer_text,
    _flip_anywhere,
    _duplicate,
    _drop,
)
_WEIGHTS = (6, 8, 6, 4, 3, 1, 2, 1, 4, 6, 1, 1, 1, 1)
