"""The output of `stapsdt top`: tables that are redrawn in place on a terminal, successive tables in a pipe, or JSON.

stapsdt top  14:03:07  12,345 events/s  1,234,567 in all  531 sites
lost: nothing

     RATE/S            TOTAL  PROCESSES  PROBE (2)
     12,000        1,200,000          3  postgresql:query__start  postgres
        345           34,567          1  python:gc__start  python3.11

     RATE/S            TOTAL        PID  COMMAND (1)
     12,345        1,234,567       4711  postgres
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from stapsdtd.cli.following import Summary
from stapsdtd.cli.render import paint, plural, print_stderr, wants_color
from stapsdtd.cli.screen import Screen
from stapsdtd.cli.top_rates import Interval, ProbeRow, ProcessRow
from stapsdtd.cli.trace_output import Notice, print_notice, print_summary, print_unmatched
from stapsdtd.cli.unmatched import Hints
from stapsdtd.runtime.text import escape

_Row = TypeVar("_Row")

_PIPE_ROWS_PER_TABLE = 100


class Output(Protocol):
    def begin(self, hints: Hints) -> None: ...
    def show(self, interval: Interval, *, is_short: bool = False) -> None:
        """is_short: what was left of an interval at the end, whose rates would be of a moment."""

    def notice(self, notice: Notice) -> None: ...
    def close(self) -> None:
        """Restore the terminal."""

    def end(self, summary: Summary) -> None: ...


class JsonOutput:
    def begin(self, hints: Hints) -> None:
        print_unmatched(hints)

    def show(self, interval: Interval, *, is_short: bool = False) -> None:
        del is_short
        print(json.dumps(record(interval)), flush=True)

    def notice(self, notice: Notice) -> None:
        print_notice(notice, as_json=True)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        print(json.dumps(summary.as_record()), file=sys.stderr, flush=True)


class PipeOutput:
    """Prints complete tables, separated by empty lines."""

    def __init__(self) -> None:
        self._is_first = True

    def begin(self, hints: Hints) -> None:
        for line in hints.lines:
            print_stderr(line)

    def show(self, interval: Interval, *, is_short: bool = False) -> None:
        if is_short:
            return
        lines = frame(interval, rows=2 * _PIPE_ROWS_PER_TABLE, color=False)
        print("\n".join(lines if self._is_first else ["", *lines]), flush=True)
        self._is_first = False

    def notice(self, notice: Notice) -> None:
        print_notice(notice)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        print_summary(summary)


class TerminalOutput:
    """Redraws the tables in place, and leaves the last ones on the screen."""

    def __init__(self) -> None:
        self._screen = Screen()
        self._color = wants_color(sys.stdout)
        self._notice = ""
        self._hint = ""

    def begin(self, hints: Hints) -> None:
        self._hint = self._notice = next(iter(hints.lines), "")
        self._screen.open()

    def show(self, interval: Interval, *, is_short: bool = False) -> None:
        if is_short:
            return
        width, height = shutil.get_terminal_size()
        notice = self._notice or ("" if interval.sites or interval.total else self._hint)
        lines = frame(interval, notice=notice, rows=max(height - _OTHER_LINES, 2), width=width, color=self._color)
        self._notice = ""
        # the cursor stays on the last line of the screen
        self._screen.draw(lines[: height - 1])

    def notice(self, notice: Notice) -> None:
        self._notice = notice.text

    def close(self) -> None:
        self._screen.close()

    def end(self, summary: Summary) -> None:
        print_summary(summary)


def output_for(*, as_json: bool) -> Output:
    if as_json:
        return JsonOutput()
    return TerminalOutput() if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" else PipeOutput()


def record(interval: Interval) -> dict[str, object]:
    """Return an interval's JSON object, with the probes and processes that fired in it."""
    return {
        "time_ns": interval.time_ns,
        "seconds": round(interval.seconds, 6),
        "count": interval.count,
        "rate": round(interval.rate(interval.count), 3),
        "total": interval.total,
        "sites": interval.sites,
        "refused": interval.refused,
        "lost": dict(interval.lost),
        "probes": [
            {
                **row.probe._asdict(),
                "count": row.count,
                "rate": round(interval.rate(row.count), 3),
                "total": row.total,
                "processes": row.processes,
            }
            for row in interval.probes
            if row.count
        ],
        "processes": [
            {
                "pid": row.pid,
                "comm": row.comm,
                "count": row.count,
                "rate": round(interval.rate(row.count), 3),
                "total": row.total,
            }
            for row in interval.processes
            if row.count
        ],
    }


