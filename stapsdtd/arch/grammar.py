"""Parse argument strings: the parts of their grammar that all architectures share.

    -4@$5 8@-16(%rbp) 8f@%rax -4@NBuffers(%rip)

Each argument is `N[f]@operand`: N is the value's size in bytes, negative for signed; `f` marks floating point
(sys/sdt.h and systemtap's wiki, UserSpaceProbeImplementation). Any of them may lack `N[f]@`, as in old notes and
hand-written assembly: `8@$10 %rdi 4@%eax` has three. Operands of arm and aarch64 contain spaces, but in brackets alone,
`8@[sp, 96]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stapsdtd.arch.registry import ARCHITECTURES, word_bytes
from stapsdtd.model import Address, Argument, Constant, Memory, Operand, Register, Unavailable

_NUMBER_BYTES = (1, 2, 4, 8)
_FLOAT_BYTES = (4, 8)

_PREFIX = re.compile(r"(?:^|(?<=\s))(?P<minus>-?)(?P<size>[0-9]+)(?P<float>f?)@")

_MAX_SIZE = 1 << 20
"""A larger N is nonsense, and might overflow the integers that carry it."""

_MAX_VALUE_BYTES = 4096
"""Of a value that is delivered as raw bytes, such as a struct."""

_BRACKETED = re.compile(r"\[[^\[\]]*\]|\([^()]*\)")
_OPERAND = re.compile(r"(?:\[[^\[\]]*+\]|\([^()]*+\)|,\s++|\S)++")
"""A run without spaces, except in brackets and behind commas; brackets do not nest, which keeps the search linear."""


def parse_arguments(text: str, architecture: str) -> tuple[Argument, ...]:
    """Return the arguments in order. Never raises: an argument that cannot be fetched has the operand `Unavailable`."""
    text = text.strip()
    if text in ("", ":"):
        return ()
    return tuple(_arguments(text, architecture))


def _arguments(text: str, architecture: str) -> Iterator[Argument]:
    prefixes = list(_PREFIX.finditer(text))
    for operand in _operands(text[: prefixes[0].start()] if prefixes else text):
        yield _unsized(operand, architecture)
    ends = [prefix.start() for prefix in prefixes[1:]] + [len(text)]
    for prefix, end in zip(prefixes, ends, strict=False):
        operand, *unsized = _operands(text[prefix.end() : end]) or [""]
        begin = text.index(operand, prefix.end())
        yield _sized(prefix, operand, text[prefix.start() : begin + len(operand)], architecture)
        for other in unsized:
            yield _unsized(other, architecture)


def _operands(text: str) -> list[str]:
    """Split at spaces. A text with a bracket too many stays whole: where its operands end is unknown."""
    text = text.strip()
    return [text] if set("[]()") & set(_BRACKETED.sub("", text)) else _OPERAND.findall(text)


def _sized(prefix: re.Match[str], operand_text: str, text: str, architecture: str) -> Argument:
    """text: of all of it, as in the note."""
    digits = prefix["size"].lstrip("0")
    size = int(digits or "0") if len(digits) <= len(str(_MAX_SIZE)) else _MAX_SIZE + 1
    signed = bool(prefix["minus"])
    is_float = bool(prefix["float"])
    operand: Operand
    if size > _MAX_SIZE:
        size, operand = 0, Unavailable("the size is out of range")
    elif is_float and size in _NUMBER_BYTES and size not in _FLOAT_BYTES:
        operand = Unavailable(f"{size}-byte floating-point numbers are not supported")
    elif size not in _NUMBER_BYTES:
        operand = _fit_bytes(_parse_operand(operand_text, architecture)[0], size, word_bytes(architecture))
    else:
        operand, width = _parse_operand(operand_text, architecture)
        operand = _fit(operand, operand_text, width, size, signed=signed)
        if isinstance(operand, Register) and size > word_bytes(architecture):
            operand = _in_two_registers(size)
        if is_float and isinstance(operand, Constant | Address):
            operand = Unavailable("a constant cannot be a floating-point number")
    return Argument(text, size, signed, is_float, operand)


def _unsized(text: str, architecture: str) -> Argument:
    """Parse an argument without `N@`, as in old notes or hand-written assembly; its size is its operand's width."""
    operand, width = _parse_operand(text, architecture)
    return Argument(text, width, signed=False, is_float=False, operand=_fit(operand, text, width, width, signed=False))


def _parse_operand(text: str, architecture: str) -> tuple[Operand, int]:
    known = ARCHITECTURES.get(architecture)
    if known is None or known.parse_operand is None:
        return Unavailable(f"operands of {architecture} are not supported yet"), word_bytes(architecture)
    return known.parse_operand(text)


def _in_two_registers(size: int) -> Unavailable:
    """For the second register gcc takes the next one in an order of its own, clang any that is free."""
    return Unavailable(f"{size} bytes are in two registers, but the note names only one")


def _fit_bytes(operand: Operand, size: int, word_bytes: int) -> Operand:
    """A value that does not have the size of a number is delivered as raw bytes, which must be in memory."""
    match operand:
        case Register() if word_bytes < size <= 2 * word_bytes:
            return _in_two_registers(size)
        case Constant() | Register() | Address():
            return Unavailable(f"a value of {size} bytes is supported only in memory")
        case Memory() if not 0 < size <= _MAX_VALUE_BYTES:
            return Unavailable(f"a value of {size} bytes is not supported; the limit is {_MAX_VALUE_BYTES}")
        case _:
            return operand


def _fit(operand: Operand, text: str, width: int, size: int, *, signed: bool) -> Operand:
    """Fit the operand to a value of `size` bytes: the note's size takes precedence over the register's width.

    `8@%eax` is all of rax. But no wider register has its lowest bits at `%ah`.
    """
    match operand:
        case Constant(value):
            bits = 8 * size
            value &= (1 << bits) - 1
            return Constant(value - (1 << bits) if signed and value >> (bits - 1) else value)
        case Register(first_bit=first_bit) if first_bit and size > width:
            return Unavailable(f"{text} is {width} byte wide, but the note says {size}")
        case _:
            return operand
