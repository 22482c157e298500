"""D's functions of strings."""

from __future__ import annotations

from collections.abc import Sequence

from stapsdtd.model import MAX_STRING_BYTES
from stapsdtd.query.d.captured import text_in
from stapsdtd.query.d.machine import Fault
from stapsdtd.query.d.values import Value


def substr(text: str, start: int, length: int = MAX_STRING_BYTES) -> str:
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


def applied(name: str, values: Sequence[Value]) -> Value:
    """Return what a function makes of its arguments. Raises Fault."""
    match name, values:
        case "stringof", [str(text)]:
            return text
        case "stringof", [bytes(memory)]:
            return text_in(memory)
        case "strlen", [str(text)]:
            return len(text)
        case "strjoin", [str(one), str(other)]:
            return one + other
        case "substr", [str(text), int(start)]:
            return substr(text, start)
        case "substr", [str(text), int(start), int(length)]:
            return substr(text, start, length)
        case "index", [str(text), str(part)]:
            return index(text, part)
        case "index", [str(text), str(part), int(start)]:
            return index(text, part, start)
        case "strstr", [str(text), str(part)]:
            return strstr(text, part)
        case "basename", [str(path)]:
            return basename(path)
        case "dirname", [str(path)]:
            return dirname(path)
        case _:
            raise Fault(f"{name}(): kernel memory is not read")
