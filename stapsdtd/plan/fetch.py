r"""Fetch expressions of tracefs for operands (Documentation/trace/uprobetracer.rst).

    q0=%di:u64   d0=-20(%bp):u32   s0=+0(%si):ustring   q1=\0:u64

A register is fetched whole and narrowed by the reader, so that arguments of all widths share one type. Memory is
fetched at its exact width: reading more might run into a page that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stapsdtd.arch import ARCHITECTURES, word_bytes
from stapsdtd.model import Address, Argument, Capture, Constant, Memory, Register, Unavailable


class SlotKind(Enum):
    """What a field of an event can hold: the letter its name begins with, and its tracefs type."""

    QUAD = ("q", "u64")
    DOUBLE = ("d", "u32")
    WORD = ("w", "u16")
    BYTE = ("b", "u8")
    STRING = ("s", "ustring")

    @property
    def letter(self) -> str:
        return self.value[0]

    @property
    def type(self) -> str:
        return self.value[1]


_BY_SIZE = {8: SlotKind.QUAD, 4: SlotKind.DOUBLE, 2: SlotKind.WORD, 1: SlotKind.BYTE}


@dataclass(frozen=True, slots=True)
class Fetch:
    """One value to be had from the kernel, in a slot of this kind."""

    kind: SlotKind
    expression: str


def fetch(capture: Capture, argument: Argument, architecture: str) -> Fetch | Constant | Unavailable:
    """How to get a captured argument: from the kernel, from the note itself, or not at all and why."""
    operand = argument.operand
    if isinstance(operand, Unavailable):
        return operand
    if isinstance(operand, Constant) and not capture.is_string:
        return operand
    if capture.is_string and argument.size != word_bytes(architecture):
        return Unavailable(f"{argument.text} is {argument.size} bytes wide, which is no pointer to a string")
    if not capture.is_string and argument.size not in _BY_SIZE:
        return Unavailable(f"{argument.text}: the ftrace engine cannot take a value of {argument.size} bytes")
    if isinstance(operand, Constant):
        return Fetch(SlotKind.STRING, f"@{operand.value % (1 << 8 * word_bytes(architecture)):#x}:ustring")
    if isinstance(operand, Memory) and operand.index is not None:
        return Unavailable(f"{argument.text}: tracefs cannot add a base and an index")
    if isinstance(operand, Address):
        return _symbol_address(operand, capture, argument, architecture)
    place = _place(operand, architecture)
    if place is None:
        return Unavailable(f"{argument.text}: tracefs has no name for this register on {architecture}")
    if capture.is_string:
        return Fetch(SlotKind.STRING, f"+0({place}):ustring")
    if isinstance(operand, Memory):
        kind = _BY_SIZE[argument.size]
        return Fetch(kind, f"{place}:{kind.type}")
    return Fetch(SlotKind.QUAD, f"{place}:u64")


def _place(operand: Register | Memory, architecture: str) -> str | None:
    known = ARCHITECTURES.get(architecture)
    if isinstance(operand, Memory) and operand.base is None:
        return f"@{operand.displacement % (1 << 64):#x}"
    name = known and known.tracefs.get(str(operand.name if isinstance(operand, Register) else operand.base))
    if name is None:
        return None
    return f"%{name}" if isinstance(operand, Register) else f"{operand.displacement:+d}(%{name})"


def _symbol_address(operand: Address, capture: Capture, argument: Argument, architecture: str) -> Fetch | Unavailable:
    """The string at a symbol can be had; its address alone is what no fetch expression gives."""
    place = _place(Memory(operand.base, operand.displacement), architecture)
    if not capture.is_string or place is None:
        return Unavailable(f"{argument.text}: tracefs cannot give the address of a symbol")
    return Fetch(SlotKind.STRING, f"{place}:ustring")
