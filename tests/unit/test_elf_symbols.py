from __future__ import annotations

import io
from dataclasses import replace

import pytest

from stapsdtd.elf.container import open_container
from stapsdtd.elf.symbols import symbol_addresses
from stapsdtd.model import Address, Memory, Operand, Unavailable
from tests.unit.elf_builder import (
    NOP,
    SHT_DYNSYM,
    SHT_NOBITS,
    TEXT_VADDR,
    X86_64,
    Elf,
    Symbol,
    parse_notes,
)


def functions(*symbols: Symbol, offsets: range | list[int], bits: int = 64, kind: int = 2) -> list[str | None]:
    elf = Elf(symbols=list(symbols), bits=bits, machine=X86_64, symbols_kind=kind)
    parsed = parse_notes(*(elf.note(TEXT_VADDR + offset) for offset in offsets), elf=elf)
    return [site.function for site in parsed.sites]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", [2, SHT_DYNSYM])
def test_the_function_that_covers_the_location(bits: int, kind: int) -> None:
    first, second = Symbol(b"first", TEXT_VADDR + 2, 4), Symbol(b"_ZN6second", TEXT_VADDR + 8, 2)
    assert functions(second, first, offsets=[1, 2, 5, 6, 8, 9, 10], bits=bits, kind=kind) == [
        None,
        "first",
        "first",
        None,
        "_ZN6second",
        "_ZN6second",
        None,
    ]


def test_symtab_goes_before_dynsym() -> None:
    elf = Elf(symbols=[Symbol(b"inner", TEXT_VADDR, 4)])
    dynsym, strings = Elf(symbols=[Symbol(b"outer", TEXT_VADDR, 0x100)], symbols_kind=SHT_DYNSYM).symbol_sections(
        len(elf.symbol_sections(4)) + 4
    )
    elf.more_sections = [dynsym, strings]
    assert [site.function for site in parse_notes(elf.note(), elf=elf).sites] == ["inner"]


def test_a_symbol_without_size_reaches_to_the_next() -> None:
    symbols = [Symbol(b"start", TEXT_VADDR, 0), Symbol(b"next", TEXT_VADDR + 4, 1), Symbol(b"last", TEXT_VADDR + 8, 0)]
    assert functions(*symbols, offsets=[0, 3, 4, 5, 8, 0xFF]) == ["start", "start", "next", None, "last", "last"]


def test_a_symbol_without_size_stays_in_its_section() -> None:
    """As _init of an old dynsym does not own the local functions of .text."""
    assert functions(Symbol(b"_init", TEXT_VADDR, 0, section=2), offsets=[1]) == [None]
    assert functions(Symbol(b"absolute", TEXT_VADDR, 0, section=0xFFF1), offsets=[1]) == [None]


def test_a_function_around_another() -> None:
    symbols = [Symbol(b"outer", TEXT_VADDR, 0x20), Symbol(b"inner", TEXT_VADDR + 4, 4)]
    assert functions(*symbols, offsets=[0, 4, 7, 8, 0x1F, 0x20]) == ["outer", "inner", "inner", "outer", "outer", None]


def test_of_several_names_the_global_and_sized_one() -> None:
    symbols = [
        Symbol(b"sized", TEXT_VADDR, 8),
        Symbol(b"local", TEXT_VADDR, 8, binding=0),
        Symbol(b"unsized", TEXT_VADDR, 0),
    ]
    for order in (symbols, symbols[::-1]):
        assert functions(*order, offsets=[1]) == ["sized"]


@pytest.mark.parametrize(
    "symbol",
    [
        Symbol(b"data", TEXT_VADDR, 8, kind=1),
        Symbol(b"section", TEXT_VADDR, 8, kind=3),
        Symbol(b"undefined", TEXT_VADDR, 8, section=0),
        Symbol(b"", TEXT_VADDR, 8),
    ],
)
def test_symbols_that_name_no_function(symbol: Symbol) -> None:
    assert functions(symbol, offsets=[0]) == [None]


def test_a_function_that_ends_beyond_the_address_space() -> None:
    assert functions(Symbol(b"huge", TEXT_VADDR, 2**64 - 1), offsets=[9]) == ["huge"]


def test_an_indirect_function() -> None:
    assert functions(Symbol(b"memcpy", TEXT_VADDR, 8, kind=10), offsets=[0]) == ["memcpy"]


def test_hostile_names_of_functions() -> None:
    assert functions(Symbol(b"\xff\xed\xa0\x80", TEXT_VADDR, 8), offsets=[0]) == ["\\xff\\xed\\xa0\\x80"]
    assert functions(Symbol(b"x" * 4096, TEXT_VADDR, 8), offsets=[0]) == ["x" * 4096]
    assert functions(Symbol(b"x" * 4097, TEXT_VADDR, 8), offsets=[0]) == [None]


