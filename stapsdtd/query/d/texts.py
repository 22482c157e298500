"""D's functions of strings."""

from __future__ import annotations

MAX_BYTES = 255
"""Of a string, as with DTrace's default strsize, which counts the NUL."""


def cut(text: str) -> str:
    return text if len(text) <= MAX_BYTES else text[:MAX_BYTES]


def substr(text: str, start: int, length: int = MAX_BYTES) -> str:
    """Return a part. A negative start counts from the end, a negative length leaves out so many at the end. What would
    come before the text counts, too.
    """
    if start < 0:
        start += len(text)
        if start < 0 < start + length:
            start, length = 0, length + start
    if not 0 <= start < len(text):
        return ""
    end = start + length if length >= 0 else len(text) + length
    return text[start : max(end, start)]


def index(text: str, part: str, start: int = 0) -> int:
    """Return where a part begins, -1 if it is not there."""
    return text.find(part, max(start, 0)) if start <= len(text) else -1


def strstr(text: str, part: str) -> str:
    """Return the rest of a text, from a part on; nothing if it is not there."""
    position = text.find(part)
    return text[position:] if position >= 0 else ""


def basename(path: str) -> str:
    if not path:
        return "."
    return path.rstrip("/").rpartition("/")[2] or "/"


def dirname(path: str) -> str:
    stripped = path.rstrip("/")
    if not stripped:
        return "/" if path else "."
    folder, slash, _ = stripped.rpartition("/")
    return folder.rstrip("/") or ("/" if slash else ".")
