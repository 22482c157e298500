"""How the operands of the model cross the socket: each as a kind and its fields' cells of 64 bits, told by one table.

    Memory("rbp", -8) ──► kind 3, cells: text 1 + 4, -8 modulo 2**64, 0, 1, 0

A rule says what a field may be. It holds for the worker that encodes and for the daemon that does not believe it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stapsdtd.elf.notes import MAX_ARGUMENTS_BYTES
from stapsdtd.model import Address, Argument, Constant, Memory, Operand, Register, Unavailable

_WORD = 1 << 64

MAX_TEXT_BYTES = 4 * MAX_ARGUMENTS_BYTES
"""Of a note's argument: a byte that is no UTF-8 becomes the four of its escape."""

MAX_REASON_BYTES = MAX_TEXT_BYTES + 512
"""A reason may quote a text."""

_REGISTER = re.compile(r"[A-Za-z0-9_]{1,16}")

TextIndex = Callable[[str], int]


class RefusedError(Exception):
    """What a worker said cannot be of a file; the text says why."""


class _Rule(Protocol):
    def cell(self, value: Any, text_index: TextIndex) -> int: ...

    def value(self, cell: int, texts: Sequence[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Integer:
    """Between these two, which are less than 2**64 apart, or one of choices."""

    lowest: int
    highest: int
    choices: frozenset[int] | None = None

    def cell(self, value: Any, text_index: TextIndex) -> int:  # noqa: ARG002 - as all rules
        if not self._allows(value):
            raise ValueError(value)
        return int(value) % _WORD

    def value(self, cell: int, texts: Sequence[str]) -> int:  # noqa: ARG002 - as all rules
        value = cell - _WORD if self.lowest < 0 and cell > self.highest else cell
        if not self._allows(value):
            raise RefusedError(f"an operand has the number {value}")
        return value

    def _allows(self, value: int) -> bool:
        return self.lowest <= value <= self.highest and (self.choices is None or value in self.choices)


@dataclass(frozen=True, slots=True)
class _Text:
    """A text, as its index plus 1, so that 0 is None."""

    most_bytes: int
    pattern: re.Pattern[str] | None = None
    optional: bool = False

    def cell(self, value: Any, text_index: TextIndex) -> int:
        return 0 if value is None else text_index(value) + 1

    def value(self, cell: int, texts: Sequence[str]) -> str | None:
        if cell == 0 and self.optional:
            return None
        if not 0 < cell <= len(texts):
            raise RefusedError(f"an operand has text {cell} of {len(texts)}")
        text = texts[cell - 1]
        if not text or (self.pattern is not None and self.pattern.fullmatch(text) is None):
            raise RefusedError(f"an operand has the text {text[:40]!r}")
        if len(text) * 4 > self.most_bytes and len(text.encode()) > self.most_bytes:
            raise RefusedError(f"an operand has a text of {len(text)} characters")
        return text


@dataclass(frozen=True, slots=True)
class Shape:
    """fields: in the order in which the operand's type takes them. sizes: of a value that such an operand can have."""

    type: type[Operand]
    fields: Mapping[str, _Rule]
    sizes: range | frozenset[int]

    def encode(self, operand: Operand, text_index: TextIndex) -> list[int]:
        """Raises ValueError where the operand has not this shape."""
        return [rule.cell(getattr(operand, name), text_index) for name, rule in self.fields.items()]

    def decode(self, cells: Sequence[int], texts: Sequence[str]) -> Operand:
        """Raises RefusedError."""
        values = [rule.value(cell, texts) for rule, cell in zip(self.fields.values(), cells, strict=True)]
        return self.type(*values)


_REGISTER_NAME = _Text(16, _REGISTER)
_MAYBE_REGISTER = _Text(16, _REGISTER, optional=True)
_MAYBE_SYMBOL = _Text(MAX_TEXT_BYTES, optional=True)
_SIGNED = _Integer(-(1 << 63), (1 << 63) - 1)

MAX_SIZE = 1 << 20
"""operands/grammar.py makes others 0 and Unavailable."""

_NUMBERS = frozenset({1, 2, 4, 8})
_FLOATS = frozenset({4, 8})
_BYTES = range(1, 4097)
_ANY = range(MAX_SIZE + 1)

SHAPES = (
    Shape(Constant, {"value": _Integer(0, _WORD - 1)}, _NUMBERS),
    Shape(Constant, {"value": _Integer(-(1 << 63), -1)}, _NUMBERS),
    Shape(Register, {"name": _REGISTER_NAME, "first_bit": _Integer(0, 8, frozenset({0, 8}))}, _NUMBERS),
    Shape(
        Memory,
        {
            "base": _MAYBE_REGISTER,
            "displacement": _SIGNED,
            "index": _MAYBE_REGISTER,
            "scale": _Integer(1, 8, _NUMBERS),
            "symbol": _MAYBE_SYMBOL,
        },
        _BYTES,
    ),
    Shape(Address, {"base": _MAYBE_REGISTER, "displacement": _SIGNED, "symbol": _MAYBE_SYMBOL}, _NUMBERS),
    Shape(Unavailable, {"reason": _Text(MAX_REASON_BYTES)}, _ANY),
)


def encode_operand(operand: Operand, text_index: TextIndex) -> tuple[int, list[int]]:
    """The operand's kind and cells. Raises ValueError for one that no shape fits."""
    for kind, shape in enumerate(SHAPES):
        if type(operand) is shape.type:
            try:
                return kind, shape.encode(operand, text_index)
            except ValueError:
                continue
    raise ValueError(f"{operand} has no shape")


def fits(argument: Argument, kind: int) -> bool:
    """Answer whether the argument can have its operand, which is of that kind: readers rely on it.

    operands/grammar.py makes others Unavailable.
    """
    size = argument.size
    if size not in SHAPES[kind].sizes:
        return False
    match argument.operand:
        case Constant(value):
            low, high = (-(1 << 8 * size - 1), 1 << 8 * size - 1) if argument.signed else (0, 1 << 8 * size)
            return low <= value < high and not argument.is_float
        case Address():
            return not argument.is_float
        case Register(first_bit=first_bit):
            return (size == 1 or not first_bit) and (size in _FLOATS or not argument.is_float)
        case _:
            return True
