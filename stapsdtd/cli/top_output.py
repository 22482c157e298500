"""How `stapsdt top` looks: a table that stays in place on a terminal, one below the other in a pipe, or JSON.

stapsdt top  14:03:07  12,345 events/s  1,234,567 in all  531 sites
lost: nothing

RATE/S           TOTAL  PROCESSES  PROBE (2)
12,000       1,200,000          3  postgresql:query__start  postgres
345          34,567          1  python:gc__start  python3.11

RATE/S           TOTAL        PID  COMMAND (1)
12,345       1,234,567       4711  postgres
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
from stapsdtd.cli.render import complain, is_colourful, paint, plural
from stapsdtd.cli.top_figures import Interval, ProbeRow, ProcessRow
from stapsdtd.cli.trace_output import tell_summary
from stapsdtd.runtime.text import escape

_Row = TypeVar("_Row")

_ROWS_IN_A_PIPE = 100
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


class Output(Protocol):
    def begin(self) -> None: ...
    def show(self, interval: Interval) -> None: ...
    def interrupted(self, message: str) -> None: ...
    def close(self) -> None:
        """Leave the terminal as it was."""

    def end(self, summary: Summary) -> None: ...


class JsonOutput:
    def begin(self) -> None:
        pass

    def show(self, interval: Interval) -> None:
        print(json.dumps(record(interval)), flush=True)

    def interrupted(self, message: str) -> None:
        print(json.dumps({"interrupted": message}), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        print(json.dumps(summary.as_record()), file=sys.stderr, flush=True)


class PipeOutput:
    """Whole tables, each after an empty line."""

    def __init__(self) -> None:
        self._is_first = True

    def begin(self) -> None:
        pass

    def show(self, interval: Interval) -> None:
        lines = frame(interval, rows=2 * _ROWS_IN_A_PIPE, colourful=False)
        print("\n".join(lines if self._is_first else ["", *lines]), flush=True)
        self._is_first = False

    def interrupted(self, message: str) -> None:
        complain(message)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        complain(tell_summary(summary))


class TerminalOutput:
    """One table, which the next one is written over. The last one stays."""

    def __init__(self) -> None:
        self._colourful = is_colourful(sys.stdout)
        self._news = ""

    def begin(self) -> None:
        # what is too wide, as the characters of some scripts are, is to be cut off
        _write(_NO_WRAP + _HIDE_CURSOR + _CLEAR + _HOME)

    def show(self, interval: Interval) -> None:
        width, height = shutil.get_terminal_size()
        lines = frame(
            interval, news=self._news, rows=max(height - _LINES_BESIDES, 2), width=width, colourful=self._colourful
        )
        self._news = ""
        # the last line of the screen is the cursor's
        shown = lines[: height - 1]
        _write(_HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in shown) + _REST_OF_SCREEN)

    def interrupted(self, message: str) -> None:
        self._news = message

    def close(self) -> None:
        _write(_WRAP + _SHOW_CURSOR)

    def end(self, summary: Summary) -> None:
        complain(tell_summary(summary))


def output_for(*, as_json: bool) -> Output:
    if as_json:
        return JsonOutput()
    return TerminalOutput() if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" else PipeOutput()


def record(interval: Interval) -> dict[str, object]:
    """What fired in the interval, and what of it is known since the beginning."""
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


_LINES_BESIDES = 7
"""Of a frame, besides rows, and the cursor's."""


def frame(interval: Interval, *, rows: int, colourful: bool, width: int | None = None, news: str = "") -> list[str]:
    """Lines of at most that width. rows: of both tables together."""
    for_probes, for_processes = _shared_out(len(interval.probes), len(interval.processes), rows)
    clock = time.strftime("%H:%M:%S", time.localtime(interval.time_ns // 1_000_000_000))
    sites = plural(interval.sites, "site") + (f", {interval.refused} refused" if interval.refused else "")
    rate = f"{_rate(interval, interval.count)} events/s"
    state, style = _state(interval, news)

    def cut(line: str) -> str:
        return line[:width].rstrip()

    return [
        cut(f"stapsdt top  {clock}  {rate}  {interval.total:,} in all  {sites}"),
        paint(cut(state), style, colourful=colourful) if style else cut(state),
        "",
        paint(cut(_title("PROCESSES", "PROBE", for_probes, len(interval.probes))), "dim", colourful=colourful),
        *(cut(line) for line in _lines(interval, interval.probes[:for_probes], _probe_cells)),
        "",
        paint(cut(_title("PID", "COMMAND", for_processes, len(interval.processes))), "dim", colourful=colourful),
        *(cut(line) for line in _lines(interval, interval.processes[:for_processes], _process_cells)),
    ]


def _shared_out(probes: int, processes: int, rows: int) -> tuple[int, int]:
    """Each table gets half of the rows, and what the other one has no use for."""
    half = rows // 2
    for_processes = min(processes, max(half, rows - probes))
    return min(probes, rows - for_processes), for_processes


def _state(interval: Interval, news: str) -> tuple[str, str]:
    """A line, and its colour if it should have one."""
    if news:
        return escape(news), "yellow"
    if not interval.sites and not interval.total:
        return "no probe matches yet: waiting for one to appear; 'stapsdt list' shows what there is", "yellow"
    if not any(interval.lost.values()):
        return "lost: nothing", ""
    return f"LOST: {_told(interval.lost, interval.lost_before)}", "red"


def _told(lost: Mapping[str, int], before: Mapping[str, int]) -> str:
    news = sum(lost.values()) - sum(before.values())
    return ", ".join(f"{count:,} in {stage}" for stage, count in lost.items() if count) + f" ({news:,} of them now)"


def _title(column: str, name: str, shown: int, count: int) -> str:
    among = f"{count}" if shown == count else f"{shown} of {count}"
    return f"{'RATE/S':>11}  {'TOTAL':>15}  {column:>9}  {name} ({among})"


def _lines(interval: Interval, rows: Sequence[_Row], cells: Callable[[_Row], tuple[int, int, int, str]]) -> list[str]:
    found = map(cells, rows)
    return [f"{_rate(interval, count):>11}  {total:>15,}  {number:>9}  {name}" for count, total, number, name in found]


def _probe_cells(row: ProbeRow) -> tuple[int, int, int, str]:
    file = os.path.basename(row.probe.path)
    name = f"{escape(row.probe.provider)}:{escape(row.probe.name)}  {escape(file)}"
    return row.count, row.total, row.processes, name


def _process_cells(row: ProcessRow) -> tuple[int, int, int, str]:
    return row.count, row.total, row.pid, escape(row.comm)


def _rate(interval: Interval, count: int) -> str:
    rate = interval.rate(count)
    return f"{rate:,.0f}" if rate >= 100 or not count else f"{rate:.1f}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
