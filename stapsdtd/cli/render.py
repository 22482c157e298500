r"""Formats values for the terminal, escaping everything that traced programs control.

Programs choose their names, paths and strings. Escape sequences in them are shown as `\x1b[2J`, and so is anything else
that is not printable, including characters that change the direction of text.
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

# Linux maps position-independent programs, libraries, heaps and stacks here, so numbers in this range are addresses.
_ADDRESSES = range(1 << 44, 1 << 48)

_LINES_PER_WRITE = 256
"""So few that malloc has room for them; megabytes at once cost as much again in page faults."""


def quote(text: str) -> str:
    """Escape the text, quotation marks included, and put it in quotation marks."""
    return '"' + escape(text).replace('"', '\\"') + '"'


def format_value(value: Value, reason: str = "") -> str:
    """Return `"SELECT 1"`, `42`, `0x7f31c0de4000`, `a0 ff 07`, or `<reason>` if there is no value."""
    if isinstance(value, str):
        return quote(value)
    if value is None:
        return f"<{escape(reason)}>"
    if isinstance(value, bytes):
        return value.hex(" ")
    return hex(value) if isinstance(value, int) and value in _ADDRESSES else str(value)


def format_type(argument: Argument) -> str:
    """Return the type of an argument: `int32`, `uint64`, `float64`."""
    kind = "float" if argument.is_float else "int" if argument.signed else "uint"
    return f"{kind}{8 * argument.size}"


def format_signature(sites: Iterable[Site]) -> str:
    """Return the types of a probe's arguments at its first site; other sites rarely differ."""
    return " ".join(format_type(argument) for site in list(sites)[:1] for argument in site.arguments)


def abbreviate(items: list[str], limit: int) -> str:
    """Join the first items, and say how many more there are."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Clock:
    """Formats Unix time in nanoseconds as local time of day, `14:03:07.123456`, caching the current second."""

    def __init__(self) -> None:
        self._second = -1
        self._formatted = ""

    def format(self, time_ns: int) -> str:
        second, fraction_ns = divmod(time_ns, 1_000_000_000)
        if second != self._second:
            self._second, self._formatted = second, time.strftime("%H:%M:%S", time.localtime(second))
        return f"{self._formatted}.{fraction_ns // 1000:06}"


def print_stderr(message: str) -> None:
    """Print one line on standard error."""
    print(f"stapsdt: {escape(message)}", file=sys.stderr, flush=True)


def point_at(text: str, caret: int) -> None:
    """Print the text on standard error, with a mark below the character at position caret."""
    before, after = (escape(part) for part in (text[:caret], text[caret:]))
    print(f"  {before}{after}\n  {' ' * len(before)}^", file=sys.stderr, flush=True)


def wants_color(stream: TextIO) -> bool:
    """Report whether stream is a terminal with colors that the user has not disabled."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, *, color: bool) -> str:
    """Return the text in a color or dim, or unchanged if color is false."""
    if not color:
        return text
    return click.style(text, dim=True) if style == "dim" else click.style(text, fg=style)


def console() -> Console:
    """Return a console for tables, as wide as the terminal; in a pipe, lines are neither wrapped nor cut off."""
    from rich.console import Console  # noqa: PLC0415 (costs 30 ms, and is not needed for JSON)

    width = None if sys.stdout.isatty() else 1 << 16
    return Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def write_lines(lines: Sequence[str]) -> None:
    """Write lines to standard output. Unlike print(), continue a write that a signal cut short (PYTHONUNBUFFERED)."""
    if not lines:
        return
    sys.stdout.flush()
    for start in range(0, len(lines), _LINES_PER_WRITE):
        text = "\n".join(lines[start : start + _LINES_PER_WRITE]) + "\n"
        remaining = memoryview(text.encode())
        while remaining:
            remaining = remaining[sys.stdout.buffer.write(remaining) :]
    sys.stdout.buffer.flush()


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that Python's flush at exit does not fail on a closed pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
