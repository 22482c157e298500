"""How a trace looks, to people and as JSON: events on standard output, all else on standard error.

    14:03:07.123456  postgres          1234/1240   2  postgresql:query__start  "SELECT 1" 42

    {"seq": 1, "time_ns": 1700000000123456789, "pid": 1234, "tid": 1240, "cpu": 2, "comm": "postgres",
     "provider": "postgresql", "name": "query__start", "path": "/usr/lib/postgresql/15/bin/postgres",
     "args": ["SELECT 1", 42]}

What came in one message is written and flushed at once: a single event is seen without delay, and many cost one write.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Protocol

from stapsdtd.cli.render import Clock, complain, is_colourful, paint, plural, show_some, show_value, write_lines
from stapsdtd.client import SiteState
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stapsdtd.cli.following import Summary
    from stapsdtd.client import ClientError, Event, Loss, Probe, SiteStatus

_SHOWN_REFUSALS = 3
_SECONDS_BETWEEN_LOSSES = 1.0


class Output(Protocol):
    def begin(self, sites: Sequence[SiteStatus]) -> None: ...
    def events(self, events: Sequence[Event]) -> None: ...
    def loss(self, loss: Loss) -> None: ...
    def changed(self, sites: Sequence[SiteStatus]) -> None: ...
    def interrupted(self, error: ClientError, lease_seconds: int) -> None: ...
    def end(self, summary: Summary) -> None: ...


class JsonOutput:
    def __init__(self) -> None:
        self._losses = _Losses()

    def begin(self, sites: Sequence[SiteStatus]) -> None:
        pass

    def events(self, events: Sequence[Event]) -> None:
        write_lines(json_lines(events))

    def loss(self, loss: Loss) -> None:
        if news := self._losses.add(loss):
            _note({"loss": news})

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        pass

    def interrupted(self, error: ClientError, lease_seconds: int) -> None:
        _note({"interrupted": str(error), "retrying_seconds": lease_seconds})

    def end(self, summary: Summary) -> None:
        _note(summary.as_record())


def json_lines(events: Iterable[Event]) -> list[str]:
    """Put together by hand, which takes a sixth of the time of json.dumps."""
    string = encode_basestring_ascii
    lines = []
    probes: dict[int, str] = {}
    for seq, time_ns, pid, tid, cpu, comm, probe, _, values, unavailable in events:
        # by identity, since to hash a probe costs as much as the rest of the line
        shown = probes.get(id(probe)) or probes.setdefault(id(probe), _json_probe(probe))
        args = ", ".join([str(value) if isinstance(value, int) else _json_value(value) for value in values])
        line = (
            f'{{"seq": {seq}, "time_ns": {time_ns}, "pid": {pid}, "tid": {tid}, "cpu": {cpu},'
            f' "comm": {string(comm)}, {shown}, "args": [{args}]'
        )
        if unavailable:
            line += f', "unavailable": {json.dumps(dict(unavailable))}'
        lines.append(line + "}")
    return lines


def _json_value(value: float | str | bytes | None) -> str:
    """Bytes are shown in hexadecimal; `"nan"` and `"inf"` are strings, since JSON has no such numbers."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'"{value}"'
    return encode_basestring_ascii(value.hex() if isinstance(value, bytes) else value)


@lru_cache(maxsize=4096)
def _json_probe(probe: Probe) -> str:
    return json.dumps({"provider": probe.provider, "name": probe.name, "path": probe.path})[1:-1]


class HumanOutput:
    def __init__(self) -> None:
        self._losses = _Losses()
        self._clock = Clock()
        self._colourful = is_colourful(sys.stdout)
        self._probe_width = 0

    def begin(self, sites: Sequence[SiteStatus]) -> None:
        if not sites:
            complain("no probe matches yet: waiting for one to appear; Ctrl-C ends, 'stapsdt list' shows what there is")
            return
        complain(f"{_tell(sites)}; Ctrl-C ends")

    def events(self, events: Sequence[Event]) -> None:
        write_lines([self._line(event) for event in events])

    def loss(self, loss: Loss) -> None:
        if news := self._losses.add(loss):
            complain(f"LOST {_stages(news)}: try --buffer or --queue, or fewer probes")

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        complain(_tell(sites))

    def interrupted(self, error: ClientError, lease_seconds: int) -> None:
        complain(f"the stream broke, trying for {lease_seconds} s to go on without a gap: {error}")

    def end(self, summary: Summary) -> None:
        complain(tell_summary(summary))

    def _line(self, event: Event) -> str:
        probe = f"{escape(event.probe.provider)}:{escape(event.probe.name)}"
        self._probe_width = max(self._probe_width, len(probe))
        thread = str(event.pid) if event.tid == event.pid else f"{event.pid}/{event.tid}"
        values = " ".join(
            [show_value(value, event.unavailable.get(index, "")) for index, value in enumerate(event.values)]
        )
        when = paint(self._clock.show(event.time_ns), "dim", colourful=self._colourful)
        name = paint(f"{probe:<{self._probe_width}}", "cyan", colourful=self._colourful)
        return f"{when}  {escape(event.comm):<15}  {thread:>13}  {event.cpu:>3}  {name}  {values}".rstrip()


class _Losses:
    """Adds up losses, so that a flood of them is told once a second; the rest is in the summary."""

    def __init__(self) -> None:
        self._told = float("-inf")
        self._untold: dict[str, int] = {}

    def add(self, loss: Loss) -> dict[str, int] | None:
        """Events lost by stage since they were last told, or None while that is too recent."""
        self._untold[loss.stage.value] = self._untold.get(loss.stage.value, 0) + loss.count
        if time.monotonic() - self._told < _SECONDS_BETWEEN_LOSSES:
            return None
        self._told = time.monotonic()
        news, self._untold = self._untold, {}
        return news


def _tell(sites: Sequence[SiteStatus]) -> str:
    """Sites in a line: how many are in which state, and why some are refused."""
    counts = [
        f"{plural(count, 'site')} {state.value}"
        for state in SiteState
        if (count := sum(site.state is state for site in sites))
    ]
    refused = [site for site in sites if site.state is SiteState.REFUSED]
    reasons = [f"{site.provider}:{site.name} at {site.path}+{site.offset:#x}: {site.reason}" for site in refused]
    told = ", ".join(counts)
    return f"{told} ({show_some(reasons, _SHOWN_REFUSALS)})" if reasons else told


def tell_summary(summary: Summary) -> str:
    told = [f"{plural(summary.delivered, 'event')} delivered", f"{summary.filtered} filtered"]
    told.append(f"{summary.lost} lost" + (f" ({_stages(summary.lost_by_stage)})" if summary.lost else ""))
    if summary.unread > 0:
        told.append(f"{summary.unread} unread")
    return f"{', '.join(told)}, {plural(summary.sites, 'site')}"


def _stages(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{plural(count, 'event')} in {stage}" for stage, count in lost.items() if count)


def _note(record: Mapping[str, object]) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)
