"""Turn the notes of an object into sites: resolve each note's addresses and check its `nop`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from stapsdtd.arch import GLOBAL_OFFSET_TABLE, symbols_of, with_addresses
from stapsdtd.elf.container import PT_GNU_RELRO, PT_LOAD, SHT_NOTE, Container
from stapsdtd.elf.nops import nop_at
from stapsdtd.elf.notes import (
    NT_STAPSDT,
    STAPSDT_OWNER,
    Addresses,
    DescriptorReader,
    Texts,
    UnusableNoteError,
    iter_notes,
)
from stapsdtd.elf.segments import LoadSegments, Semaphore
from stapsdtd.elf.symbols import enclosing_functions, symbol_addresses
from stapsdtd.model import (
    LONGEST_NOP_BYTES,
    MAX_PROBLEMS,
    Argument,
    FileOffset,
    Problem,
    Site,
    Unavailable,
    Vaddr,
)

MAX_NOTES = 500_000
MAX_NOTES_BYTES = 64 << 20
"""Both over all sections of an object. There are files with 400,000 notes, about 30 MB."""

MAX_LOCATED_ARGUMENTS = 1 << 18
"""Arguments that refer to symbols differ from site to site and take about 500 bytes each; postgres has 5."""

_CONFLICT = "another note has the same location with other arguments or another semaphore"


class _Problems:
    """The first MAX_PROBLEMS, and how many more there are: hostile files have nothing else, 500,000 times."""

    def __init__(self) -> None:
        self.kept: list[Problem] = []
        self.left_out = 0

    def append(self, problem: Problem) -> None:
        if len(self.kept) < MAX_PROBLEMS:
            self.kept.append(problem)
        else:
            self.left_out += 1


class _Located(NamedTuple):
    texts: Texts
    location_vaddr: Vaddr
    site_offset: FileOffset
    nop_bytes: int
    semaphore_offset: FileOffset | None
    refused: str | None


def read_sites(
    container: Container, debug: Container | None = None
) -> tuple[tuple[Site, ...], tuple[Problem, ...], int, bool]:
    """Return the usable notes as sites, in the order of the notes, others as problems, how many more of these there
    are, and lacks_symbols.
    """
    if not container.sections_named(b".note.stapsdt"):
        return (), (), 0, False
    problems = _Problems()
    located = list(_located(container, problems))
    functions = enclosing_functions(container, [note.location_vaddr for note in located]) if located else []
    symbol_resolver = _SymbolResolver(container, located, debug)
    sites = tuple(
        Site(
            note.texts.provider,
            note.texts.name,
            note.site_offset,
            note.semaphore_offset,
            function,
            symbol_resolver.resolve(note),
            note.nop_bytes,
            note.refused,
        )
        for note, function in zip(located, functions, strict=True)
    )
    return sites, tuple(problems.kept), problems.left_out, symbol_resolver.lacks_symbols


class _SymbolResolver:
    """Resolves the symbols in operands. Argument lists without symbols, which are most, stay shared."""

    def __init__(self, container: Container, located: Iterable[_Located], debug: Container | None) -> None:
        self._architecture = container.architecture
        self._is_fixed = container.is_fixed
        # equal argument strings share one tuple, which needs to be examined only once
        distinct = {id(note.texts.arguments): note.texts.arguments for note in located}
        symbols = {identity: symbols_of(arguments) for identity, arguments in distinct.items()}
        self._symbolic = {identity for identity, names in symbols.items() if names}
        self._left = MAX_LOCATED_ARGUMENTS
        self._unresolved: dict[int, tuple[Argument, ...]] = {}
        self._addresses = symbol_addresses(container, sorted(set().union(*symbols.values())), debug)
        if isinstance(self._addresses.get(GLOBAL_OFFSET_TABLE), Unavailable):
            # strip removes the symbol; the linker places the table at the start of this section
            for section in container.sections_named(b".got.plt")[:1] or container.sections_named(b".got")[:1]:
                self._addresses[GLOBAL_OFFSET_TABLE] = section.address_vaddr
        self.lacks_symbols = any(isinstance(address, Unavailable) for address in self._addresses.values())

    def resolve(self, note: _Located) -> tuple[Argument, ...]:
        arguments = note.texts.arguments
        if id(arguments) not in self._symbolic:
            return arguments
        self._left -= len(arguments)
        if self._left < 0:
            return self._give_up(arguments)
        return with_addresses(
            arguments, self._addresses, note.location_vaddr, self._architecture, is_fixed=self._is_fixed
        )

    def _give_up(self, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        if id(arguments) not in self._unresolved:
            reason = Unavailable("too many arguments of the object refer to symbols")
            self._unresolved[id(arguments)] = tuple(
                replace(argument, operand=reason) if symbols_of([argument]) else argument for argument in arguments
            )
        return self._unresolved[id(arguments)]


def _located(container: Container, problems: _Problems) -> Iterator[_Located]:
    """Yield one note for each (site, provider, name): the kernel rejects events with duplicate sites."""
    reader = DescriptorReader(container.architecture, container.word_bytes, container.byte_order)
    resolver = _Resolver(container)
    seen: dict[tuple[FileOffset, str, str], _Located] = {}
    armable: dict[FileOffset, _Located] = {}
    for descriptor in _descriptors(container, problems):
        texts = None
        try:
            addresses = reader.addresses(descriptor)
            texts = reader.texts(descriptor)
            note = resolver.locate(addresses, texts)
            first = seen.setdefault((note.site_offset, texts.provider, texts.name), note)
            if first is note:
                yield note if note.refused else _with_one_semaphore(note, armable.setdefault(note.site_offset, note))
            elif first != note:
                problems.append(Problem(texts.provider, texts.name, _CONFLICT, first.site_offset))
        except UnusableNoteError as error:
            provider, name = (texts.provider, texts.name) if texts else (error.provider, error.name)
            problems.append(Problem(provider, name, error.reason))


def _with_one_semaphore(note: _Located, first: _Located) -> _Located:
    """Refuse a note if the first one at its nop has another semaphore: the kernel takes one for each instruction."""
    if note.semaphore_offset == first.semaphore_offset:
        return note
    has = "has no semaphore" if first.semaphore_offset is None else "has another semaphore"
    same = f"{first.texts.provider}:{first.texts.name}, whose note is at the same nop, {has}"
    return note._replace(refused=f"{same}, and the kernel takes only one for an instruction")


def _descriptors(container: Container, problems: _Problems) -> Iterator[bytes]:
    """Yield the descriptors of all stapsdt notes. Errors that affect a whole section become one problem."""
    notes_left, bytes_left = MAX_NOTES, MAX_NOTES_BYTES
    for section in container.sections_named(b".note.stapsdt"):
        if section.kind != SHT_NOTE:
            problems.append(Problem("", "", f"a .note.stapsdt section has type {section.kind}, not SHT_NOTE"))
            continue
        data = container.file.read(section.offset, min(section.size, bytes_left))
        bytes_left -= len(data)
        try:
            for note in iter_notes(data, container.byte_order):
                if not notes_left:
                    problems.append(Problem("", "", f"more than {MAX_NOTES} notes: ignoring the rest"))
                    return
                notes_left -= 1
                if note.owner == STAPSDT_OWNER and note.kind == NT_STAPSDT:
                    yield note.descriptor
        except UnusableNoteError as error:
            problems.append(Problem("", "", error.reason))
        if len(data) < section.size:
            end = "the limit for an object" if not bytes_left else "the file's end"
            problems.append(Problem("", "", f"a section of {section.size} bytes of notes extends beyond {end}"))
        if not bytes_left:
            return


class _Resolver:
    def __init__(self, container: Container) -> None:
        self._file = container.file
        self._architecture = container.architecture
        self._word_mask = (1 << 8 * container.word_bytes) - 1
        self._segments = LoadSegments(container.segments(PT_LOAD), container.segments(PT_GNU_RELRO))
        base_sections = container.sections_named(b".stapsdt.base")
        self._base_vaddr = base_sections[0].address_vaddr if base_sections else None

    def locate(self, addresses: Addresses, texts: Texts) -> _Located:
        location = self._adjust(addresses.location_vaddr, addresses)
        site_offset, backed = self._segments.site_offset(location)
        code = self._file.read(site_offset, min(backed, LONGEST_NOP_BYTES))
        nop = nop_at(self._architecture, code)
        semaphore = self._semaphore(addresses)
        refused = nop.refused or semaphore.refused
        return _Located(texts, location, site_offset, nop.length, semaphore.offset, refused)

    def _semaphore(self, addresses: Addresses) -> Semaphore:
        if not addresses.semaphore_vaddr:
            return Semaphore(None)
        return self._segments.semaphore(self._adjust(addresses.semaphore_vaddr, addresses), self._file.size)

    def _adjust(self, address: Vaddr, addresses: Addresses) -> Vaddr:
        """Undo prelink, which moves sections but does not update notes: the note has the base section's old address."""
        if self._base_vaddr is None or not addresses.base_vaddr:
            return address
        return Vaddr(address + self._base_vaddr - addresses.base_vaddr & self._word_mask)
