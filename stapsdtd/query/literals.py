r"""Numbers and strings as expressions write them.

    255    0xff    0o377    0377    0.5
    250ns    10us    5ms    2s                 in nanoseconds
    "psql"    'say \'hello\''    "\x1b[0m"

Functions take the literal as written and its column, and raise ParseError.
"""

from __future__ import annotations

import re

from stapsdtd.query.parse_error import ParseError, quoted

_NUMBER = re.compile(r"0[xX]([0-9a-fA-F]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*)(ns|us|ms|s)?")
_NANOSECONDS = {None: 1, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_FLOAT = re.compile(r"[0-9]+\.[0-9]+")
_MAX_FLOAT_DIGITS = 40
ALL_BITS = (1 << 64) - 1
_MAX_DIGITS = 22
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"\\": b"\\", '"': b'"', "'": b"'", "n": b"\n", "t": b"\t"}


def number_value(text: str, column: int) -> int:
    """Return the value, which fits into 64 bits; a duration's is in nanoseconds."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ParseError(f"{quoted(text)} is not a number; write 255, 0xff, 0o377 or, for a duration, 5ms", column)
    hexadecimal, octal, decimal, unit = match.groups()
    digits, base = (hexadecimal, 16) if hexadecimal else (octal, 8) if octal else (decimal, 10)
    # int() raises its own error for decimals with thousands of digits
    value = int(digits, base) if len(digits.lstrip("0")) <= _MAX_DIGITS else ALL_BITS + 1
    value *= _NANOSECONDS[unit]
    if value > ALL_BITS:
        raise ParseError(f"{quoted(text)} does not fit into 64 bits", column)
    return value


def float_value(text: str, column: int) -> float:
    if len(text) > _MAX_FLOAT_DIGITS or not _FLOAT.fullmatch(text):
        raise ParseError(f"{quoted(text)} is not a number; write 0.5", column)
    return float(text)


def negated(value: float, column: int) -> int | float:
    """Return -value, which fits into 64 bits if it is an integer. column: of the sign."""
    if isinstance(value, int) and value > 1 << 63:
        raise ParseError(f"{quoted(f'-{value}')} does not fit into 64 bits", column)
    return -value


def string_value(text: str, column: int) -> bytes:
    """Return the bytes between the quotes, escapes replaced."""
    parts: list[bytes] = []
    inside = text[1:-1]
    end = 0
    for escape in _ESCAPE.finditer(inside):
        parts.append(inside[end : escape.start()].encode(errors="surrogatepass"))
        end = escape.end()
        parts.append(_unescape(escape, column + 1 + escape.start()))
    parts.append(inside[end:].encode(errors="surrogatepass"))
    return b"".join(parts)


def _unescape(escape: re.Match[str], column: int) -> bytes:
    code = escape[1]
    if len(code) > 1:
        return bytes([int(code[1:], 16)])
    if code not in _ESCAPED:
        raise ParseError(f"{quoted(escape[0])} is not an escape sequence; double the backslash", column)
    return _ESCAPED[code]
