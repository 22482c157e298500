"""What the daemon knows of an instruction set. Each has a file of its own, which ends with its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stapsdtd.model import Operand

OperandParser = Callable[[str], tuple[Operand, int]]
"""Parses an operand's text into the operand and its width in bytes, which applies if the note gives no size."""

NopLength = Callable[[bytes], int]
"""Takes code and returns the length in bytes of the nop that it begins with; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """How the kernel's own functions are called. arguments, results: registers, in their order.

    A struct larger than two registers is passed in memory. has_copy_pointers: a register then points to it.
    has_result_pointer: the first register points to where such a result is to be written.
    is_stack_final: when an argument did not fit into registers, none of the later ones is in a register either.
    has_even_pairs: what is aligned to two registers begins in one with an even number.
    return_pops: bytes that a return takes off the stack, above what stack_pointer was when the function was entered.
    """

    arguments: tuple[str, ...]
    results: tuple[str, str]
    stack_pointer: str
    return_pops: int = 0
    has_copy_pointers: bool = False
    has_result_pointer: bool = False
    is_stack_final: bool = False
    has_even_pairs: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """elf: e_machine, the class in bits and the byte order of its files. machine: `uname -m` of hosts that run its code
    natively, empty if the daemon supports none. word_bytes: the size of a register and of a pointer.
    unpatchable_nop_length: of nops in which the kernel has no uprobes, for the reason why_unpatchable.

    parse_operand: None if its operands are not supported. pt_regs: where the kernel saves each register at a probe, as
    an index of words in struct pt_regs (arch/*/include/uapi/asm/ptrace.h); a 32-bit process's are saved in the host's
    structure. program_counter: which register holds the address of the instruction. tracefs: what fetch expressions
    call each register (regs_query_register_offset in arch/*/kernel/ptrace.c); only x86's were tried.
    calls: None if it is not known.
    """

    name: str
    elf: tuple[str, int, Literal["<", ">"]]
    machine: str
    word_bytes: int
    nop_length: NopLength
    parse_operand: OperandParser | None = None
    pt_regs: Mapping[str, int] = field(default_factory=dict)
    program_counter: str | None = None
    tracefs: Mapping[str, str] = field(default_factory=dict)
    calls: CallingConvention | None = None
    unpatchable_nop_length: NopLength | None = None
    why_unpatchable: str = ""


def one_of(*nops: str) -> NopLength:
    """Make a NopLength of instructions in hex, in memory order."""
    codes = [bytes.fromhex(nop) for nop in nops]
    return lambda code: next((len(nop) for nop in codes if code.startswith(nop)), 0)


def numbered(names: Iterable[str], first: int = 0) -> dict[str, int]:
    return {name: index for index, name in enumerate(names, first)}


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}
