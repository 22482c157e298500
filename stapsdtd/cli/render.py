r"""Formats values for the terminal, escaping everything that traced programs control.

Programs choose their names, paths and strings. Escape sequences in them are shown as `\x1b[2J`, and so is anything else
that is not printable, including characters that change the direction of text.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from typing import TYPE_CHECKING, TextIO

import click

from stapsdtd.runtime.text import escape, escape_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from stapsdtd.client import Argument, Site, Value

_POINTER_SIZE = 8
_USUAL_WIDTH = 80
_MAX_SHOWN_REASONS = 3
_LINES_PER_WRITE = 256
"""So few that malloc has room for them; megabytes at once cost as much again in page faults."""


def quote(text: str | bytes) -> str:
    """Escape the text, or bytes, quotation marks included, and put it in quotation marks."""
    escaped = escape_bytes(text) if isinstance(text, bytes) else escape(text)
    return '"' + escaped.replace('"', '\\"') + '"'


def cut_mark(value: Value) -> str:
    """Return what stands behind a value's text: `…` if there was more of it than was captured."""
    from stapsdtd.client import CutText  # noqa: PLC0415 (the client costs 170 ms, and is there by now)

    return "…" if isinstance(value, CutText) else ""


def format_value(value: Value, reason: str = "", *, is_hexadecimal: bool = False) -> str:
    r"""Return `"SELECT 1"`, `42`, `0x7f31c0de4000`, `"\xa0\x00a"` for bytes, or `<reason>` if there is no value.

    Behind a string that was cut stands `…`.
    """
    if isinstance(value, str | bytes):
        return quote(value) + cut_mark(value)
    if value is None:
        return f"<{escape(reason)}>"
    return hex(value) if is_hexadecimal and isinstance(value, int) else str(value)


def is_address(argument: Argument) -> bool:
    """Report whether an argument may be an address: compilers declare pointers as unsigned numbers of 64 bits."""
    return argument.size == _POINTER_SIZE and not argument.signed and not argument.is_float


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


def print_grouped(verdict: str, items: Iterable[tuple[str, str]]) -> None:
    """Print on standard error for each reason how many items it has and the first one, the most frequent reason first.

    items: each a reason and what it is about.
    """
    by_reason: dict[str, list[str]] = {}
    for reason, item in items:
        by_reason.setdefault(reason, []).append(item)
    width = terminal_width(sys.stderr)
    for reason, members in sorted(by_reason.items(), key=lambda group: -len(group[1]))[:_MAX_SHOWN_REASONS]:
        message = escape(f"stapsdt: {verdict}: {reason}: {abbreviate(members, 1)}")
        for line in fold(message, width) if width else [message]:
            print(line, file=sys.stderr, flush=True)
    if len(by_reason) > _MAX_SHOWN_REASONS:
        print_stderr(f"{verdict}: for {plural(len(by_reason) - _MAX_SHOWN_REASONS, 'more reason')}")


def point_at(text: str, caret: int) -> None:
    """Print the text on standard error, with a mark below the character at position caret."""
    before, after = (escape(part) for part in (text[:caret], text[caret:]))
    print(f"  {before}{after}\n  {' ' * len(before)}^", file=sys.stderr, flush=True)


def fold(message: str, width: int) -> list[str]:
    """Break a message between words into lines of at most width characters; those after the first are indented."""
    return textwrap.wrap(message, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def terminal_width(stream: TextIO) -> int | None:
    """Return how many columns the terminal has, or $COLUMNS says it has; None if the stream is none."""
    if not stream.isatty():
        return None
    asked = os.environ.get("COLUMNS", "")
    columns = int(asked) if asked.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    return columns or _USUAL_WIDTH


def wants_color(stream: TextIO) -> bool:
    """Report whether stream is a terminal with colors that the user has not disabled."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, *, color: bool) -> str:
    """Return the text in a color, bold or dim, or unchanged if color is false."""
    if not color or not text:
        return text
    return click.style(text, **{style: True}) if style in {"bold", "dim"} else click.style(text, fg=style)


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
