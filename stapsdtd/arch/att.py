"""AT&T syntax, shared by i386 and x86-64, where parts of registers have their own names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from stapsdtd.arch.expressions import not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.model import Memory, Operand, Register, Unavailable

_REGISTER = re.compile(r"%([a-z][a-z0-9]*(?:\([0-7]\))?)")
_SEGMENTED = re.compile(r"%[cdefgs]s:.*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")
_SCALES = ("", "1", "2", "4", "8")

MemoryParser = Callable[[str, list[str]], Operand | None]


class Part(NamedTuple):
    """The part of a register that a name refers to: `width` bytes of the register `full`, starting at `first_bit`."""

    full: str
    width: int
    first_bit: int = 0


class Registers(NamedTuple):
    """parts: by name, without `%`. unsaved: registers that are not in pt_regs, or meaningless there."""

    architecture: str
    word_bytes: int
    parts: Mapping[str, Part]
    unsaved: re.Pattern[str]

    def value(self, name: str) -> tuple[Operand, int]:
        """Return a register as an operand, and its width in bytes."""
        if part := self.parts.get(name):
            return Register(part.full, part.first_bit), part.width
        if self.unsaved.fullmatch(name):
            return not_saved(f"%{name}"), self.word_bytes
        return Unavailable(f"%{name} is not a register of {self.architecture}"), self.word_bytes

    def address(self, text: str) -> str | Unavailable | None:
        """Return the register used as base or index; None if the text is empty."""
        if not text:
            return None
        part = self.parts.get(text[1:]) if text.startswith("%") else None
        if part is None:
            return Unavailable(f"the base is not a register of {self.architecture}")
        if part.width != self.word_bytes:
            return Unavailable(f"a base register of {part.width} bytes is not supported")
        return part.full

    def operand(self, text: str, parse_memory_at: MemoryParser) -> tuple[Operand, int]:
        """Return an operand and its width in bytes: the register's, else a word's.

        parse_memory_at: takes a displacement and what is in the parentheses behind it.
        """
        if register := _REGISTER.fullmatch(text):
            return self.value(register[1])
        return self._other(text, parse_memory_at) or not_an_operand(text, self.architecture), self.word_bytes

    def _other(self, text: str, parse_memory_at: MemoryParser) -> Operand | None:
        if text.startswith("$"):
            return parse_value(text[1:])
        if _SEGMENTED.fullmatch(text):
            return Unavailable("memory relative to a segment register is not supported")
        if memory := _MEMORY.fullmatch(text):
            return parse_memory_at(memory[1], [part.strip() for part in memory[2].split(",")])
        return parse_memory(text, base=None, word_bytes=self.word_bytes) if text else None

    def memory(self, displacement: str, parts: list[str]) -> Memory | Unavailable | None:
        """Parse `displacement(base,index,scale)`, of which any part may be missing; None if it is none."""
        base_text, index_text, scale_text, *more = [*parts, "", ""][: max(3, len(parts))]
        memory = parse_memory(displacement, None, word_bytes=self.word_bytes)
        if memory is None or isinstance(memory, Unavailable):
            return memory
        if more or not (base_text or index_text) or scale_text not in _SCALES or (scale_text and not index_text):
            return None
        base, index = self.address(base_text), self.address(index_text)
        if isinstance(base, Unavailable):
            return base
        if isinstance(index, Unavailable):
            return index
        return replace(memory, base=base, index=index, scale=int(scale_text or "1"))
