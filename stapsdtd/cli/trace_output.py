"""The output of `stapsdt trace`: events on standard output, for people or as JSON, and all else on standard error.

All events of a message are written and flushed at once, so that a single event appears immediately and many cost few
writes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol

from stapsdtd.catalog.selector_text import probe_name
from stapsdtd.cli.event_json import json_lines
from stapsdtd.cli.event_lines import EventLines
from stapsdtd.cli.moved_text import moved_lines, moved_record
from stapsdtd.cli.open_spans import OpenSpanTexts
from stapsdtd.cli.render import plural, print_grouped, print_stderr, terminal_width, wants_color, write_lines
from stapsdtd.client import ClockChange, Interruption, LossStage, Resubscribed, SiteState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.cli.command import Run
    from stapsdtd.cli.following import Summary
    from stapsdtd.cli.named_values import ArgumentNames
    from stapsdtd.cli.unmatched import Hints
    from stapsdtd.client import (
        EventBatch,
        Loss,
        MovedText,
        OpenSpans,
        SiteStatus,
        SpanAccount,
    )

_SECONDS_BETWEEN_LOSSES = 1.0
_UNDECIDED = "divides by 0, or needs what could not be read"


class Output(Protocol):
    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None: ...
    def events(self, batch: EventBatch, limit: int | None) -> int:
        """Print the batch's events, at most limit of them, and return how many."""

    def loss(self, loss: Loss) -> None: ...
    def changed(self, sites: Sequence[SiteStatus]) -> None: ...
    def open(self, spans: OpenSpans) -> None:
        """Print spans that have been open for as long as was asked for."""

    def moved(self, found: Sequence[MovedText]) -> None:
        """Say which processes have moved text with the probes."""

    def notice(self, notice: Notice) -> None: ...
    def resubscribed(self, sites: Sequence[SiteStatus]) -> None:
        """Go on after a restart of the server, with these sites."""

    def end(self, summary: Summary) -> None: ...


class JsonOutput:
    def __init__(self, names: ArgumentNames | None = None) -> None:
        self._names = names
        self._open_spans = OpenSpanTexts(names)
        self._losses = _Losses()

    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None:
        del sites
        print_unmatched(hints)

    def events(self, batch: EventBatch, limit: int | None) -> int:
        lines = json_lines(self._names.cut(batch) if self._names else batch, self._names)[:limit]
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        if losses := self._losses.add(loss):
            _print_record({"loss": losses})

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        pass

    def open(self, spans: OpenSpans) -> None:
        write_lines([json.dumps({"open": self._open_spans.record(spans)})])

    def notice(self, notice: Notice) -> None:
        print_notice(notice, as_json=True)

    def moved(self, found: Sequence[MovedText]) -> None:
        print_moved(found, as_json=True)

    def resubscribed(self, sites: Sequence[SiteStatus]) -> None:
        pass

    def end(self, summary: Summary) -> None:
        open_at_end = {"open": self._open_spans.record(summary.open)} if summary.open else {}
        _print_record(summary.as_record() | open_at_end)


class HumanOutput:
    def __init__(self, run: Run, names: ArgumentNames | None = None, *, is_wide: bool = False) -> None:
        """is_wide: lines may be wider than the terminal."""
        self._run = run
        self._is_wide = is_wide
        self._names = names
        self._open_spans = OpenSpanTexts(names)
        self._losses = _Losses()
        self._lines = EventLines(names, color=wants_color(sys.stdout))

    def begin(self, sites: Sequence[SiteStatus], hints: Hints) -> None:
        for line in hints.lines:
            print_stderr(line)
        if sites:
            self._show(sites, f"; {self._run.ends}")
        else:
            print_stderr(f"no probe matches yet: {self._run.waits}")

    def events(self, batch: EventBatch, limit: int | None) -> int:
        cut = self._names.cut(batch) if self._names else batch
        lines = self._lines.format(cut, None if self._is_wide else terminal_width(sys.stdout))[:limit]
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        if losses := self._losses.add(loss):
            advice = "; ".join(filter(None, (_advice(stage, self._losses.per_second(stage)) for stage in losses)))
            print_stderr(f"LOST {_format_stages(losses)}" + (f": {advice}" if advice else ""))

    def changed(self, sites: Sequence[SiteStatus]) -> None:
        self._show(sites)

    def open(self, spans: OpenSpans) -> None:
        write_lines(self._open_spans.events(spans))

    def notice(self, notice: Notice) -> None:
        print_notice(notice)

    def moved(self, found: Sequence[MovedText]) -> None:
        print_moved(found)

    def resubscribed(self, sites: Sequence[SiteStatus]) -> None:
        self._lines.add_sites(site for site in sites if site.state is not SiteState.REFUSED)
        print_limited(sites)

    def end(self, summary: Summary) -> None:
        if summary.open:
            self._open_spans.print_last(summary.open)
        print_summary(summary)

    def _show(self, sites: Sequence[SiteStatus], more: str = "") -> None:
        """Print how many sites are in which state, and why some are refused."""
        self._lines.add_sites(site for site in sites if site.state is not SiteState.REFUSED)
        counts = [
            f"{plural(count, 'site')} {state.value}"
            for state in SiteState
            if (count := sum(site.state is state for site in sites))
        ]
        print_stderr(", ".join(counts) + more)
        print_limited(sites)


