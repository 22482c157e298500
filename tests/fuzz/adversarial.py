"""Objects that are built to hurt: each one writes itself to a file, which may be sparse."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypedDict

from tests.fuzz.checks import PeakMemory, check
from tests.unit.elf_builder import (
    AARCH64,
    ARM,
    BASE_VADDR,
    DATA_VADDR,
    I386,
    NOP,
    PT_NOTE,
    S390,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_STRTAB,
    SHT_SYMTAB,
    TEXT_OFFSET,
    TEXT_VADDR,
    Elf,
    R,
    Section,
    Segment,
    Symbol,
    W,
    X,
)

MAX_GROWTH_BYTES = 1 << 30
_MAX_SPACE_BYTES = 3 << 30
_MAX_CASE_SECONDS = 60
_MAX_SECONDS = 4.0

Writer = Callable[[BinaryIO], None]
CASES: dict[str, Writer] = {}


class Outcome(TypedDict):
    """error: empty where everything held."""

    error: str
    seconds: float
    growth_bytes: int


def image(build: Callable[[], bytes]) -> Callable[[], bytes]:
    """Register a case that is a file of moderate size."""

    def write(file: BinaryIO) -> None:
        file.write(build())

    CASES[build.__name__] = write
    return build


def writer(write: Writer) -> Writer:
    CASES[write.__name__] = write
    return write


def patched_section(built: bytes, index: int, **values: int) -> bytearray:
    """Fields of a section header of a 64-bit object."""
    places = {"name": ("I", 0), "kind": ("I", 4), "offset": ("Q", 24), "size": ("Q", 32), "link": ("I", 40)}
    changed = bytearray(built)
    (table,) = struct.unpack_from("<Q", built, 40)
    for name, value in values.items():
        form, at = places[name]
        struct.pack_into(f"<{form}", changed, table + 64 * index + at, value)
    return changed


def with_arguments(*texts: bytes, elf: Elf | None = None) -> bytes:
    """One site for each text, all at the same place."""
    elf = elf or Elf()
    elf.notes = b"".join(elf.note(name=b"probe%d" % i, arguments=text) for i, text in enumerate(texts))
    return elf.build()


@writer
def sparse_sections_of_4_gib(file: BinaryIO) -> None:
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)])
    elf.notes = elf.note(arguments=b"8@NBuffers(%rip)")
    base = elf.build()
    file.write(base)
    for index in range(4, 7):
        size = 1 << 32
        file.seek(0)
        file.write(patched_section(base, index, size=size))
    file.truncate((1 << 32) + len(base))


@writer
def sparse_notes_of_4_gib(file: BinaryIO) -> None:
    """A hole reads as notes without owner, kind or descriptor."""
    elf = Elf(more_sections=[Section(b".note.stapsdt", SHT_NOTE, Elf().note(), size=1 << 32)])
    file.write(elf.build())
    file.truncate((1 << 32) + (1 << 20))


@writer
def sparse_section_names(file: BinaryIO) -> None:
    base = Elf(notes=Elf().note()).build()
    file.write(patched_section(base, 5, size=4 << 20))
    file.truncate(1 << 32)


@writer
def sparse_symbols_at_their_bound(file: BinaryIO) -> None:
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8), Symbol(b"NBuffers", DATA_VADDR, 8, kind=1)])
    elf.notes = elf.note(arguments=b"8@NBuffers(%rip) 8@other(%rip)")
    base = elf.build()
    table = patched_section(base, 5, size=64 << 20)
    file.write(patched_section(bytes(table), 6, size=64 << 20))
    file.truncate(1 << 30)


@writer
def many_names_and_the_largest_symbol_table(file: BinaryIO) -> None:
    """A short string table costs nothing, but each name is looked for among 2.8 million symbols."""
    names = [b" ".join(b"8@n%d" % (i * 100 + j) for j in range(100)) for i in range(30)]
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)])
    elf.notes = b"".join(elf.note(name=b"probe%d" % i, arguments=text) for i, text in enumerate(names))
    base = elf.build()
    file.write(patched_section(base, 5, size=64 << 20))
    file.truncate(70 << 20)


@image
def same_symbolic_arguments_in_many_notes() -> bytes:
    """660 KB of notes, whose 128 arguments are two bytes each and an object of their own for each site."""
    elf = Elf(symbols=[Symbol(b"a", DATA_VADDR, 8, kind=1, section=2)])
    text = b" ".join([b"a"] * 128)
    elf.notes = b"".join(elf.note(name=b"%x" % i, arguments=text) for i in range(2200))
    return elf.build()


@image
def section_headers_65535() -> bytes:
    elf = Elf(notes=Elf().note(), more_sections=[Section(b".note.stapsdt", SHT_NOTE)] * (65_535 - 6))
    return elf.build()


@image
def section_headers_65535_that_are_symbol_tables() -> bytes:
    many = [Section(b".note.stapsdt", SHT_SYMTAB, link=i, entry_size=24) for i in range(65_535 - 6)]
    return Elf(notes=Elf().note(arguments=b"8@NBuffers(%rip)"), more_sections=many).build()


@image
def section_count_in_the_first_header() -> bytes:
    base = bytearray(Elf(notes=Elf().note()).build())
    struct.pack_into("<H", base, 60, 0)
    return bytes(patched_section(bytes(base), 0, size=(1 << 64) - 1))


@image
def notes_that_overlap_in_many_sections() -> bytes:
    elf = Elf(notes=Elf().note() * 1000, more_sections=[Section(b".note.stapsdt", SHT_NOTE)] * 200)
    base = elf.build()
    (table,) = struct.unpack_from("<Q", base, 40)
    offset, size = struct.unpack_from("<QQ", base, table + 64 * 4 + 24)
    changed = bytearray(base)
    for index in range(5, 205):
        struct.pack_into("<QQ", changed, table + 64 * index + 24, offset, size)
    return bytes(changed)


@image
def huge_sizes_in_notes() -> bytes:
    elf = Elf()
    bad = [
        struct.pack("<III", *sizes, 3) + b"stapsdt\0" + bytes(64)
        for sizes in ((8, 0xFFFFFFFF), (0xFFFFFFFF, 8), (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFD, 0), (8, 0x7FFFFFFF))
    ]
    elf.more_sections = [Section(b".note.stapsdt", SHT_NOTE, data + elf.note()) for data in bad]
    elf.notes = elf.note()
    return elf.build()


@image
def one_note_of_32_mib() -> bytes:
    return Elf(notes=Elf().note(provider=b"p" * (16 << 20), name=b"n" * (16 << 20))).build()


@image
def overlapping_segments() -> bytes:
    everything = Segment(R | X, 0, 0, (1 << 64) - 1)
    wrapping = Segment(R | W | X, (1 << 64) - 0x1000, (1 << 64) - 0x1000, 0x2000)
    return Elf(notes=Elf().note(semaphore=DATA_VADDR), segments=[everything, wrapping] * 400).build()


@image
def segments_that_wrap_around() -> bytes:
    code = Segment(R | X, TEXT_VADDR, TEXT_OFFSET, (1 << 64) - 1, (1 << 64) - 1)
    elf = Elf(segments=[code, Segment(R | W, DATA_VADDR, (1 << 64) - 2, 0x1000)])
    elf.notes = elf.note(semaphore=DATA_VADDR) + elf.note((1 << 64) - 1) + elf.note(TEXT_VADDR + 1, base=1)
    return elf.build()


@image
def more_segments_than_the_kernel_loads() -> bytes:
    base = bytearray(Elf(notes=Elf().note()).build())
    struct.pack_into("<H", base, 56, 0xFFFF)
    return bytes(base)


@image
def notes_in_many_segments() -> bytes:
    segments = [Segment(R, 0, 0, 1 << 40, kind=PT_NOTE, alignment=i) for i in range(100)]
    return Elf(notes=Elf().note(), segments=[*segments, Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100)]).build()


@image
def texts_without_end() -> bytes:
    elf = Elf()
    words = struct.pack("<QQQ", TEXT_VADDR, BASE_VADDR, 0)
    endless = [b"", b"p", b"p\0", b"p\0n", b"p\0n\0", b"p\0n\0a", b"\0\0\0", b"p\0\0\0", b"\0n\0\0", b"p\0n\0a\0b\0c\0"]
    elf.notes = b"".join(elf.raw_note(words[:length] + text) for length in (24, 23, 8, 0) for text in endless)
    return elf.build()


HOSTILE_NAMES = (
    b"a\nb", b"a b", b"'\"`$(reboot)", b"a:b", b"\xff\xfe", b"\xed\xa0\x80", b"x" * 10_000, b"x" * 512, b"\xff" * 512,
    b"\xe2\x80\xa8", b"../../x", b"%s%n", b"\x1b[2J", b"p:e/f /bin/sh:0x0\np:g/h", b"\r\n", b"-", b"\x7f", b"\xf0\x9f",
)  # fmt: skip


@image
def hostile_names() -> bytes:
    elf = Elf(symbols=[Symbol(name, TEXT_VADDR + i, 1) for i, name in enumerate(HOSTILE_NAMES)])
    notes = []
    for i, name in enumerate(HOSTILE_NAMES):
        notes += [elf.note(TEXT_VADDR + i, name, b"n"), elf.note(TEXT_VADDR + i, b"p", name)]
        notes += [elf.note(TEXT_VADDR + i, b"args%d" % i, b"n", name + b" 8@" + name + b" 8@" + name + b"(%rip)")]
    elf.notes = b"".join(notes)
    return elf.build()


@image
def every_byte_begins_another_function() -> bytes:
    count = 20_000
    elf = Elf(NOP * count, notes=b"")
    elf.notes = b"".join(elf.note(TEXT_VADDR + i) for i in range(count))
    rows = b"".join(struct.pack("<IBBHQQ", 1 + i, 0x12, 0, 1, TEXT_VADDR + i, 1) for i in range(count))
    table = Section(b".symtab", SHT_SYMTAB, rows, link=6, entry_size=24)
    return Elf(
        elf.text, elf.notes, more_sections=[table, Section(b".strtab", SHT_STRTAB, b"\0" + b"\xff" * count * 2)]
    ).build()


@image
def every_byte_begins_another_name() -> bytes:
    """Thousands of arguments, each of which names another symbol, all of them tails of one long string."""
    texts = [b" ".join(b"8@" + b"a" * (1 + i * 40 + j) + b"(%rip)" for j in range(4)) for i in range(40)]
    strings = b"\0" + b"a" * (1 << 20) + b"\0"
    rows = b"".join(struct.pack("<IBBHQQ", len(strings) - 1 - i, 0x11, 0, 2, DATA_VADDR + i, 1) for i in range(2000))
    table = Section(b".symtab", SHT_SYMTAB, rows, link=6, entry_size=24)
    return with_arguments(*texts, elf=Elf(more_sections=[table, Section(b".strtab", SHT_STRTAB, strings)]))


@image
def thousands_of_arguments_that_name_symbols() -> bytes:
    symbols = [Symbol(b"s%d" % i, DATA_VADDR + i % 256, 1, kind=1, section=2) for i in range(4000)]
    texts = [b" ".join(b"8@s%d+%d(%%rip)" % (100 * i + j, j) for j in range(100)) for i in range(40)]
    return with_arguments(*texts, elf=Elf(symbols=symbols))


@image
def more_arguments_than_allowed() -> bytes:
    return with_arguments(b"8@%rax " * 129, b"8@%rax " * 128, b"a " * 2048, b"( " * 2048, b"[" * 4096, b"a" * 4097)


NUMBERS = (
    b"0", b"-0", b"1", b"-1", b"2147483647", b"2147483648", b"-2147483648", b"-2147483649", b"4294967296",
    b"9223372036854775807", b"-9223372036854775808", b"9223372036854775808", b"18446744073709551615",
    b"18446744073709551616", b"99999999999999999999", b"-99999999999999999999", b"9" * 400, b"0x" + b"f" * 16,
    b"0x" + b"f" * 17, b"07777777777777777777", b"08", b"1+-1", b"99999999999999999999+99999999999999999999",
)  # fmt: skip
_SIZES = (
    b"8",
    b"-8",
    b"4",
    b"-4",
    b"1",
    b"-1",
    b"2",
    b"0",
    b"-0",
    b"3",
    b"16",
    b"4096",
    b"4097",
    b"1048577",
    b"9" * 99,
)
_FORMS = (
    b"$%b",
    b"%b",
    b"%b(%%rax)",
    b"%b(%%rbx,%%rcx,8)",
    b"%b+table",
    b"$table+%b",
    b"table+%b(%%rip)",
    b"%b+table(,%%rax,4)",
)


@image
def extreme_numbers() -> bytes:
    texts = [
        b" ".join(size + suffix + b"@" + form % number for size in _SIZES if suffix != b"f" or size in {b"8", b"4"})
        for form in _FORMS
        for number in NUMBERS
        for suffix in (b"", b"f")
    ]
    # a negative pointer to a string is a case of its own
    texts = [text.replace(b"-8@$", b"8@$") for text in texts]
    return with_arguments(*texts, elf=Elf(symbols=[Symbol(b"table", DATA_VADDR, 64, kind=1, section=2)]))


@image
def extreme_numbers_of_other_architectures() -> bytes:
    nop = bytes.fromhex("1f2003d5")
    texts = [
        b" ".join(size + b"@" + form % number for size in _SIZES if size != b"-8" or b"[" in form)
        for form in (b"%b", b"#%b", b"[x0, %b]", b"[sp, x1, lsl %b]", b"table+%b")
        for number in NUMBERS
    ]
    elf = Elf(nop * 4, machine=AARCH64, symbols=[Symbol(b"table", DATA_VADDR, 64, kind=1, section=2)])
    return with_arguments(*texts, elf=elf)


@image
def section_link_to_itself() -> bytes:
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)])
    elf.notes = elf.note(arguments=b"8@NBuffers(%rip)")
    return bytes(patched_section(elf.build(), 5, link=5))


@image
def scales_of_arm() -> bytes:
    elf = Elf(bytes.fromhex("00f020e3") * 4, bits=32, machine=ARM)
    return with_arguments(b" ".join(b"4@[r2, r0, lsl #%d]" % i for i in range(40)), elf=elf)


@image
def sizes_of_registers() -> bytes:
    names = (b"%ah", b"%al", b"%ax", b"%eax", b"%rax", b"%rip", b"%eip", b"%xmm0", b"%r15b", b"%st(0)", b"%", b"%r16")
    texts = [b" ".join(size + b"@" + name for size in _SIZES) for name in names]
    return with_arguments(*texts)


@image
def section_links_in_circles() -> bytes:
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)])
    elf.notes = elf.note(arguments=b"8@NBuffers(%rip)")
    dynamic = Section(b".dynsym", SHT_DYNSYM, bytes(48), link=5, entry_size=24)
    elf.more_sections = [dynamic, Section(b".got", SHT_NOBITS, size=1 << 60)]
    return bytes(patched_section(elf.build(), 5, link=7))


@image
def section_names_are_the_section_headers() -> bytes:
    base = Elf(notes=Elf().note()).build()
    (table,) = struct.unpack_from("<Q", base, 40)
    return bytes(patched_section(base, 5, offset=table, size=len(base) - table))


@image
def symbols_are_the_whole_file() -> bytes:
    elf = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)])
    elf.notes = elf.note(arguments=b"8@NBuffers(%rip) 8@main")
    base = elf.build()
    changed = patched_section(base, 5, offset=0, size=len(base))
    return bytes(patched_section(bytes(changed), 6, offset=0, size=(1 << 26)))


@image
def huge_symbol_values_and_sizes() -> bytes:
    values = (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    symbols = [
        Symbol(b"f%d" % i, value, size, section=s)
        for i, value in enumerate(values)
        for size in values
        for s in (1, 0xFF00)
    ]
    return Elf(notes=Elf().note(), symbols=symbols).build()


@image
def symbol_far_from_the_site() -> bytes:
    """The distance has 65 bits."""
    symbols = [Symbol(b"low", 0, 8, kind=1, section=2), Symbol(b"high", (1 << 64) - 8, 8, kind=1, section=2)]
    return with_arguments(b"8@high(%rip) 8@low(%rip)", elf=Elf(symbols=symbols))


@image
def symbol_far_from_the_table() -> bytes:
    symbols = [
        Symbol(b"high", (1 << 32) - 8, 8, kind=1, section=2),
        Symbol(b"_GLOBAL_OFFSET_TABLE_", 0, kind=1, section=2),
    ]
    return with_arguments(b"4@high@GOTOFF(%ebx)", elf=Elf(bits=32, machine=I386, symbols=symbols))


@image
def symbol_address_far_from_the_site() -> bytes:
    symbols = [Symbol(b"high", (1 << 64) - 8, 8, kind=1, section=2)]
    return with_arguments(b"8@$high", elf=Elf(symbols=symbols))


@image
def symbol_far_from_the_site_on_s390x() -> bytes:
    elf = Elf(bytes.fromhex("0707") * 4, byte_order=">", machine=S390)
    elf.symbols = [Symbol(b"high", (1 << 64) - 8, 8, kind=1, section=2)]
    return with_arguments(b"8@high", elf=elf)


@image
def negative_pointer_to_a_string() -> bytes:
    return with_arguments(b"-8@$-1")


@image
def float_of_two_bytes_in_memory() -> bytes:
    return with_arguments(b"2f@(%rax) 1f@(%rax)")


@image
def definition_of_many_strings() -> bytes:
    return with_arguments(b" ".join([b"8@-2147483648(%r15)"] * 120))


@image
def prelink_to_everywhere() -> bytes:
    elf = Elf(base_vaddr=(1 << 64) - 1)
    bases = (1, BASE_VADDR, (1 << 63), (1 << 64) - 1)
    elf.notes = b"".join(elf.note(where, base=base, semaphore=where) for base in bases for where in (0, 1, TEXT_VADDR))
    return elf.build()


@image
def conflicting_notes() -> bytes:
    elf = Elf()
    elf.notes = b"".join(elf.note(arguments=b"8@$%d" % i, semaphore=DATA_VADDR + 2 * (i % 8)) for i in range(5000))
    return elf.build()


@image
def semaphore_at_the_end_of_the_file() -> bytes:
    elf = Elf()
    notes = [elf.note(TEXT_VADDR + i, name=b"n%d" % i, semaphore=DATA_VADDR + i) for i in range(16)]
    elf.notes = b"".join(notes)
    size = len(elf.build())
    elf.segments = [Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 256), Segment(R | W, DATA_VADDR, size - 9, 1 << 20)]
    return elf.build()


def judge(name: str) -> Outcome:
    """In a child, whose memory is bounded and counted, and whose end ends nothing else."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receiving)
            with os.fdopen(sending, "w") as pipe:
                json.dump(_judge_here(name), pipe)
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        found: Outcome = json.loads(answer)
        return found
    return {"error": f"the process ended with status {status}", "seconds": 0.0, "growth_bytes": 0}


def _judge_here(name: str) -> Outcome:
    with tempfile.TemporaryFile(buffering=0) as file:
        CASES[name](file)
        peak = PeakMemory()
        with open("/proc/self/statm", encoding="ascii") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        limit = mapped + _MAX_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CASE_SECONDS, _MAX_CASE_SECONDS))
        begin = time.process_time()
        error = ""
        try:
            check(file, _MAX_SECONDS)
        except Exception as raised:  # noqa: BLE001
            where = traceback.extract_tb(raised.__traceback__)[-1]
            error = f"{type(raised).__name__}: {str(raised)[:300]} ({Path(where.filename).name}:{where.lineno})"
        seconds = time.process_time() - begin
        growth = peak.growth_bytes()
    if not error and growth > MAX_GROWTH_BYTES:
        error = f"it took {growth >> 20} MiB"
    return {"error": error, "seconds": seconds, "growth_bytes": growth}


def main() -> None:
    """All cases to stdout, for a caller whose own threads and memory should not matter."""
    json.dump({name: judge(name) for name in CASES}, sys.stdout)
