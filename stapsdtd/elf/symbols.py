"""Look up functions by address and symbols by name, in `.symtab` and `.dynsym`; symbols also in the `.symtab` of a
separate debug file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stapsdtd.elf.container import SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB, ByteOrder, Container, Section, positions
from stapsdtd.model import MAX_FUNCTION_NAME_BYTES, Unavailable, Vaddr

_STT_NOTYPE, _STT_OBJECT, _STT_FUNC, _STT_COMMON, _STT_TLS, _STT_GNU_IFUNC = 0, 1, 2, 5, 6, 10
_STB_LOCAL, _STB_GLOBAL = 0, 1
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1

MAX_SYMBOLS_BYTES = 64 << 20
MAX_SEARCHED_BYTES = 4 << 30
"""Over all names searched for in the symbols and strings of an object; takes some seconds."""
MAX_FUNCTION_NAMES_BYTES = 16 << 20
"""Over all functions of an object: in a hostile string table a long name begins at every byte."""

_MAX_POSITIONS = 1000
"""Of a name in a string table, where it is found once by itself and as the tail of other names."""

_MAX_NESTING = 16
"""How many symbols may be skipped that start nearer to the address but end before it."""


def enclosing_functions(container: Container, addresses: Sequence[Vaddr]) -> list[str | None]:
    """Return for each address the function that covers it with the nearest start; None if there is none."""
    for kind in (SHT_SYMTAB, SHT_DYNSYM):
        for section in container.sections_of_kind(kind)[:1]:
            functions = _read_functions(container, section)
            if len(functions):
                return _names(container, section, functions, addresses)
    return [None] * len(addresses)


def symbol_addresses(
    container: Container,
    names: Iterable[str],
    debug: Container | None = None,
    *,
    max_searched_bytes: int = MAX_SEARCHED_BYTES,
) -> dict[str, Vaddr | Unavailable]:
    """Return the address of each symbol, or why it is unknown. debug: the object's separate debug file."""
    sources = [(container, SHT_SYMTAB), (container, SHT_DYNSYM), *([(debug, SHT_SYMTAB)] if debug else [])]
    tables = [
        _SymbolTable(source, section) for source, kind in sources for section in source.sections_of_kind(kind)[:1]
    ]
    addresses: dict[str, Vaddr | Unavailable] = {}
    left = max_searched_bytes
    for name in names:
        addresses[name] = Unavailable(f"no symbol table of the object contains {name}")
        for table in tables:
            left -= table.nbytes
            if left < 0:
                addresses[name] = Unavailable("the object refers to too many symbols")
            elif (address := table.find(name)) is not None:
                addresses[name] = address
                if not isinstance(address, Unavailable):
                    break
    return addresses