def print_limited(sites: Sequence[SiteStatus]) -> None:
    """Print which sites are refused, or armed with a limit: in fewer processes than they were to be, or by one of two
    notes.
    """
    print_grouped("refused", [_reason_of(site) for site in sites if site.state is SiteState.REFUSED])
    limited = [_reason_of(site) for site in sites if site.state is SiteState.ARMED and site.reason]
    print_grouped("armed with a limit", limited)


def _reason_of(site: SiteStatus) -> tuple[str, str]:
    """Return the reason, and what it is about."""
    if not site.path.startswith("/"):
        return site.reason, f"{site.provider}:{site.path}:{site.function}:{site.name}"
    # a note that cannot be used has no place
    place = f"at {site.path}+{site.offset:#x}" if site.offset else f"in {site.path}"
    return site.reason, f"{probe_name(site.provider, site.name)} {place}"


_ADVICE = {
    LossStage.QUEUE.value: (
        "they come faster than this can print them; 'stapsdt top' counts them, and --json -o FILE writes more of them"
    ),
    LossStage.QUOTA.value: (
        "they exceed what your role may have, or your part of a processor while others want the server; "
        "'stapsdt info' shows your role, and 'stapsdt count' adds hits up where they happen"
    ),
    LossStage.FILTER.value: "they come faster than the server evaluates what is not tested at the hit, such as strings",
}


_READABLE_PER_SECOND = 500_000
"""About as many as a processor reads; what fires faster overflows a buffer of any size."""


def _advice(stage: str, lost_per_second: float) -> str:
    """Return what helps against losses; empty if nothing is known to."""
    if stage != LossStage.KERNEL_BUFFER.value:
        return _ADVICE.get(stage, "")
    if lost_per_second > _READABLE_PER_SECOND:
        return (
            "they come faster than any buffer helps: 'stapsdt count' adds hits up where they happen; or name fewer "
            "probes, or use --where"
        )
    return "a larger --buffer holds longer bursts"


class _Losses:
    """Accumulates losses, so that they are reported at most once a second. The summary has what remains."""

    def __init__(self) -> None:
        self._reported_at = float("-inf")
        self._unreported: dict[str, int] = {}
        self._since = time.monotonic()
        self._per_second: dict[str, float] = {}

    def per_second(self, stage: str) -> float:
        """Return how many were lost a second, as of the last report."""
        return self._per_second.get(stage, 0)

    def add(self, loss: Loss) -> dict[str, int] | None:
        """Return the events lost since the last report, by stage, or None if it is too early for another one."""
        self._unreported[loss.stage.value] = self._unreported.get(loss.stage.value, 0) + loss.count
        if time.monotonic() - self._reported_at < _SECONDS_BETWEEN_LOSSES:
            return None
        self._reported_at = now = time.monotonic()
        losses, self._unreported = self._unreported, {}
        seconds, self._since = max(now - self._since, _SECONDS_BETWEEN_LOSSES / 10), now
        self._per_second = {stage: count / seconds for stage, count in losses.items()}
        return losses


def print_summary(summary: Summary) -> None:
    for reason in [
        *moved_lines(summary.moved),
        *summary.silent,
        summary.uncertain,
        *([why_unpaired(summary.spans)] if summary.spans else []),
    ]:
        if reason:
            print_stderr(reason)
    print_stderr(format_summary(summary))


def format_summary(summary: Summary) -> str:
    what = "pair" if summary.spans else "event"
    if not summary.is_exact:
        lost = f", {summary.lost} lost" if summary.lost else ""
        why = "the server gave no account" + (" until a restart" if summary.restarts else "")
        return f"{plural(summary.delivered, what)} received{lost}; what else fired is unknown: {why}"
    told, filtered = f"{plural(summary.delivered, what)} {summary.outcome}", f"{summary.filtered} filtered"
    if summary.valueless:
        told += f" ({summary.valueless} without VALUE, which {_UNDECIDED})"
    if summary.undecided:
        filtered += f" ({summary.undecided} since --where {_UNDECIDED})"
    parts = [told, filtered]
    parts.append(f"{summary.lost} lost" + (f" ({_format_stages(summary.lost_by_stage)})" if summary.lost else ""))
    if summary.unread > 0:
        parts.append(f"{summary.unread} unread (fired after the last one shown)")
    unpaired = format_spans(summary.spans, is_latest=summary.is_latest) if summary.spans else ""
    ended = f"; {unpaired}" if unpaired else ""
    ended += "; every process of --pid has ended" if summary.processes_ended else ""
    if summary.restarts:
        seconds = sum(restart.seconds for restart in summary.restarts)
        ended += f"; the {plural(len(summary.restarts), 'restart')} of the server took {seconds:.1f} s, not counted"
    if summary.appeared:
        appeared = plural(summary.appeared, "object")
        ended += f"; {appeared} appeared later, armed at most {summary.armed_after_ms:.1f} ms after it was noticed"
    return f"{', '.join(parts)}, {plural(summary.sites, 'site')}{ended}"


