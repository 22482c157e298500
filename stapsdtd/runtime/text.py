"""Texts that others chose, for people to read."""

from __future__ import annotations


def escape(text: str) -> str:
    """The text with everything that is not printable as a backslash escape, fit for one line of any terminal or log."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
