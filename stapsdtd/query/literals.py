r"""Numbers and strings as expressions write them.

    255    -1    0xff    0o377    0377
    "psql"    'say \'hello\''    "\x1b[0m"

Both functions take the literal as written and its column, and raise ParseError.
"""

from __future__ import annotations

import re

from stapsdtd.query.parse_error import ParseError, quoted

_NUMBER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_INTEGERS = range(-(1 << 63), 1 << 64)
_MAX_DIGITS = 22
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"\\": b"\\", '"': b'"', "'": b"'", "n": b"\n", "t": b"\t"}


def number_value(text: str, column: int) -> int:
    """Return the value, which fits into 64 bits, signed or unsigned."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ParseError(f"{quoted(text)} is not a number; write 255, 0xff or 0o377", column)
    minus, hexadecimal, octal, decimal = match.groups()
    digits, base = next((digits, base) for digits, base in ((hexadecimal, 16), (octal, 8), (decimal, 10)) if digits)
    # int() raises its own error for decimals with thousands of digits
    value = int(digits, base) if len(digits.lstrip("0")) <= _MAX_DIGITS else _INTEGERS.stop
    value = -value if minus else value
    if value not in _INTEGERS:
        raise ParseError(f"{quoted(text)} does not fit into 64 bits", column)
    return value


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
