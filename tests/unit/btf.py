"""Read the .BTF section of an object (Documentation/bpf/btf.rst): its structs and enumerators, by name."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")
_INT, _POINTER, _ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF = 1, 2, 3, 4, 5, 6, 8
_VOLATILE, _CONST, _FUNC_PROTO, _VAR, _DATASEC, _ENUM64 = 9, 10, 13, 14, 15, 19


@dataclass(frozen=True, slots=True)
class Member:
    """offset and size in bytes; size is 0 for an array without an end."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    kind: int
    size: int
    body: tuple[tuple[int, ...], ...]


class Btf:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            elf: Any = ELFFile(file)
            content: bytes = elf.get_section_by_name(".BTF").data()
            # in BTF itself the loader fills in where variables are
            sections = [section.name for section in elf.iter_sections()]
            self._variables = [
                (sections[symbol["st_shndx"]], symbol.name, Member(symbol["st_value"], symbol["st_size"]))
                for symbol in elf.get_section_by_name(".symtab").iter_symbols()
                if symbol["st_info"]["type"] == "STT_OBJECT"
            ]
        _, _, _, header, types_at, types_bytes, strings_at, _ = _HEADER.unpack_from(content)
        self._strings = content[header + strings_at :]
        self._types = [_Type("void", 0, 0, ())]
        at, end = header + types_at, header + types_at + types_bytes
        while at < end:
            at = self._read_type(content, at)

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _read_type(self, content: bytes, at: int) -> int:
        name, info, size = _TYPE.unpack_from(content, at)
        at += _TYPE.size
        count, kind = info & 0xFFFF, info >> 24 & 0x1F
        words, entries = {
            _INT: (1, 1), _ARRAY: (3, 1), _STRUCT: (3, count), _UNION: (3, count), _ENUM: (2, count),
            _FUNC_PROTO: (2, count), _VAR: (1, 1), _DATASEC: (3, count), 17: (1, 1), _ENUM64: (3, count),
        }.get(kind, (0, 0))  # fmt: skip
        body = tuple(struct.unpack_from(f"<{words}I", content, at + 4 * words * entry) for entry in range(entries))
        self._types.append(_Type(self._name(name), kind, size, body))
        return int(at + 4 * words * entries)

    def _size(self, number: int) -> int:
        found: _Type = self._types[number]
        if found.kind == _ARRAY:
            ((element, _, count),) = found.body
            return self._size(element) * count
        if found.kind in {_TYPEDEF, _VOLATILE, _CONST}:
            return self._size(found.size)
        return 8 if found.kind == _POINTER else found.size

    def struct(self, name: str) -> tuple[int, dict[str, Member]]:
        """Answer a struct's size in bytes, and its members."""
        found = next(each for each in self._types if each.kind == _STRUCT and each.name == name)
        members = {self._name(at): Member(bits // 8, self._size(number)) for at, number, bits in found.body}
        return found.size, members

    def enumerators(self) -> dict[str, int]:
        """Answer the values of all enums' names."""
        return {
            self._name(name): struct.unpack("<i", struct.pack("<I", value))[0]
            for each in self._types
            if each.kind == _ENUM
            for name, value in each.body
        }

    def variables(self, section: str) -> dict[str, Member]:
        """Answer where a data section's variables are in it."""
        return {name: member for found, name, member in self._variables if found == section}
