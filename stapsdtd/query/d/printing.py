r"""Text by a format: what printf() and printa() print.

A format's own `\n` and `\t` are printed as they are, and so are strings that the program contains. Other strings come
from traced programs, from files or from the server: what is not printable in them is escaped, into whatever the output
goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stapsdtd.query.d.formats import MAX_WIDTH, Argument, Conversion, Format
from stapsdtd.query.d.values import INT64, Integer, OwnText, Type, Value, quotient, signed, unsigned
from stapsdtd.runtime.text import escape

_BASES = {"d": "d", "i": "d", "u": "d", "o": "o", "x": "x", "X": "X", "p": "x"}
_ESCAPES = {"\a": "a", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v", '"': '"', "\\": "\\"}
# not those of the locale, as DTrace
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Printer:
    """A format, and the types of its arguments, for which it was checked."""

    format: Format
    types: tuple[Type, ...]

    def text(self, values: Sequence[Value], results: Sequence[int | str] = ()) -> str:
        """Return the format filled in. results: of printa()'s aggregations, numbers or pictures of distributions, each
        for one %@, and the last one for those that are left.
        """
        return "".join(self._parts(values, results))

    def _parts(self, values: Sequence[Value], results: Sequence[int | str]) -> Iterator[str]:
        arguments = iter(zip(self.types, values, strict=True))
        taken = 0
        for part in self.format.parts:
            if isinstance(part, str):
                yield part
                continue
            width = _size(part.width, arguments)
            precision = max(_size(part.precision, arguments), 0)
            if part.takes_result:
                result = results[min(taken, len(results) - 1)]
                taken += 1
                yield result if isinstance(result, str) else _converted(part, INT64, result, width, precision)
            else:
                kind, value = next(arguments)
                yield _converted(part, kind, value, width, precision)


def _size(size: int | Argument, arguments: Iterator[tuple[Type, Value]]) -> int:
    """Return the columns, negative for text on their left."""
    if not isinstance(size, Argument):
        return size
    _, value = next(arguments)
    return min(max(signed(_number(value), 32), -MAX_WIDTH), MAX_WIDTH)


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _converted(conversion: Conversion, kind: Type, value: Value, width: int, precision: int) -> str:
    name = conversion.name[-1]
    bits = kind.bits if isinstance(kind, Integer) else 64
    zeros = False
    prefix = text = ""
    if name in "sS":
        text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        text = text.partition("\0")[0]
        own = isinstance(value, OwnText)
        text = _escaped(text) if name == "S" else text
        text = text[: precision or None]
        text = text if own else escape(text)
    elif name == "c":
        text = escape(chr(unsigned(_number(value), 8)))
    elif name == "C":
        text = _escaped(chr(unsigned(_number(value), 8)))
    elif name in "aA":
        text = f"{unsigned(_number(value), bits):#x}"
    elif name in "YT":
        text = _date(_number(value), name)
    else:
        is_signed = name in "di" and isinstance(kind, Integer) and kind.is_signed
        number = signed(_number(value), bits) if is_signed else unsigned(_number(value), bits)
        prefix, text = _digits(conversion, number, precision, is_signed=is_signed)
        zeros = "0" in conversion.flags and not precision
    columns = abs(width)
    if width < 0 or "-" in conversion.flags:
        return (prefix + text).ljust(columns)
    if zeros:
        return prefix + text.rjust(columns - len(prefix), "0")
    return (prefix + text).rjust(columns)


def _digits(conversion: Conversion, number: int, precision: int, *, is_signed: bool) -> tuple[str, str]:
    """Return the sign or 0x, and the digits."""
    base = _BASES[conversion.name[-1]]
    text = format(abs(number), base).rjust(precision, "0")
    prefix = "-" if number < 0 else ""
    if is_signed and not prefix:
        prefix = next((sign for sign in "+ " if sign in conversion.flags), "")
    if "#" in conversion.flags:
        if base in "xX" and number:
            prefix = f"0{base}"
        if base == "o" and not text.startswith("0"):
            text = f"0{text}"
    return prefix, text


def _escaped(text: str) -> str:
    """Return the text as a D program would write it."""
    return "".join(map(_escaped_character, text))


def _escaped_character(character: str) -> str:
    if character in _ESCAPES:
        return f"\\{_ESCAPES[character]}"
    if character == "\0":
        return "\\0"
    if " " <= character <= "~":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "backslashreplace"))


def _date(time_ns: int, name: str) -> str:
    at = time.localtime(quotient(time_ns, _NANOSECONDS))
    month = _MONTHS[at.tm_mon - 1]
    clock = f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02}"
    if name == "Y":
        return f"{at.tm_year} {month} {at.tm_mday:2} {clock}"
    return f"{_DAYS[at.tm_wday]}, {at.tm_mday:02} {month} {at.tm_year} {clock} {at.tm_zone}"