class _SymbolTable:
    def __init__(self, container: Container, section: Section) -> None:
        layout = _symbol_layout(container.word_bytes, container.byte_order)
        self._symbols = np.empty(0, layout)
        self.strings = b""
        if section.size > MAX_SYMBOLS_BYTES or section.entry_size != layout.itemsize:
            return
        if 0 < section.link < len(container.section_table):
            strings = container.section(section.link)
            if strings.kind != SHT_NOBITS and strings.size <= MAX_SYMBOLS_BYTES:
                data = container.file.read(section.offset, section.size)
                self._symbols = np.frombuffer(data, layout, len(data) // layout.itemsize)
                self.strings = container.file.read(strings.offset, strings.size)

    @property
    def nbytes(self) -> int:
        """The number of bytes searched for each name."""
        return len(self.strings) + self._symbols.nbytes

    def find(self, name: str) -> Vaddr | Unavailable | None:
        """Return the symbol's address, preferring global symbols; None if there is no such symbol.

        Static variables of the same name cannot be told apart.
        """
        name_offsets = list(islice(positions(self.strings, name.encode() + b"\0"), _MAX_POSITIONS))
        symbols = self._symbols[np.isin(self._symbols["name"], name_offsets)]
        kinds = symbols["info"] & 0xF
        if (kinds == _STT_TLS).any():
            return Unavailable(f"{name} is thread-local")
        symbols = symbols[np.isin(kinds, (_STT_NOTYPE, _STT_OBJECT, _STT_FUNC, _STT_COMMON, _STT_GNU_IFUNC))]
        if not len(symbols):
            return None
        symbols = symbols[(symbols["shndx"] != _SHN_UNDEF) & (symbols["shndx"] != _SHN_ABS)]
        if not len(symbols):
            return Unavailable(f"{name} is in another object")
        if (symbols["info"] >> 4 != _STB_LOCAL).any():
            symbols = symbols[symbols["info"] >> 4 != _STB_LOCAL]
        addresses = set(symbols["value"].tolist())
        if len(addresses) > 1:
            return Unavailable(f"the object has {len(addresses)} symbols named {name}")
        return Vaddr(addresses.pop())


def _read_functions(container: Container, section: Section) -> NDArray[np.void]:
    """Return the defined function symbols by address; of several at one address, the preferred one is last."""
    layout = _symbol_layout(container.word_bytes, container.byte_order)
    if section.size > MAX_SYMBOLS_BYTES or section.entry_size != layout.itemsize:
        return np.empty(0, layout)
    data = container.file.read(section.offset, section.size)
    symbols = np.frombuffer(data, layout, len(data) // layout.itemsize)
    kind = symbols["info"] & 0xF
    functions = symbols[((kind == _STT_FUNC) | (kind == _STT_GNU_IFUNC)) & (symbols["shndx"] != 0)]
    is_global = functions["info"] >> 4 == _STB_GLOBAL
    ordered: NDArray[np.void] = functions[np.lexsort((is_global, functions["size"] > 0, functions["value"]))]
    return ordered


def _names(
    container: Container, section: Section, functions: NDArray[np.void], addresses: Sequence[Vaddr]
) -> list[str | None]:
    starts = functions["value"].astype(np.uint64)
    if container.architecture == "arm":
        starts &= ~np.uint64(1)  # marks Thumb functions
    ends = _ends(container, functions, starts)
    wanted = np.array(addresses, np.uint64)
    candidate = np.searchsorted(starts, wanted, side="right") - 1
    enclosing = np.full(len(wanted), -1)
    for _ in range(_MAX_NESTING):
        covers = (enclosing < 0) & (candidate >= 0) & (wanted < ends[np.maximum(candidate, 0)])
        enclosing[covers] = candidate[covers]
        candidate -= 1
    read_name = _NameReader(container, section)
    names = {index: read_name(int(functions[index]["name"])) for index in np.unique(enclosing).tolist() if index >= 0}
    return [names.get(index) for index in enclosing.tolist()]


def _ends(container: Container, functions: NDArray[np.void], starts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the functions' end addresses. One without a size, as assembly leaves them, ends at the next symbol or at
    the end of its section.
    """
    highest = np.uint64(2**64 - 1)
    sections = container.section_table
    section_ends = np.append(sections["addr"].astype(np.uint64) + sections["size"].astype(np.uint64), np.uint64(0))
    section_indexes = np.minimum(functions["shndx"].astype(np.int64), len(sections))
    distinct = np.unique(starts)
    following = np.append(distinct, highest)[np.searchsorted(distinct, starts, side="right")]
    sized = starts + functions["size"].astype(np.uint64)
    sized[sized < starts] = highest
    return np.where(functions["size"] > 0, sized, np.minimum(following, section_ends[section_indexes]))


class _NameReader:
    """Reads names one by one: the string table can be far larger than the few names needed."""

    def __init__(self, container: Container, symbols: Section) -> None:
        self._file = container.file
        self._strings = None
        self._left = MAX_FUNCTION_NAMES_BYTES
        if 0 < symbols.link < len(container.section_table):
            strings = container.section(symbols.link)
            self._strings = strings if strings.kind != SHT_NOBITS else None

    def __call__(self, name_offset: int) -> str | None:
        if self._strings is None or name_offset == 0 or name_offset >= self._strings.size:
            return None
        length = min(MAX_FUNCTION_NAME_BYTES + 1, self._strings.size - name_offset)
        raw, end, _ = self._file.read(self._strings.offset + name_offset, length).partition(b"\0")
        self._left -= len(raw)
        if not end or not raw or self._left < 0:
            return None
        return raw.decode("utf-8", "backslashreplace")


@functools.cache
def _symbol_layout(word_bytes: int, byte_order: ByteOrder) -> np.dtype[np.void]:
    word, half, quarter = f"{byte_order}u{word_bytes}", f"{byte_order}u4", f"{byte_order}u2"
    if word_bytes == 8:
        return np.dtype(
            [
                ("name", half),
                ("info", "u1"),
                ("other", "u1"),
                ("shndx", quarter),
                ("value", word),
                ("size", word),
            ]
        )
    return np.dtype(
        [("name", half), ("value", word), ("size", word), ("info", "u1"), ("other", "u1"), ("shndx", quarter)]
    )
