r"""Writes operands as fetch expressions of tracefs (Documentation/trace/uprobetracer.rst).

    q0=%di:u64   d0=-20(%bp):u32   s0=+0(%si):ustring   q1=\0:u64

A register is fetched whole and narrowed by the reader, so that arguments of all widths share one type. Memory is
fetched at its exact width: reading more might touch a page that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stapsdtd.arch import ARCHITECTURES, word_bytes
from stapsdtd.model import Address, Argument, BuiltIn, Capture, Constant, Memory, Register, Unavailable
from stapsdtd.plan.values import no_pointer


class SlotKind(Enum):
    """Kinds of an event's fields: the first letter of the name, and the type in tracefs."""

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
    """A value that the kernel fetches into a slot of this kind."""

    kind: SlotKind
    expression: str


def fetch(capture: Capture, subject: Argument | BuiltIn, architecture: str) -> Fetch | Constant | Unavailable:
    """Return how to get what is captured: from the kernel, as a constant of the note, or not at all, and why."""
    if isinstance(subject, BuiltIn):
        return Unavailable(f"the ftrace engine cannot capture {subject.value}")
    argument, operand = subject, subject.operand
    if isinstance(operand, Unavailable):
        return operand
    if capture.is_buffer:
        return Unavailable(f"{argument.text}: the ftrace engine cannot fetch the bytes it points to")
    if isinstance(operand, Constant) and not capture.is_string:
        return operand
    if capture.is_string and argument.size != word_bytes(architecture):
        return no_pointer(argument, capture)
    if not capture.is_string and argument.size not in _BY_SIZE:
        return Unavailable(f"{argument.text}: the ftrace engine cannot fetch a value of {argument.size} bytes")
    if isinstance(operand, Constant):
        return Fetch(SlotKind.STRING, f"@{operand.value % (1 << 8 * word_bytes(architecture)):#x}:ustring")
    if isinstance(operand, Memory) and operand.index is not None:
        return Unavailable(f"{argument.text}: tracefs cannot add a base and an index")
    if isinstance(operand, Address):
        return _symbol_address(operand, capture, argument, architecture)
    location = _location(operand, architecture)
    if location is None:
        return Unavailable(f"{argument.text}: tracefs has no name for this register on {architecture}")
    if capture.is_string:
        return Fetch(SlotKind.STRING, f"+0({location}):ustring")
    if isinstance(operand, Memory):
        kind = _BY_SIZE[argument.size]
        return Fetch(kind, f"{location}:{kind.type}")
    return Fetch(SlotKind.QUAD, f"{location}:u64")


def _location(operand: Register | Memory, architecture: str) -> str | None:
    """Return a register or memory operand as tracefs names it, or None if it has no name for the register."""
    arch = ARCHITECTURES.get(architecture)
    if isinstance(operand, Memory) and operand.base is None:
        return f"@{operand.displacement % (1 << 64):#x}"
    name = arch and arch.tracefs.get(str(operand.name if isinstance(operand, Register) else operand.base))
    if name is None:
        return None
    return f"%{name}" if isinstance(operand, Register) else f"{operand.displacement:+d}(%{name})"


def _symbol_address(operand: Address, capture: Capture, argument: Argument, architecture: str) -> Fetch | Unavailable:
    """Fetch the string at a symbol. No fetch expression yields the symbol's address itself."""
    location = _location(Memory(operand.base, operand.displacement), architecture)
    if not capture.is_string or location is None:
        return Unavailable(f"{argument.text}: tracefs cannot fetch the address of a symbol")
    return Fetch(SlotKind.STRING, f"{location}:ustring")
