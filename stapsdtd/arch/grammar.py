"""What the argument strings of all architectures share.

    -4@$5 8@-16(%rbp) 8f@%rax -4@NBuffers(%rip)

Each argument is `N[f]@operand`: N is the value's size in bytes, negative for signed, `f` floating point
(sys/sdt.h and systemtap's wiki, UserSpaceProbeImplementation). Operands of arm and aarch64 contain blanks,
`8@[sp, 96]`, so the string is cut where the next `N[f]@` begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from stapsdtd.arch import aarch64, arm, i386, loongarch64, ppc64le, riscv64, s390x, x86_64
from stapsdtd.model import Address, Argument, Constant, Memory, Operand, Register, Unavailable

OperandParser = Callable[[str], tuple[Operand, int]]
"""Takes an operand's text; gives it and its own width in bytes, which counts where the note gives no size."""

PARSERS: Mapping[str, OperandParser] = {
    "x86-64": x86_64.parse_operand,
    "i386": i386.parse_operand,
    "aarch64": aarch64.parse_operand,
    "arm": arm.parse_operand,
    "riscv64": riscv64.parse_operand,
    "s390x": s390x.parse_operand,
    "ppc64le": ppc64le.parse_operand,
    "loongarch64": loongarch64.parse_operand,
}

_WORD_BYTES = 8
_OTHER_WORD_BYTES: Mapping[str, int] = {"i386": 4, "arm": 4}

_NUMBER_BYTES = (1, 2, 4, 8)
_FLOAT_BYTES = (4, 8)

_PREFIX = re.compile(r"(?:^|(?<=\s))(?P<minus>-?)(?P<size>[0-9]+)(?P<float>f?)@")

_LARGEST_SIZE = 1 << 20
"""Beyond this N is no size but nonsense, and must still fit every integer it travels in."""

_MOST_BYTES = 4096
"""Of a value that is delivered as its bytes, a struct's for instance."""

_BARE_OPERAND = re.compile(r"(?:\[[^\[\]]*\]|\([^()]*\)|\S)+")
"""A run without blanks, except inside brackets; brackets do not nest, which keeps the search linear."""


def parse_arguments(text: str, architecture: str) -> tuple[Argument, ...]:
    """The arguments in their order; never raises, what cannot be fetched is `Unavailable` in its place."""
    text = text.strip()
    if text in ("", ":"):
        return ()
    return tuple(_arguments(text, architecture))


def _arguments(text: str, architecture: str) -> Iterator[Argument]:
    prefixes = list(_PREFIX.finditer(text))
    before = text[: prefixes[0].start()] if prefixes else text
    for bare in _BARE_OPERAND.finditer(before):
        yield _unsized(bare[0], architecture)
    ends = [prefix.start() for prefix in prefixes[1:]] + [len(text)]
    for prefix, end in zip(prefixes, ends, strict=False):
        yield _sized(text[prefix.start() : end].strip(), prefix, text[prefix.end() : end].strip(), architecture)


def _sized(text: str, prefix: re.Match[str], operand_text: str, architecture: str) -> Argument:
    digits = prefix["size"].lstrip("0")
    size = int(digits or "0") if len(digits) <= len(str(_LARGEST_SIZE)) else _LARGEST_SIZE + 1
    signed = bool(prefix["minus"])
    is_float = bool(prefix["float"])
    operand: Operand
    if size > _LARGEST_SIZE:
        size, operand = 0, Unavailable("its size is out of range")
    elif is_float and size in _NUMBER_BYTES and size not in _FLOAT_BYTES:
        operand = Unavailable(f"a floating-point number of {size} bytes is not known")
    elif size not in _NUMBER_BYTES:
        operand = _fit_bytes(_parse_operand(operand_text, architecture)[0], size)
    else:
        operand, width = _parse_operand(operand_text, architecture)
        operand = _fit(operand, operand_text, width, size, signed=signed)
        if isinstance(operand, Register) and size > _OTHER_WORD_BYTES.get(architecture, _WORD_BYTES):
            operand = Unavailable(f"{size} bytes are in two registers, of which the note names one")
        if is_float and isinstance(operand, Constant | Address):
            operand = Unavailable("a constant is no floating-point number")
    return Argument(text, size, signed, is_float, operand)


def _unsized(text: str, architecture: str) -> Argument:
    """An argument of an old note or of hand-written assembly, which may lack `N@`: as wide as its operand."""
    operand, width = _parse_operand(text, architecture)
    return Argument(text, width, signed=False, is_float=False, operand=_fit(operand, text, width, width, signed=False))


def _parse_operand(text: str, architecture: str) -> tuple[Operand, int]:
    parser = PARSERS.get(architecture)
    if parser is None:
        return Unavailable(f"operands of {architecture} are not understood yet"), _WORD_BYTES
    return parser(text)


def _fit_bytes(operand: Operand, size: int) -> Operand:
    """A value of another size than a number's is delivered as its bytes, which only memory can hold."""
    match operand:
        case Constant() | Register() | Address():
            return Unavailable(f"{size} bytes are no number, and in memory they are not")
        case Memory() if not 0 < size <= _MOST_BYTES:
            return Unavailable(f"a value of {size} bytes is not delivered; {_MOST_BYTES} is the most")
        case _:
            return operand


def _fit(operand: Operand, text: str, width: int, size: int, *, signed: bool) -> Operand:
    """The operand of a value of `size` bytes: the note's size governs, not the register's width.

    `8@%eax` is all of rax. But above `%ah` lies no wider register that has its lowest bits there.
    """
    match operand:
        case Constant(value):
            bits = 8 * size
            value &= (1 << bits) - 1
            return Constant(value - (1 << bits) if signed and value >> (bits - 1) else value)
        case Register(first_bit=first_bit) if first_bit and size > width:
            return Unavailable(f"{text} is {width} byte wide and the note asks for {size}")
        case _:
            return operand
