"""Where snapshots are shown: on a terminal, redrawn in place; in a pipe, one after the other; or as JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stapsdtd.cli.moved_text import moved_lines
from stapsdtd.cli.render import plural, print_stderr, write_lines
from stapsdtd.cli.screen import Screen
from stapsdtd.cli.trace_output import (
    Notice,
    print_limited,
    print_moved,
    print_notice,
    print_summary,
    print_unmatched,
)
from stapsdtd.client import CutText, SiteState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.cli.aggregate_tables import Table
    from stapsdtd.cli.following import Summary
    from stapsdtd.cli.open_spans import OpenSpanTexts
    from stapsdtd.cli.unmatched import Hints
    from stapsdtd.client import MovedText, SiteStatus, Snapshot, SnapshotRow, Value


@dataclass(frozen=True, slots=True)
class Shown:
    """What to show of an aggregation.

    by: the keys. interval: in seconds; None for all hits so far. count: of intervals. limit: of keys. duration: in
    seconds. None stands for no end. dialect: of keys that are SQL, whose literals do not matter; otherwise empty.
    order: the function that is greatest of the first key.
    """

    by: tuple[str, ...]
    interval: float | None
    count: int | None
    limit: int | None
    duration: float | None
    as_json: bool
    command_line: tuple[str, ...]
    dialect: str = ""
    order: str = "count"

    def first(self, snapshot: Snapshot) -> list[SnapshotRow]:
        """Return the rows to show, in their order."""
        return snapshot.greatest(self.order, self.limit)


class Output(Protocol):
    @property
    def is_live(self) -> bool:
        """Whether to show snapshots before the end, though the user did not ask for intervals."""

    def begin(self, hints: Hints, sites: Sequence[SiteStatus]) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def notice(self, notice: Notice) -> None: ...
    def moved(self, found: Sequence[MovedText]) -> None:
        """Say which processes have moved text with the probes."""

    def close(self) -> None:
        """Restore the terminal, and leave the last snapshot there."""

    def end(self, summary: Summary) -> None: ...


def output_for(table: Table, shown: Shown, open_spans: OpenSpanTexts) -> Output:
    """open_spans: how those are shown that a snapshot has."""
    if shown.as_json:
        return _JsonOutput(shown, open_spans)
    can_redraw = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    # a command has the terminal for itself, and intervals are to be compared
    is_redrawn = can_redraw and not shown.command_line and shown.interval is None
    return _TerminalOutput(table, open_spans) if is_redrawn else _PipeOutput(table, shown, open_spans)


class _JsonOutput:
    """A line for each key, and with intervals the time at which one ended; another one if spans are open."""

    is_live = False

    def __init__(self, shown: Shown, open_spans: OpenSpanTexts) -> None:
        self._shown = shown
        self._open_spans = open_spans

    def begin(self, hints: Hints, sites: Sequence[SiteStatus]) -> None:
        del sites
        print_unmatched(hints)

    def show(self, snapshot: Snapshot) -> None:
        when = {"time_ns": snapshot.end_ns} if self._shown.interval else {}
        lines = []
        for row in self._shown.first(snapshot):
            values = {name: _in_json(value) for name, value in row.values.items()}
            cut = [name for name, part in zip(self._shown.by, row.key, strict=True) if isinstance(part, CutText)]
            truncated = {"truncated": cut} if cut else {}
            record: dict[str, object] = {**when, "key": list(map(_in_json, row.key)), **truncated, **values}
            if row.buckets:
                record["buckets"] = [[bucket.low, bucket.high, bucket.count] for bucket in row.buckets]
            lines.append(json.dumps(record))
        if snapshot.open:
            lines.append(json.dumps({**when, "open": self._open_spans.record(snapshot.open)}))
        write_lines(lines)

    def notice(self, notice: Notice) -> None:
        print_notice(notice, as_json=True)

    def moved(self, found: Sequence[MovedText]) -> None:
        print_moved(found, as_json=True)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        print(json.dumps(summary.as_record()), file=sys.stderr, flush=True)


def _in_json(value: Value) -> object:
    """Return what JSON can write: bytes in hexadecimal, as in events, and infinity as text."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _PipeOutput:
    """Complete tables, separated by empty lines; with intervals, each below the time at which it ended."""

    is_live = False

    def __init__(self, table: Table, shown: Shown, open_spans: OpenSpanTexts) -> None:
        self._table = table
        self._shown = shown
        self._open_spans = open_spans
        self._is_first = True

    def begin(self, hints: Hints, sites: Sequence[SiteStatus]) -> None:
        for line in hints.lines:
            print_stderr(line)
        print_limited(sites)

    def show(self, snapshot: Snapshot) -> None:
        head = [_clock(snapshot)] if self._shown.interval else []
        waiting = self._open_spans.lines(snapshot.open) if snapshot.open else []
        write_lines([*([] if self._is_first else [""]), *head, *self._table.lines(snapshot), *waiting])
        self._is_first = False

    def notice(self, notice: Notice) -> None:
        print_notice(notice)

    def moved(self, found: Sequence[MovedText]) -> None:
        print_moved(found)

    def close(self) -> None:
        pass

    def end(self, summary: Summary) -> None:
        print_summary(summary)


class _TerminalOutput:
    """Draws what has room on the screen, and at the end prints the last snapshot as a whole."""

    is_live = True

    def __init__(self, table: Table, open_spans: OpenSpanTexts) -> None:
        self._table = table
        self._open_spans = open_spans
        self._screen = Screen()
        self._notices: list[str] = []
        self._last: Snapshot | None = None

    def begin(self, hints: Hints, sites: Sequence[SiteStatus]) -> None:
        print_limited(sites)
        armed = sum(site.state is SiteState.ARMED for site in sites)
        self._notices = hints.lines[:1] or [f"{plural(armed, 'site')} armed, Ctrl-C ends"]
        self._screen.open()

    def show(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        width, height = shutil.get_terminal_size()
        hits = snapshot.account.aggregated
        head = [f"{_clock(snapshot)}  {plural(hits, 'hit')} in all", *self._notices, *self._open(snapshot), ""]
        self._screen.draw([line[:width] for line in (*head, *self._table.lines(snapshot))][: height - 1])

    def _open(self, snapshot: Snapshot) -> list[str]:
        return self._open_spans.lines(snapshot.open) if snapshot.open else []

    def notice(self, notice: Notice) -> None:
        self._notices.append(notice.text)

    def moved(self, found: Sequence[MovedText]) -> None:
        self._notices += moved_lines(found)

    def close(self) -> None:
        self._screen.close()
        if self._last is not None:
            self._screen.clear()
            write_lines([*self._table.lines(self._last), *self._open(self._last)])

    def end(self, summary: Summary) -> None:
        print_summary(summary)


def _clock(snapshot: Snapshot) -> str:
    return time.strftime("%H:%M:%S", time.localtime(snapshot.end_ns // 1_000_000_000))