def test_a_string_table_of_all_names_at_once() -> None:
    """Each name is as long as can be; together they would be 20 MB, of which 16 are kept."""
    count = 5000
    elf = Elf(NOP * count, symbols=[Symbol(b"x" * 4000, TEXT_VADDR + i, 1) for i in range(count)])
    sites = parse_notes(*(elf.note(TEXT_VADDR + i) for i in range(count)), elf=elf).sites
    assert len(sites) == count
    assert sites[0].function == "x" * 4000
    assert sites[-1].function is None
    assert sum(len(site.function or "") for site in sites) <= 16 << 20


@pytest.mark.parametrize("value", [0, 1, 3, 23, 0xFFFF, 2**31])
def test_a_hostile_symbol_table_costs_only_the_names(value: int) -> None:
    elf = Elf()
    symbols, strings = Elf(symbols=[Symbol(b"main", TEXT_VADDR, 8)]).symbol_sections(5)
    for pair in (
        [replace(symbols, link=value), strings],
        [replace(symbols, entry_size=value), strings],
        [replace(symbols, size=value), strings],
        [symbols, replace(strings, size=value)],
        [symbols, replace(strings, kind=SHT_NOBITS)],
    ):
        elf.more_sections = pair
        assert len(parse_notes(elf.note(), elf=elf).sites) == 1


OBJECT, TLS, LOCAL, GLOBAL, UNDEFINED = 1, 6, 0, 1, 0


def operand_of(text: bytes, *symbols: Symbol, offset: int = 0, bits: int = 64, kind: int = 2) -> Operand:
    """Of a probe's only argument, at an offset in .text."""
    elf = Elf(symbols=list(symbols), bits=bits, machine=X86_64, symbols_kind=kind)
    (site,) = parse_notes(elf.note(TEXT_VADDR + offset, arguments=b"-4@" + text), elf=elf).sites
    return site.arguments[0].operand


@pytest.mark.parametrize("kind", [2, SHT_DYNSYM])
@pytest.mark.parametrize(
    ("text", "operand"),
    [
        (b"here(%rip)", Memory("rip", 0x4000 - 7, symbol="here")),
        (b"8+here(%rip)", Memory("rip", 0x4008 - 7, symbol="here")),
        (b"here", Memory("rip", 0x4000 - 7, symbol="here")),
        (b"here(,%rax,4)", Memory("rip", 0x4000 - 7, "rax", 4, "here")),
        (b"here-4(%rbx)", Memory("rip", 0x3FFC - 7, "rbx", 1, "here")),
        (b"$here", Address("rip", 0x4000 - 7, "here")),
        (b"here(%rbx,%rax,4)", Unavailable("a symbol with both base and index is not supported")),
        (b"nowhere(%rip)", Unavailable("no symbol table of the object contains nowhere")),
    ],
)
def test_operands_that_name_a_symbol(text: bytes, operand: Operand, kind: int) -> None:
    symbols = Symbol(b"elsewhere", TEXT_VADDR, 4, OBJECT), Symbol(b"here", TEXT_VADDR + 0x4000, 4, OBJECT)
    assert operand_of(text, *symbols, offset=7, kind=kind) == operand


@pytest.mark.parametrize(
    ("symbols", "operand"),
    [
        ([Symbol(b"x", TEXT_VADDR + 64, 4, TLS)], Unavailable("x is thread-local")),
        ([Symbol(b"x", 0, 0, OBJECT, section=UNDEFINED)], Unavailable("x is in another object")),
        (
            [Symbol(b"x", TEXT_VADDR + place, 4, OBJECT, LOCAL) for place in (64, 128)],
            Unavailable("the object has 2 symbols named x"),
        ),
        (
            [Symbol(b"x", TEXT_VADDR + 64, 4, OBJECT, LOCAL), Symbol(b"x", TEXT_VADDR + 128, 4, OBJECT, GLOBAL)],
            Memory("rip", 128, symbol="x"),
        ),
        ([Symbol(b"x", TEXT_VADDR + 64, 4, OBJECT, LOCAL)] * 2, Memory("rip", 64, symbol="x")),
    ],
)
def test_symbols_that_cannot_be_told_are_unavailable(symbols: list[Symbol], operand: Operand) -> None:
    assert operand_of(b"x(%rip)", *symbols) == operand


def test_names_beyond_the_bound_are_not_looked_up() -> None:
    elf = Elf(symbols=[Symbol(b"x", TEXT_VADDR + 64, 4, OBJECT), Symbol(b"y", TEXT_VADDR + 68, 4, OBJECT)])
    container = open_container(io.BytesIO(elf.build()))
    once = sum(len(section.data) for section in elf.symbol_sections(0))
    assert symbol_addresses(container, ["x", "y"], max_searched_bytes=once) == {
        "x": TEXT_VADDR + 64,
        "y": Unavailable("the object refers to too many symbols"),
    }
