r"""How things look: what is printed was chosen by strangers, so nothing reaches a terminal unescaped.

Programs choose their names, paths and strings. An escape sequence in one is shown as `\x1b[2J`, as is everything else
that is not printable, the marks that turn the direction of writing included.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

import click

from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from stapsdtd.client import Argument, Site, Value

# Where Linux puts position-independent programs, libraries, heaps and stacks: such a number is an address.
_ADDRESSES = range(1 << 44, 1 << 48)


def quote(text: str) -> str:
    """The text escaped, between quotation marks that it cannot close."""
    return '"' + escape(text).replace('"', '\\"') + '"'


def show_value(value: Value, reason: str = "") -> str:
    """`"SELECT 1"`, `42`, `0x7f31c0de4000`, `a0 ff 07`, or where there is no value `<reason>`."""
    if isinstance(value, str):
        return quote(value)
    if value is None:
        return f"<{escape(reason)}>"
    if isinstance(value, bytes):
        return value.hex(" ")
    return hex(value) if isinstance(value, int) and value in _ADDRESSES else str(value)


def show_argument(argument: Argument) -> str:
    """The type of an argument's value: `int32`, `uint64`, `float64`."""
    kind = "float" if argument.is_float else "int" if argument.signed else "uint"
    return f"{kind}{8 * argument.size}"


def show_signature(sites: Iterable[Site]) -> str:
    """The types of a probe's arguments, which are the same at all of its sites but for oddities."""
    return " ".join(show_argument(argument) for site in list(sites)[:1] for argument in site.arguments)


def show_some(items: list[str], limit: int) -> str:
    """The first items, and how many more there are."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Clock:
    """Unix time in nanoseconds as local time of day, `14:03:07.123456`; events come by the thousand a second."""

    def __init__(self) -> None:
        self._second = -1
        self._shown = ""

    def show(self, time_ns: int) -> str:
        second, rest = divmod(time_ns, 1_000_000_000)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%H:%M:%S", time.localtime(second))
        return f"{self._shown}.{rest // 1000:06}"


def complain(message: str) -> None:
    """One line on standard error."""
    print(f"stapsdt: {escape(message)}", file=sys.stderr, flush=True)


def point_at(text: str, caret: int) -> None:
    """Two lines on standard error: the text, and under its character of that number a mark."""
    before, behind = (escape(part) for part in (text[:caret], text[caret:]))
    print(f"  {before}{behind}\n  {' ' * len(before)}^", file=sys.stderr, flush=True)


def is_colourful(stream: TextIO) -> bool:
    """Whether stream is a terminal whose user has nothing against partition_by_page_offset."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, *, colourful: bool) -> str:
    """The text in a colour, or dim, or as it is."""
    if not colourful:
        return text
    return click.style(text, dim=True) if style == "dim" else click.style(text, fg=style)


def console() -> Console:
    """For tables: knows the terminal's width and, piped, none, so that no line is wrapped or cut off."""
    from rich.console import Console  # noqa: PLC0415 (costs 30 ms, and JSON does without)

    width = None if sys.stdout.isatty() else 1 << 16
    return Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def write_lines(lines: Sequence[str]) -> None:
    """To standard output, all of it: under PYTHONUNBUFFERED a signal may cut a write short, and print would lose the
    rest.
    """
    if not lines:
        return
    sys.stdout.flush()
    rest = memoryview(("\n".join(lines) + "\n").encode())
    while rest:
        rest = rest[sys.stdout.buffer.write(rest) :]
    sys.stdout.buffer.flush()


def discard_output() -> None:
    """Sends what is still buffered nowhere: Python's own flush at exit would complain of the closed pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
