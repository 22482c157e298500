"""The output of `stapsdt trace`, for people and as JSON: events on standard output, everything else on standard error.

    14:03:07.123456  postgres          1234/1240   2  postgresql:query__start  "SELECT 1" 42

    {"seq": 1, "time_ns": 1700000000123456789, "pid": 1234, "tid": 1240, "cpu": 2, "comm": "postgres",
     "provider": "postgresql", "name": "query__start", "path": "/usr/lib/postgresql/15/bin/postgres",
     "module": "postgres", "function": "exec_simple_query", "offset": 3456789, "args": ["SELECT 1", 42]}

All events of a message are written and flushed at once, so that a single event appears immediately and many cost one
write.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Protocol

from stapsdtd.cli.event_json import json_lines
from stapsdtd.cli.render import Clock, abbreviate, format_value, paint, plural, print_stderr, wants_color, write_lines
from stapsdtd.client import SiteState
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.cli.following import Summary
    from stapsdtd.cli.unmatched import Hints
    from stapsdtd.client import (
        ClientError,
        Event,
        EventBatch,
        Loss,
        SiteStatus,
    )

_MAX_SHOWN_REFUSALS = 3
_SECONDS_BETWEEN_LOSSES = 1.0


class Output(Protocol):
    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None: ...
    def events(self, batch: EventBatch, limit: int | None) -> int:
        """Print the batch's events, at most limit of them, and return how many."""

    def loss(self, loss: Loss) -> None: ...
    def changed(self, sites: Sequence[SiteStatus]) -> None: ...
    def interrupted(self, error: ClientError, lease_seconds: int) -> None: ...
    def end(self, summary: Summary) -> None: ...


class JsonOutput:
    def __init__(self) -> None:
        self._losses = _Losses()

    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None:
        del sites
        print_unmatched(hints)

    def events(self, batch: EventBatch, limit: int | None) -> int:
        lines = json_lines(batch)[:limit]
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        if losses := self._losses.add(loss):
            _print_record({"loss": losses})

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        pass

    def interrupted(self, error: ClientError, lease_seconds: int) -> None:
        _print_record({"interrupted": str(error), "retrying_seconds": lease_seconds})

    def end(self, summary: Summary) -> None:
        _print_record(summary.as_record())


class HumanOutput:
    def __init__(self) -> None:
        self._losses = _Losses()
        self._clock = Clock()
        self._color = wants_color(sys.stdout)
        self._probe_width = 0

    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None:
        for line in hints.lines:
            print_stderr(line)
        if sites:
            print_stderr(f"{_format_statuses(sites)}; Ctrl-C stops")
        else:
            print_stderr(
                "no probe matches yet: waiting for one to appear; 'stapsdt list' shows existing probes, Ctrl-C stops"
            )

    def events(self, batch: EventBatch, limit: int | None) -> int:
        lines = [self._line(event) for event in batch.events[:limit]]
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        if losses := self._losses.add(loss):
            print_stderr(f"LOST {_format_stages(losses)}: try --buffer or --queue, or fewer probes")

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        print_stderr(_format_statuses(sites))

    def interrupted(self, error: ClientError, lease_seconds: int) -> None:
        print_stderr(f"stream interrupted, retrying for up to {lease_seconds} s: {error}")

    def end(self, summary: Summary) -> None:
        print_stderr(format_summary(summary))

    def _line(self, event: Event) -> str:
        probe = f"{escape(event.probe.provider)}:{escape(event.probe.name)}"
        self._probe_width = max(self._probe_width, len(probe))
        thread = str(event.pid) if event.tid == event.pid else f"{event.pid}/{event.tid}"
        values = " ".join(
            [format_value(value, event.unavailable.get(index, "")) for index, value in enumerate(event.values)]
        )
        clock_time = paint(self._clock.format(event.time_ns), "dim", color=self._color)
        name = paint(f"{probe:<{self._probe_width}}", "cyan", color=self._color)
        return f"{clock_time}  {escape(event.comm):<15}  {thread:>13}  {event.cpu:>3}  {name}  {values}".rstrip()


class _Losses:
    """Accumulates losses, so that they are reported at most once a second. The summary has what remains."""

    def __init__(self) -> None:
        self._reported_at = float("-inf")
        self._unreported: dict[str, int] = {}

    def add(self, loss: Loss) -> dict[str, int] | None:
        """Return the events lost since the last report, by stage, or None if it is too early for another one."""
        self._unreported[loss.stage.value] = self._unreported.get(loss.stage.value, 0) + loss.count
        if time.monotonic() - self._reported_at < _SECONDS_BETWEEN_LOSSES:
            return None
        self._reported_at = time.monotonic()
        losses, self._unreported = self._unreported, {}
        return losses


def _format_statuses(sites: Sequence[SiteStatus]) -> str:
    """Return how many sites are in which state, and why some are refused, in one line."""
    counts = [
        f"{plural(count, 'site')} {state.value}"
        for state in SiteState
        if (count := sum(site.state is state for site in sites))
    ]
    refused = [site for site in sites if site.state is SiteState.REFUSED]
    reasons = [f"{site.provider}:{site.name} at {site.path}+{site.offset:#x}: {site.reason}" for site in refused]
    line = ", ".join(counts)
    return f"{line} ({abbreviate(reasons, _MAX_SHOWN_REFUSALS)})" if reasons else line


def format_summary(summary: Summary) -> str:
    parts = [f"{plural(summary.delivered, 'event')} delivered", f"{summary.filtered} filtered"]
    parts.append(f"{summary.lost} lost" + (f" ({_format_stages(summary.lost_by_stage)})" if summary.lost else ""))
    if summary.unread > 0:
        parts.append(f"{summary.unread} unread")
    ended = "; every process of --pid has ended" if summary.processes_ended else ""
    return f"{', '.join(parts)}, {plural(summary.sites, 'site')}{ended}"


def _format_stages(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{plural(count, 'event')} in {stage}" for stage, count in lost.items() if count)


def print_unmatched(hints: Hints) -> None:
    """Print a JSON object on standard error with the selectors that match nothing, if there are any."""
    if hints.selectors:
        _print_record({"unmatched": [each.as_record() for each in hints.selectors]})


def _print_record(record: Mapping[str, object]) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)
