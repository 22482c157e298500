r"""Numbers, characters and strings as D writes them: 10, 0x1fULL, 'a', "a\tb\x41\101"."""

from __future__ import annotations

import re

from stapsdtd.query.d.errors import DSyntaxError
from stapsdtd.query.d.nodes import Integer, Position

_GREATEST = (1 << 64) - 1
_MAX_DIGITS = 22
_MAX_SHOWN = 40
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


def integer_of(text: str, at: Position) -> Integer:
    """Raises DSyntaxError."""
    digits = text.rstrip("uUlL")
    is_octal = digits.startswith("0") and digits.isdigit() and len(digits) > 1
    shown = digits if len(digits) <= _MAX_SHOWN else digits[:_MAX_SHOWN] + "…"
    # int() raises its own error for decimals with thousands of digits
    if len(digits.lstrip("0xX")) > _MAX_DIGITS:
        raise DSyntaxError(f"integer constant is too large: {shown}", at)
    try:
        value = int(digits, 8 if is_octal else 0)
    except ValueError:
        raise DSyntaxError(f"invalid digit in octal constant {shown}", at) from None
    if value > _GREATEST:
        raise DSyntaxError(f"integer constant is too large: {shown}", at)
    return Integer(value, text[len(digits) :].lower(), at)


def character_value(text: str, at: Position) -> int:
    """Return what characters in single quotes are as a number. Raises DSyntaxError."""
    content = string_value(text)
    if len(content) > 8:
        raise DSyntaxError("character constant has more than 8 characters", at)
    return int.from_bytes(content, "big")


def string_value(text: str) -> bytes:
    """Return the bytes between the quotes, escapes replaced."""
    content, end = bytearray(), 1
    for escape in _ESCAPE.finditer(text, 1, len(text) - 1):
        content += text[end : escape.start()].encode(errors="surrogateescape")
        content += _escape(escape[1])
        end = escape.end()
    return bytes(content + text[end:-1].encode(errors="surrogateescape"))


def _escape(code: str) -> bytes:
    if code[0] == "x" and len(code) > 1:
        return bytes([int(code[1:], 16)])
    if code[0] in "01234567":
        return bytes([int(code, 8) & 0xFF])
    return bytes([_ESCAPED[code]]) if code in _ESCAPED else code.encode()
