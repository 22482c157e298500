"""Builds the shared library that carries a provider's probes.

    $ readelf -nW /proc/PID/fd/3
    Displaying notes found in: .note.gnu.build-id
      Owner                Data size 	Description
      GNU                  0x00000014	NT_GNU_BUILD_ID (unique build ID bitstring)
        Build ID: e1723c00a2785fbf3faa17978784fe6d289e2050

    Displaying notes found in: .note.stapsdt
      Owner                Data size 	Description
      stapsdt              0x0000003c	NT_STAPSDT (SystemTap probe descriptors)
        Provider: myapp
        Name: request__start
        Location: 0x0000000000001000, Base: 0x0000000000000247, Semaphore: 0x0000000000002060
        Arguments: 8@%rdi -4@%esi

Its layout:

    0x0000  R    headers, build-id, symbols, .stapsdt.base
    0x1000  R X  .text: a stub for each probe, `nop; ret`
    0x2000  RW   .dynamic; .probes: a 16-bit semaphore for each probe
                 not mapped: .note.stapsdt, section names and headers
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stapsdtd.provider import elf64
from stapsdtd.provider.architecture import Architecture
from stapsdtd.provider.argtypes import Declaration
from stapsdtd.provider.elf64 import SHF_ALLOC, SHF_EXECINSTR, SHF_WRITE, Section, Segment

NT_STAPSDT = 3
_SEMAPHORE_SIZE = 2
_BUILD_ID_SIZE = 20
# Indexes of the sections that _sections() returns, after the null section; symbols refer to them.
_TEXT_INDEX, _PROBES_INDEX = 6, 8


@dataclass(frozen=True)
class Image:
    """The file, its segments in order of address, and the locations of each probe.

    stubs, semaphores: offsets in bytes, in the file and in memory, in the order of the declarations.
    """

    content: bytes
    segments: tuple[Segment, ...]
    stubs: tuple[int, ...]
    semaphores: tuple[int, ...]


def build_image(provider: str, declarations: Sequence[Declaration], architecture: Architecture) -> Image:
    """Return the library for these probes. The same declarations give the same bytes, and so the same build-id.

    Raises ValueError if there are no declarations.
    """
    if not declarations:
        raise ValueError(f"provider {provider} declares no probes")
    # Built twice: offsets follow from sizes, and no size depends on an offset.
    sizing = _sections(provider, declarations, architecture, defaultdict(int))
    offsets = elf64.lay_out(sizing, architecture.page_size)
    sections = _sections(provider, declarations, architecture, offsets)
    content = elf64.write(sections, offsets, architecture.machine, architecture.page_size)

    build_id = hashlib.blake2b(content, digest_size=_BUILD_ID_SIZE).digest()
    build_id_end = offsets[".note.gnu.build-id"] + len(_build_id_note())
    content[build_id_end - _BUILD_ID_SIZE : build_id_end] = build_id
    return Image(
        bytes(content),
        elf64.segments_of(sections, offsets),
        _stubs(declarations, architecture, offsets),
        _semaphores(declarations, offsets),
    )


def _stubs(
    declarations: Sequence[Declaration], architecture: Architecture, offsets: Mapping[str, int]
) -> tuple[int, ...]:
    size = len(architecture.stub)
    return tuple(offsets[".text"] + size * index for index in range(len(declarations)))


def _semaphores(declarations: Sequence[Declaration], offsets: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(offsets[".probes"] + _SEMAPHORE_SIZE * index for index in range(len(declarations)))


def _sections(
    provider: str,
    declarations: Sequence[Declaration],
    architecture: Architecture,
    offsets: Mapping[str, int],
) -> list[Section]:
    """Return all sections in file order. offsets: the addresses to write into them."""
    stubs = _stubs(declarations, architecture, offsets)
    semaphores = _semaphores(declarations, offsets)
    dynsym, dynstr = _symbols(provider, declarations, len(architecture.stub), stubs, semaphores)
    notes = b"".join(
        _probe_note(
            (stub, offsets[".stapsdt.base"], semaphore),
            (provider, declaration.name, architecture.operands(declaration.types)),
        )
        for declaration, stub, semaphore in zip(declarations, stubs, semaphores)
    )
    loaded, code, data = SHF_ALLOC, SHF_ALLOC | SHF_EXECINSTR, SHF_ALLOC | SHF_WRITE
    symbol_size = elf64.SYMBOL.size
    sections = [
        Section(".note.gnu.build-id", elf64.SHT_NOTE, loaded, _build_id_note(), 4),
        Section(".hash", elf64.SHT_HASH, loaded, _hash(dynsym), 8, ".dynsym", entry_size=4),
        Section(".dynsym", elf64.SHT_DYNSYM, loaded, dynsym, 8, ".dynstr", info=1, entry_size=symbol_size),
        Section(".dynstr", elf64.SHT_STRTAB, loaded, dynstr),
        Section(".stapsdt.base", elf64.SHT_PROGBITS, loaded, bytes(1)),
        Section(".text", elf64.SHT_PROGBITS, code, architecture.stub * len(stubs), 16),
        Section(
            ".dynamic",
            elf64.SHT_DYNAMIC,
            data,
            _dynamic(offsets, dynstr),
            8,
            ".dynstr",
            entry_size=elf64.DYNAMIC.size,
        ),
        Section(".probes", elf64.SHT_PROGBITS, data, bytes(_SEMAPHORE_SIZE * len(semaphores)), _SEMAPHORE_SIZE),
        Section(".note.stapsdt", elf64.SHT_NOTE, 0, notes, 4),
    ]
    names, _ = elf64.strings([*(section.name for section in sections), ".shstrtab"])
    return [*sections, Section(".shstrtab", elf64.SHT_STRTAB, 0, names)]


def _symbols(
    provider: str,
    declarations: Sequence[Declaration],
    stub_size: int,
    stubs: Sequence[int],
    semaphores: Sequence[int],
) -> tuple[bytes, bytes]:
    """Return .dynsym and .dynstr, with a function and an object for each probe, so that tools can show names."""
    names = [declaration.name for declaration in declarations]
    names += [f"{provider}_{name}_semaphore" for name in names]
    dynstr, name_offsets = elf64.strings(names)
    entries = [(elf64.STT_FUNC, _TEXT_INDEX, stub, stub_size) for stub in stubs]
    entries += [(elf64.STT_OBJECT, _PROBES_INDEX, semaphore, _SEMAPHORE_SIZE) for semaphore in semaphores]
    symbols = (
        elf64.SYMBOL.pack(name_offset, elf64.STB_GLOBAL << 4 | kind, 0, section_index, address, size)
        for name_offset, (kind, section_index, address, size) in zip(name_offsets, entries)
    )
    return bytes(elf64.SYMBOL.size) + b"".join(symbols), dynstr


def _hash(dynsym: bytes) -> bytes:
    """Return .hash with all symbols chained in one bucket: no hash function is needed, and lookups are rare."""
    count = len(dynsym) // elf64.SYMBOL.size
    return struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)


def _dynamic(offsets: Mapping[str, int], dynstr: bytes) -> bytes:
    entries = (
        (elf64.DT_HASH, offsets[".hash"]),
        (elf64.DT_STRTAB, offsets[".dynstr"]),
        (elf64.DT_SYMTAB, offsets[".dynsym"]),
        (elf64.DT_STRSZ, len(dynstr)),
        (elf64.DT_SYMENT, elf64.SYMBOL.size),
        (elf64.DT_NULL, 0),
    )
    return b"".join(elf64.DYNAMIC.pack(*entry) for entry in entries)


def _build_id_note() -> bytes:
    return elf64.note("GNU", elf64.NT_GNU_BUILD_ID, bytes(_BUILD_ID_SIZE))


def _probe_note(addresses: tuple[int, int, int], texts: tuple[str, str, str]) -> bytes:
    """addresses: location, base, semaphore. texts: provider, name, arguments."""
    strings = "".join(f"{text}\0" for text in texts).encode()
    return elf64.note("stapsdt", NT_STAPSDT, struct.pack("<QQQ", *addresses) + strings)
