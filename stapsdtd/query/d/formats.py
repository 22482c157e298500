r"""Formats of printf() and printa(), parsed and checked when the program is compiled.

    "%-16s %5d %@8u\n"      a string on the left of 16 columns, a number, what an aggregation came to

As in C, a conversion is flags, width, precision, size and a name. D adds `?`, the width of an address in hexadecimal,
and `@`, which takes the next aggregation in place of the next argument. A size is not needed: a conversion knows its
argument's type, %d prints unsigned ones too, and a size only demands that the argument has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from stapsdtd.query.d.values import INT64, Bytes, Integer, Pointer, String, Type

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0'@]*+)(?P<width>[*?]|[0-9]+)?(?:\.(?P<precision>\*|[0-9]+)?)?(?P<flags_after>[@']*)"
    r"(?P<name>[hlLw]*.?)",
    re.DOTALL,
)
MAX_WIDTH = 1 << 12
"""Of what one conversion prints; more is refused, or cut where an argument tells it."""
_ADDRESS_DIGITS = 16


class FormatError(ValueError):
    """What is wrong with a format or with the arguments for it; the caller knows the line."""


class Argument(Enum):
    """Where a width or a precision comes from if the format does not have it."""

    NEXT = auto()


@dataclass(frozen=True, slots=True)
class Conversion:
    """number: of the format's conversions, from 1. flags: some of `-+ #0`. takes_result: %@."""

    number: int
    name: str
    flags: str = ""
    width: int | Argument = 0
    precision: int | Argument = 0
    takes_result: bool = False

    def __str__(self) -> str:
        return f"conversion #{self.number} (%{self.name})"


@dataclass(frozen=True, slots=True)
class Format:
    """parts: text as it is, and conversions."""

    parts: tuple[str | Conversion, ...]

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        return tuple(part for part in self.parts if isinstance(part, Conversion))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a conversion takes, and how messages say it."""

    accepts: Callable[[Type], bool]
    wanted: str


def _is_integer(kind: Type) -> bool:
    return isinstance(kind, Integer)


def _sized(bits: int, *, is_signed: bool | None = None) -> _Kind:
    """is_signed: None if that does not matter."""
    wanted = f"the type {Integer(bits, is_signed=is_signed is not False)}"

    def accepts(kind: Type) -> bool:
        return isinstance(kind, Integer) and kind.bits == bits and is_signed in {None, kind.is_signed}

    return _Kind(accepts, wanted)


_INTEGER = _Kind(_is_integer, "an integer")
_CHARACTER = _Kind(lambda kind: isinstance(kind, Integer) and kind.bits <= 32, "a char, short or int")
_ADDRESS = _Kind(lambda kind: isinstance(kind, Integer | Pointer), "a pointer or an integer")
_STRING = _Kind(lambda kind: isinstance(kind, String | Bytes), "a string; use stringof or copyinstr")
_TIME = _Kind(lambda kind: isinstance(kind, Integer) and kind.bits == INT64.bits, "nanoseconds of 64 bits")
_FLOAT = _Kind(lambda _: False, "a floating-point number, which D programs do not have")
_KINDS = {
    **dict.fromkeys("diouxX", _INTEGER),
    **dict.fromkeys("cC", _CHARACTER),
    **dict.fromkeys("apA", _ADDRESS),
    **dict.fromkeys("sS", _STRING),
    **dict.fromkeys("TY", _TIME),
    **dict.fromkeys("eEfgG", _FLOAT),
    **{
        f"{size}{name}": _sized(bits, is_signed=is_signed)
        for size, bits in (("h", 16), ("l", 64), ("ll", 64))
        for names, is_signed in (("di", True), ("ou", False), ("xX", None))
        for name in names
    },
    "lc": _sized(32, is_signed=True),
}


def parse(text: str) -> Format:
    """Raises FormatError."""
    if not text:
        raise FormatError("the format is empty")
    parts: list[str | Conversion] = []
    end = 0
    for number, match in enumerate(_CONVERSION.finditer(text), 1):
        conversion = _conversion(number, match)
        literal = text[end : match.start()] + ("%" if conversion is None else "")
        if literal:
            parts.append(literal)
        if conversion is not None:
            parts.append(conversion)
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    return Format(tuple(parts))


def _conversion(number: int, match: re.Match[str]) -> Conversion | None:
    """Return None for %%."""
    if match[0] == "%%":
        return None
    name, flags = match.group("name", "flags")
    if name == "%":
        raise FormatError(f"conversion #{number}, {match[0]}, must be written %%: it takes no flags")
    if name == "$":
        raise FormatError(f"conversion #{number}: arguments cannot be numbered (%n$); they are taken in order")
    if name == "k":
        raise FormatError(f"conversion #{number} (%k): stacks are not captured yet")
    if not name.rstrip("hlLw"):
        raise FormatError(f"conversion #{number} has no name; a percent sign is written %%")
    if name not in _KINDS:
        raise FormatError(f"conversion #{number}: there is no %{name}")
    return Conversion(
        number,
        name,
        "".join(flag for flag in "-+ #0" if flag in flags),
        _size(number, match["width"] or "0"),
        _size(number, match["precision"] or "0"),
        "@" in flags + match["flags_after"],
    )


def _size(number: int, text: str) -> int | Argument:
    if text == "*":
        return Argument.NEXT
    if text == "?":
        return _ADDRESS_DIGITS
    if len(text) > len(str(MAX_WIDTH)) or int(text) > MAX_WIDTH:
        raise FormatError(f"conversion #{number}: {text} columns are more than {MAX_WIDTH}")
    return int(text)


def check_printf(format_: Format, arguments: Sequence[Type], function: str = "printf()") -> None:
    """Raises FormatError if the arguments are not what the format takes; messages count the format as the first."""
    for conversion in format_.conversions:
        if conversion.takes_result:
            raise FormatError(f"{function}: {conversion} takes an aggregation (%@), which printa() prints")
    taken = _check(format_, arguments, function)
    if taken < len(arguments):
        plural = "" if taken == 1 else "s"
        raise FormatError(f"{function}: the format takes only {taken} argument{plural}, and there are {len(arguments)}")


def check_printa(format_: Format, key: Sequence[Type]) -> None:
    """Raises FormatError if the types of an aggregation's key are not what the format takes; it need not take all."""
    _check(format_, key, "printa()")
    for conversion in format_.conversions:
        kind = _KINDS[conversion.name]
        if conversion.takes_result and not kind.accepts(INT64):
            raise FormatError(
                f"printa(): an aggregation's result has the type {INT64}; {conversion} takes {kind.wanted}"
            )


def _check(format_: Format, arguments: Sequence[Type], function: str) -> int:
    """Return how many arguments the format takes."""
    taken = 0
    for conversion in format_.conversions:
        for what, size in (("width", conversion.width), ("precision", conversion.precision)):
            if size is not Argument.NEXT:
                continue
            if taken == len(arguments):
                raise FormatError(f'{function}: {conversion} lacks an argument for its {what}, "*"')
            if not _is_integer(arguments[taken]):
                raise FormatError(
                    f"{function}: argument #{taken + 2} has the type {arguments[taken]}; "
                    f"the {what} of {conversion} takes an integer"
                )
            taken += 1
        if conversion.takes_result:
            continue
        if taken == len(arguments):
            raise FormatError(f"{function}: {conversion} lacks an argument")
        kind = _KINDS[conversion.name]
        if not kind.accepts(arguments[taken]):
            raise FormatError(
                f"{function}: argument #{taken + 2} has the type {arguments[taken]}; {conversion} takes {kind.wanted}"
            )
        taken += 1
    return taken
