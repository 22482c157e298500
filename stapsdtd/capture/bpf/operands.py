"""Encodes operands as the program in bpf/stapsdt.bpf.c reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stapsdtd.aggregate.aggregation import HitField
from stapsdtd.arch import ARCHITECTURES, word_bytes
from stapsdtd.capture.bpf.layout import (
    FIRST_MISSING_CELL,
    FIRST_WORD_CELL,
    MAX_THEN,
    PACKED_OPERAND,
    PAIR_CELLS,
    PAIR_WORDS,
    OperandKind,
    Take,
)
from stapsdtd.functions.probes import KernelArgument
from stapsdtd.model import Address, Argument, BuiltIn, Constant, Memory, Register, Unavailable
from stapsdtd.plan.values import OfPair, OfStart, Value

_NO_REGISTER = 0xFF
"""The program reads any index beyond the registers as 0."""

_BITS = 64
_MAX_SCALE = 255
_MAX_OFFSET = 1 << 31


class NotEncodableError(ValueError):
    """An operand that the program cannot fetch. The message says why."""


def encode_value(value: Value, subject: Argument | BuiltIn, architecture: str) -> bytes:
    """Raises NotEncodableError."""
    return _built_in(subject) if isinstance(subject, BuiltIn) else _argument(value, subject, architecture)


@dataclass(frozen=True, slots=True)
class _Operand:
    """A row of layout.OPERAND."""

    kind: OperandKind
    take: Take = Take.NUMBER
    constant: int = 0
    limit: int = 0
    base: int = _NO_REGISTER
    index: int = _NO_REGISTER
    scale: int = 1
    width: int = 0
    left: int = 0
    right: int = 0
    is_signed: bool = False
    is_narrow: bool = False
    is_kernel: bool = False
    then: tuple[int, ...] = ()

    def packed(self) -> bytes:
        """Raises NotEncodableError."""
        if len(self.then) > MAX_THEN:
            raise NotEncodableError(
                f"{len(self.then) + 1} pointers lead to it, and the bpf engine follows at most {MAX_THEN + 1}"
            )
        if any(abs(offset) >= _MAX_OFFSET for offset in self.then):
            raise NotEncodableError("it is too far behind a pointer")
        head = self.constant, self.limit, self.take, self.kind, self.base, self.index, self.scale, self.width
        flags = self.is_signed, self.is_narrow, self.is_kernel
        then = len(self.then), *self.then, *[0] * (MAX_THEN - len(self.then))
        return PACKED_OPERAND.pack(*head, self.left, self.right, *flags, *then)


def _built_in(built_in: BuiltIn) -> bytes:
    kind = OperandKind.CGROUP if built_in is BuiltIn.CGROUP else OperandKind.UID_GID
    # the helper returns gid << 32 | uid
    left, right = {BuiltIn.UID: (32, 32), BuiltIn.GID: (0, 32)}.get(built_in, (0, 0))
    return _Operand(kind, left=left, right=right).packed()


def encode_of_pair(value: OfPair) -> bytes:
    """Encode a number that is known of a span's start and end."""
    first = value.pairing * PAIR_CELLS
    return _made(first + value.word, first + PAIR_WORDS, value.word)


def encode_start(start: OfStart, limit: int) -> bytes:
    """Encode the record that was kept of a span's start. limit: of its bytes."""
    # nobody brings in what the program finds in its own tables
    return _Operand(OperandKind.CONSTANT, Take.START, limit=limit, index=start.pairing, is_kernel=True).packed()


def encode_frame(architecture: str, *, is_return: bool) -> bytes:
    """Encode the address of a kernel function's frame, which is the same when it is entered and when it returns.

    Raises NotEncodableError.
    """
    calls = ARCHITECTURES[architecture].calls
    if calls is None:
        raise NotEncodableError(f"how functions are called on {architecture} is not known")
    popped = -calls.return_pops % (1 << _BITS) if is_return else 0
    return _Operand(OperandKind.ADDRESS, constant=popped, base=_register(calls.stack_pointer, architecture)).packed()


def encode_number(number: int) -> bytes:
    return _Operand(OperandKind.CONSTANT, constant=number).packed()


def encode_word(word: int) -> bytes:
    """Encode a number that is calculated."""
    return _made(FIRST_WORD_CELL + word, FIRST_MISSING_CELL + word // _BITS, word % _BITS)


def _made(cell: int, missing_cell: int, missing_bit: int) -> bytes:
    return _Operand(OperandKind.MADE, base=missing_cell, index=cell, scale=missing_bit).packed()


def encode_hit_field(field: HitField) -> bytes:
    """Encode a part of a key that is neither an argument nor a built-in, nor the site."""
    kind, take = {
        HitField.PID: (OperandKind.PID, Take.NUMBER),
        HitField.TID: (OperandKind.TID, Take.NUMBER),
        HitField.CPU: (OperandKind.CPU, Take.NUMBER),
        HitField.EXECNAME: (OperandKind.CONSTANT, Take.COMM),
    }[field]
    return _Operand(kind, take).packed()


@lru_cache(maxsize=1 << 12)
def _argument(value: Value, argument: Argument, architecture: str) -> bytes:
    """Raises NotEncodableError."""
    unused = _BITS - 8 * argument.size
    base = index = _NO_REGISTER
    scale = 1
    kind, constant, width, left, right = OperandKind.CONSTANT, 0, 0, 0, 0
    is_raw = value.is_text and not value.is_string
    match argument.operand:
        case Constant(number):
            constant = number % (1 << _BITS)
        case Register(name, first_bit):
            kind, base, left, right = OperandKind.REGISTER, _register(name, architecture), unused - first_bit, unused
        case Memory(base_name, displacement, index_name, scale):
            base, index = _register(base_name, architecture), _register(index_name, architecture)
            if scale > _MAX_SCALE:
                raise NotEncodableError(f"the bpf engine cannot multiply an index by {scale}")
            constant = displacement % (1 << _BITS)
            if (is_raw and not value.is_buffer) or (value.is_text and argument.characters):
                kind = OperandKind.ADDRESS
            else:
                kind, width, left, right = OperandKind.MEMORY, argument.size, unused, unused
        case Address(base_name, displacement):
            kind, base, constant = OperandKind.ADDRESS, _register(base_name, architecture), displacement % (1 << _BITS)
            left, right = unused, unused
        case Unavailable(reason):
            raise NotEncodableError(reason)
    is_kernel = False
    then: tuple[int, ...] = ()
    if isinstance(argument, KernelArgument):
        is_kernel, then = True, argument.then
        if argument.bits:
            left, right = _BITS - argument.first_bit - argument.bits, _BITS - argument.bits
    take = Take.STRING if value.is_string else Take.BYTES if is_raw else Take.NUMBER
    limit = value.limit + value.is_string
    is_signed = argument.signed and not argument.is_float
    flags = is_signed, word_bytes(architecture) == 4, is_kernel
    return _Operand(kind, take, constant, limit, base, index, scale, width, left, right, *flags, then).packed()


def encode_abs_ip(architecture: str) -> bytes:
    """Return the operand whose value is the instruction's address."""
    register = _register(ARCHITECTURES[architecture].program_counter, architecture)
    return _Operand(OperandKind.REGISTER, base=register).packed()


def _register(name: str | None, architecture: str) -> int:
    """Return a register's index in pt_regs. Raises NotEncodableError."""
    if name is None:
        return _NO_REGISTER
    arch = ARCHITECTURES.get(architecture)
    index = arch.pt_regs.get(name) if arch else None
    if index is None:
        raise NotEncodableError(f"%{name} is no register of {architecture} that the kernel saves at a probe")
    return index
