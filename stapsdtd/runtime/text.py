"""Make untrusted text safe to print."""

from __future__ import annotations


def escape(text: str) -> str:
    r"""Backslash-escape everything that is not printable, so that the text fits one line of any terminal or log.

    >>> print(escape("web\x1b[2J\n"))
    web\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
