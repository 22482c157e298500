"""Where arguments are when a function begins, and its result when it returns, by the machine's calling convention.

    int f(long a, struct pair b, struct large c, int d)      on x86-64: rdi, rsi and rdx, the stack, rcx

x86-64: System V ABI, section 3.2.3; aarch64: AAPCS64, section 6.8.2. The kernel passes nothing in vector registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.arch.record import Architecture, CallingConvention
from stapsdtd.btf.types import Array, Float, Prototype, Record, TypeId, Types, size_of, stripped

_FLOAT = "it is a floating-point number, which no kernel register holds"
_MAX_REGISTERS = 2
"""Of one argument."""


@dataclass(frozen=True, slots=True)
class Passed:
    """registers: in which it is, its first bytes in the first one. refused: why it cannot be traced, or empty."""

    registers: tuple[str, ...] = ()
    refused: str = ""


_UNKNOWN = Passed(refused="this machine's calling convention is not known")


def passed_arguments(types: Types, prototype: Prototype, architecture: Architecture | None) -> tuple[Passed, ...]:
    convention = architecture.calls if architecture else None
    if architecture is None or convention is None:
        return tuple(_UNKNOWN for _ in prototype.parameters)
    registers = _Registers(types, convention, architecture.word_bytes)
    if convention.has_result_pointer and registers.words(prototype.result) > _MAX_REGISTERS:
        registers.take(1)
    return tuple(registers.passed(parameter.type) for parameter in prototype.parameters)


def passed_result(types: Types, prototype: Prototype, architecture: Architecture | None) -> Passed:
    """Return where the result is. Probes at a return have the first register alone."""
    convention = architecture.calls if architecture else None
    if architecture is None or convention is None:
        return _UNKNOWN
    words = _Registers(types, convention, architecture.word_bytes).words(prototype.result)
    if _has_float(types, prototype.result):
        return Passed(refused=_FLOAT)
    if words > _MAX_REGISTERS:
        return Passed(refused=f"it is {size_of(types, prototype.result)} bytes, which the function returns in memory")
    if words > 1:
        return Passed(refused=f"it is {size_of(types, prototype.result)} bytes, of which one register holds half")
    return Passed(convention.results[:words])


class _Registers:
    """The registers that are left for arguments."""

    def __init__(self, types: Types, convention: CallingConvention, word_bytes: int) -> None:
        self._types = types
        self._convention = convention
        self._word_bytes = word_bytes
        self._taken = 0
        self._is_known = True

    def words(self, ident: TypeId) -> int:
        return -(-size_of(self._types, ident) // self._word_bytes)

    def take(self, count: int) -> tuple[str, ...]:
        """Return none if there are not so many."""
        taken = self._convention.arguments[self._taken : self._taken + count]
        if len(taken) < count:
            return ()
        self._taken += count
        return taken

    def passed(self, ident: TypeId) -> Passed:
        found, size, words = stripped(self._types, ident), size_of(self._types, ident), self.words(ident)
        if not self._is_known:
            return Passed(refused="an argument before it has floating-point numbers")
        if _has_float(self._types, ident):
            # a number is in a register of another kind; a struct may be in both kinds
            self._is_known = isinstance(found, Float)
            return Passed(refused=_FLOAT if self._is_known else "it has floating-point numbers")
        if words == 0:
            return Passed(refused="it is empty")
        if isinstance(found, Record) and (words > _MAX_REGISTERS or self._is_unaligned(found)):
            if self._convention.has_copy_pointers and words > _MAX_REGISTERS:
                self.take(1)
            return Passed(refused=f"it is a {found.keyword} of {size} bytes, passed by value in memory")
        if self._convention.has_even_pairs and _alignment(self._types, ident) > self._word_bytes:
            self._taken += self._taken % 2
        registers = self.take(words)
        if registers:
            return Passed(registers)
        if self._convention.is_stack_final:
            self._taken = len(self._convention.arguments)
        return Passed(refused=f"it is on the stack: {len(self._convention.arguments)} registers hold arguments")

    def _is_unaligned(self, record: Record) -> bool:
        """Report whether x86-64 passes a small record in memory, since a member is not where its alignment wants it."""
        return not self._convention.has_copy_pointers and any(
            not member.bits and member.bit_offset // 8 % (_alignment(self._types, member.type) or 1)
            for member in record.members
        )


def _has_float(types: Types, ident: TypeId) -> bool:
    match stripped(types, ident):
        case Float():
            return True
        case Array(element):
            return _has_float(types, element)
        case Record(_, _, _, members):
            return any(_has_float(types, member.type) for member in members)
        case _:
            return False


def _alignment(types: Types, ident: TypeId) -> int:
    """Return the natural alignment in bytes; BTF has no attributes that change it."""
    match stripped(types, ident):
        case Record(_, _, _, members):
            return max((_alignment(types, member.type) for member in members), default=1)
        case Array(element):
            return _alignment(types, element)
        case _:
            return size_of(types, ident)
