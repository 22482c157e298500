"""Which hits belong together, and what becomes of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from stapsdtd.aggregate.aggregation import HitField, Key, KeySource
from stapsdtd.model import BuiltIn, Capture, SiteCapture, StartArgument

MAX_DEPTH = 128
"""Of starts with the same key that wait, where they are nested."""

MOST_TOLD = 100
"""Open spans at a time, the oldest ones."""


@dataclass(frozen=True, slots=True)
class Span:
    """A start, and the next end that has the same key. That end becomes an event, which can tell of its start.

    key: what start and end have in common, by default the thread. start_captures: of a start's arguments, what its end
    can tell. timeout_ns: a start waits no longer for its end; 0 for no limit. is_nested: an end belongs to the last
    start that has none yet, to a depth of MAX_DEPTH; otherwise to the first, and starts until then are nested.
    max_open: how many keys may wait for their ends. takes_latest: a start replaces the one that waits, which counts as
    nested then. is_of_calls: starts and ends are entries and returns of the same kernel functions, and the key is the
    thread. Then a return belongs to its own entry, however calls are nested; where the daemon pairs, to the last one.
    is_added: pairs are added up, and what is kept of starts serves as keys.
    """

    key: tuple[KeySource, ...] = (HitField.TID,)
    start_captures: tuple[Capture, ...] = ()
    timeout_ns: int = 0
    is_nested: bool = False
    max_open: int = 10_000
    takes_latest: bool = False
    is_of_calls: bool = False
    is_added: bool = False

    @property
    def most_waiting(self) -> int:
        """Return how many starts with the same key may wait, where the daemon pairs."""
        return MAX_DEPTH if self.is_nested or self.is_of_calls else 1

    @property
    def is_of_thread(self) -> bool:
        """Report whether the end of a thread, or its execve, ends what it began."""
        return HitField.TID in self.key

    def at_hit(self, wanted: SiteCapture) -> SiteCapture:
        """Return what has to be captured of a hit of either kind: for the key, and what is wanted of the hit itself."""
        key = (each for each in self.key if isinstance(each, Capture))
        own = (each for each in wanted.captures if not is_of_pair(each))
        return replace(wanted, captures=tuple(dict.fromkeys([*key, *own])))


def is_of_pair(capture: Capture) -> bool:
    """Report whether a capture is of a start and its end, and not of either."""
    return isinstance(capture.subject, StartArgument) or capture.subject is BuiltIn.ELAPSED


def of_start(capture: Capture) -> Capture:
    """Return the capture of a pair that tells what a capture of its start was."""
    if not isinstance(capture.subject, int):
        raise TypeError(f"{capture} is of no argument")
    return replace(capture, subject=StartArgument(capture.subject))


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """What became of starts and of ends without one.

    starts = paired + nested + died + timed_out + table_full + open.

    nested: began while an earlier one with their key was waiting, or were replaced by a later one. died: their threads
    ended, or executed another program. table_full: there was no room. unmatched: ends that no start waited for.
    """

    starts: int = 0
    paired: int = 0
    nested: int = 0
    died: int = 0
    timed_out: int = 0
    table_full: int = 0
    unmatched: int = 0

    @property
    def _over(self) -> int:
        return self.paired + self.nested + self.died + self.timed_out + self.table_full

    @property
    def open(self) -> int:
        """Starts that wait for their ends."""
        return self.starts - self._over

    def settled(self) -> SpanCounts:
        """Return counts that agree, also where what became of starts was reported before all of them were."""
        return replace(self, starts=max(self.starts, self._over))

    @property
    def consumed(self) -> int:
        """Hits that became no events."""
        return self.starts + self.unmatched

    def __add__(self, other: SpanCounts) -> SpanCounts:
        return SpanCounts(
            self.starts + other.starts,
            self.paired + other.paired,
            self.nested + other.nested,
            self.died + other.died,
            self.timed_out + other.timed_out,
            self.table_full + other.table_full,
            self.unmatched + other.unmatched,
        )


class Thread(NamedTuple):
    pid: int
    tid: int


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A start that waits for its end.

    begin_ns: CLOCK_MONOTONIC. key: empty if that is the thread. values: of the span's start_captures, None for what is
    unavailable.
    """

    begin_ns: int
    thread: Thread
    key: Key
    values: Key


@dataclass(frozen=True, slots=True)
class OpenSpans:
    """oldest: some of them, by age. count: of all whose pairs would be wanted as far as their starts tell."""

    oldest: tuple[OpenSpan, ...] = ()
    count: int = 0


NO_OPEN_SPANS = OpenSpans()
