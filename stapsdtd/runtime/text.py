"""Make untrusted text safe to print."""

from __future__ import annotations

_FIRST_PRINTABLE, _LAST_PRINTABLE = b" ~"


def escape(text: str) -> str:
    r"""Backslash-escape everything that is not printable, so that the text fits one line of any terminal or log.

    >>> print(escape("web\x1b[2J\n"))
    web\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def escape_bytes(data: bytes) -> str:
    r"""Return bytes as text: printable ASCII as it is, `\x00` for anything else.

    >>> print(escape_bytes(b"\x7fELF\n"))
    \x7fELF\x0a
    """
    return "".join(chr(byte) if _FIRST_PRINTABLE <= byte <= _LAST_PRINTABLE else f"\\x{byte:02x}" for byte in data)