def format_spans(spans: SpanAccount, *, is_latest: bool = False) -> str:
    """Return what became of hits that make no pair: `5 starts: 4 paired, 1 timed out; 2 ends without a start`."""
    fates = {
        "paired": spans.paired,
        "replaced by a later one" if is_latest else "within another": spans.nested,
        "of threads that ended": spans.died,
        "timed out": spans.timed_out,
        "without room": spans.table_full,
        "waiting for an end": spans.open,
    }
    parts = [f"{count} {fate}" for fate, count in fates.items() if count]
    starts = [f"{plural(spans.starts, 'start')}: {', '.join(parts)}"] if spans.starts > spans.paired else []
    ends = [f"{plural(spans.unmatched, 'end')} without a start"] if spans.unmatched else []
    return "; ".join(starts + ends)


def why_unpaired(spans: SpanAccount) -> str:
    """Return why there may be no pairs; empty if there are some."""
    if spans.paired:
        return ""
    if not spans.starts:
        return "END fired, but no START before it: a span that had begun earlier is not known"
    if not spans.unmatched:
        return "START fired, but no END yet"
    if spans.timed_out == spans.starts:
        return "every START timed out before an END with its key came: --timeout says how long they wait"
    return "no END had the key of a START: if another thread ends what one begins, name what they share with --key"


def _format_stages(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{plural(count, 'event')} in {stage}" for stage, count in lost.items() if count)


def print_unmatched(hints: Hints) -> None:
    """Print a JSON object on standard error for each kind of hint, such as the selectors that match nothing."""
    if hints.selectors:
        _print_record({"unmatched": [each.as_record() for each in hints.selectors]})
    if hints.unusable:
        _print_record({"not_armed_before": dict(hints.unusable)})
    if hints.evaluated_late:
        _print_record({"evaluated_late": dict(hints.evaluated_late)})
    if hints.added_late:
        _print_record({"added_late": dict(hints.added_late)})
    if hints.conditions:
        _print_record({"conditions": list(hints.conditions)})
    if hints.moved:
        print_moved(hints.moved, as_json=True)
    if hints.left_out:
        _print_record({"left_out": hints.left_out})
    if hints.shared_files:
        _print_record({"shared_files": list(hints.shared_files)})


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that users are told besides events, as text or in JSON."""

    text: str
    record: Mapping[str, object]


def notice_of(message: ClockChange | Interruption | Resubscribed) -> Notice:
    match message:
        case ClockChange():
            return Notice(_format_clock_set(message), {"clock_set": asdict(message)})
        case Interruption(error, seconds):
            text = f"stream interrupted, retrying for up to {seconds:g} s: {error}"
            return Notice(text, {"interrupted": str(error), "retrying_seconds": seconds})
        case _:
            return Notice(_format_restart(message), {"resubscribed": restart_record(message)})


def print_notice(notice: Notice, *, as_json: bool = False) -> None:
    """Print it on standard error."""
    if as_json:
        _print_record(notice.record)
    else:
        print_stderr(notice.text)


def print_moved(found: Sequence[MovedText], *, as_json: bool = False) -> None:
    """Print on standard error which processes have moved text with the probes."""
    if as_json:
        _print_record({"moved": list(map(moved_record, found))})
    else:
        for line in moved_lines(found):
            print_stderr(line)


def restart_record(restart: Resubscribed) -> dict[str, object]:
    account = "unknown" if restart.account is None else asdict(restart.account)
    return {"ended_ns": restart.ended_ns, "subscribed_ns": restart.subscribed_ns, "account": account}


def _format_restart(restart: Resubscribed) -> str:
    again = f"subscribed again after {restart.seconds:.1f} s, hits in between are not counted"
    if restart.account is None:
        return f"the server was killed and restarted; {again}, and of those before only what was received"
    return f"the server was restarted; {again}"


def _format_clock_set(change: ClockChange) -> str:
    """Return `the clock was set forward by 3,600 s`, or that the host was suspended, or both."""
    way = "back" if change.by_ns < 0 else "forward"
    changes = [f"the clock was set {way} by {_seconds(change.by_ns)}"] if change.by_ns else []
    if change.suspended_ns:
        changes.append(f"the host was suspended for {_seconds(change.suspended_ns)}")
    return "; ".join(changes)


def _seconds(time_ns: int) -> str:
    """Return as many digits as there are."""
    return f"{Decimal(abs(time_ns)).scaleb(-9).normalize():,f} s"


def _print_record(record: Mapping[str, object]) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)