_OTHER_LINES = 7
"""Lines of the screen that are not rows of a table, including the cursor's."""


def frame(interval: Interval, *, rows: int, color: bool, width: int | None = None, notice: str = "") -> list[str]:
    """Format an interval as lines of at most width characters. rows: the maximum for both tables together."""
    probe_rows, process_rows = _divide_rows(len(interval.probes), len(interval.processes), rows)
    clock = time.strftime("%H:%M:%S", time.localtime(interval.time_ns // 1_000_000_000))
    sites = plural(interval.sites, "site") + (f", {interval.refused} refused" if interval.refused else "")
    rate = f"{_rate(interval, interval.count)} events/s"
    state, style = _state(interval, notice)

    def cut(line: str) -> str:
        return line[:width].rstrip()

    return [
        cut(f"stapsdt top  {clock}  {rate}  {interval.total:,} in all  {sites}"),
        paint(cut(state), style, color=color) if style else cut(state),
        "",
        paint(cut(_title("PROCESSES", "PROBE", probe_rows, len(interval.probes))), "dim", color=color),
        *(cut(line) for line in _lines(interval, interval.probes[:probe_rows], _probe_cells)),
        "",
        paint(cut(_title("PID", "COMMAND", process_rows, len(interval.processes))), "dim", color=color),
        *(cut(line) for line in _lines(interval, interval.processes[:process_rows], _process_cells)),
    ]


def _divide_rows(probes: int, processes: int, rows: int) -> tuple[int, int]:
    """Give each table half of the rows, plus those that the other one does not need."""
    half = rows // 2
    process_rows = min(processes, max(half, rows - probes))
    return min(probes, rows - process_rows), process_rows


def _state(interval: Interval, notice: str) -> tuple[str, str]:
    """Return the line below the heading, and its color or an empty string."""
    if notice:
        return escape(notice), "yellow"
    if not interval.sites and not interval.total:
        return "no probe matches yet: waiting for one to appear; 'stapsdt list' shows existing probes", "yellow"
    if not any(interval.lost.values()):
        return "lost: nothing", ""
    return f"LOST: {_format_losses(interval.lost, interval.lost_before)}", "red"


def _format_losses(lost: Mapping[str, int], before: Mapping[str, int]) -> str:
    new = sum(lost.values()) - sum(before.values())
    return ", ".join(f"{count:,} in {stage}" for stage, count in lost.items() if count) + f" ({new:,} of them now)"


def _title(column: str, name: str, shown: int, count: int) -> str:
    counts = f"{count}" if shown == count else f"{shown} of {count}"
    return f"{'RATE/S':>11}  {'TOTAL':>15}  {column:>9}  {name} ({counts})"


def _lines(interval: Interval, rows: Sequence[_Row], cells: Callable[[_Row], tuple[int, int, int, str]]) -> list[str]:
    return [
        f"{_rate(interval, count):>11}  {total:>15,}  {third:>9}  {name}"
        for count, total, third, name in map(cells, rows)
    ]


def _probe_cells(row: ProbeRow) -> tuple[int, int, int, str]:
    file = os.path.basename(row.probe.path)
    name = f"{escape(row.probe.provider)}:{escape(row.probe.name)}  {escape(file)}"
    return row.count, row.total, row.processes, name


def _process_cells(row: ProcessRow) -> tuple[int, int, int, str]:
    return row.count, row.total, row.pid, escape(row.comm)


def _rate(interval: Interval, count: int) -> str:
    rate = interval.rate(count)
    return f"{rate:,.0f}" if rate >= 100 or not count else f"{rate:.1f}"
