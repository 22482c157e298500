"""The interface of a capture engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stapsdtd.aggregate.aggregation import Aggregation, Key, Row
from stapsdtd.events.batch import EventBatch
from stapsdtd.functions.chain import Link
from stapsdtd.model import Argument, BuiltIn, Capture, Object, ObjectKey, Site
from stapsdtd.query.actions import Action
from stapsdtd.query.expression import Condition
from stapsdtd.runtime.latency import Latency
from stapsdtd.spans.span import OpenSpans, Span, SpanCounts

SubscriptionKey = int
"""Identifies a subscription to the engine; never reused by one daemon."""


class LossStage(Enum):
    """Where events that fired were lost: the first two in an engine, the others in a subscription.

    TABLE_FULL: an aggregation has no room for more keys. MISSED: the kernel itself could not hit a kernel function.
    """

    KERNEL_BUFFER = "kernel buffer"
    DECODE = "decode"
    QUEUE = "queue"
    QUOTA = "quota"
    TABLE_FULL = "table full"
    MISSED = "missed"
    FILTER = "filter"


class Followed(Protocol):
    """Processes that are followed: their children join them, from the fork on. Any thread may use it."""

    def remaining(self) -> frozenset[int]:
        """Return the processes that have not ended."""

    def adopt(self, pid: int) -> None:
        """Follow a process that one of these forked before. Raises OSError if there is no room for it."""

    def ended(self, pid: int) -> None:
        """Note that a process that `Engine.follow` was given has ended."""


Scope = frozenset[int | Followed] | None
"""The processes whose hits are wanted, by pid or followed; None for all."""


class Sink(Protocol):
    """Receives one subscription's events, on the engine's reader thread; it must not block."""

    def deliver(self, batch: EventBatch) -> None:
        """Take events, in the order of time, that are not earlier than those of the calls before."""

    def fired(self, count: int) -> None:
        """Count more hits, by the count of the kernel. Each is also delivered, filtered or lost, before or after."""

    def filtered(self, count: int, undecided: int = 0) -> None:
        """Count more hits that were outside the scope or did not satisfy the predicate. undecided: how many of them,
        since it needs what cannot be read, or divides by 0.
        """

    def lost(self, stage: LossStage, count: int) -> None:
        """Count more hits whose events will not be delivered."""

    def spanned(self, counts: SpanCounts) -> None:
        """Count what became of more starts, and of more ends without one. fired() counts both, too."""


Rows = Mapping[int, Mapping[Key, Row]]
"""By site_id, which is 0 unless properties of the probe are keys; None stands for them in each Key."""


class ManyRows(Protocol):
    """As many rows as a client likes, which take long to decode.

    hits: in all of them.
    """

    @property
    def hits(self) -> int: ...

    def parts(self) -> Iterator[tuple[int, Rows]]:
        """Decode some rows at a time, in any one thread. With each part comes how many hits it has.

        Until this has ended, or drop() is called, further rows are left in the kernel.
        """

    def drop(self) -> None:
        """Give them up."""


class RowSink(Protocol):
    """Receives what the hits of one subscription add up to, on the engine's reader thread; it must not block.

    The rows are of hits that were not taken before. The sink's fired() counts these, too.
    """

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        """Take a few rows, of one site_id; see `Rows`."""

    def aggregated_many(self, rows: ManyRows) -> None:
        """Take rows, and decode them now or later."""


@dataclass(frozen=True, slots=True)
class TargetSite:
    """A site to arm, and what to do at its hits.

    site_id: names the site in delivered events. scope: None for every process. predicate: what an engine can test, to
    choose hits, None for all; the others count as filtered. link: what a hit has to be to the subscription's chain of
    kernel functions, if it has one. A call goes on that only if the predicate holds at its entry.
    """

    site: Site
    site_id: int
    action: Action
    scope: Scope = None
    predicate: Condition | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Sites of one object to arm.

    file_path: opens the object's file in this process, during the call.
    owners: uids whose processes count, None for everybody's; hits of others are not counted at all.
    exclude_pids: processes that map the object and must leave no events; their hits are not counted at all.
    exclude_later: others that must leave no events if they map it later; their hits may count as filtered.
    is_ephemeral: the object's file goes with its last process, like a memfd, and must not be held longer.
    owner: of an ephemeral object; bounds what one user's objects may use of what all share.
    """

    object: Object
    file_path: str
    sites: tuple[TargetSite, ...]
    exclude_pids: frozenset[int] = frozenset()
    is_ephemeral: bool = False
    exclude_later: frozenset[int] = frozenset()
    owners: frozenset[int] | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A site that could not be armed, and why, in the kernel's own words if it has any."""

    site: Site
    reason: str


@dataclass(frozen=True, slots=True)
class RingMetrics:
    """A buffer between kernel and daemon. name: one of a few, whatever clients do."""

    name: str
    filled_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnreadMetrics:
    """Counts of values that were not in memory at the hit, and of their pages, since the daemon started.

    from_file: constants read from their files. unavailable: values delivered as such. pages_touched: brought in for
    later hits. pages_refused: not brought in, since too many of their owner's were waiting, or the owner could make
    the read hang. stuck: owners whose page has not come for more than a second.
    """

    from_file: int = 0
    unavailable: int = 0
    pages_touched: int = 0
    pages_refused: int = 0
    stuck: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """attachments: armed sites; one that subscriptions share counts once. groups: tracefs events.

    strays: hits and records that belong to no subscription; 0 unless the engine or the kernel has a defect.
    table_bytes: of the kernel's memory, about, for rows that hits add up to and for starts that wait for their ends.
    slices: of the thread that reads events, see `runtime.slices`.
    """

    attachments: int
    groups: int
    rings: tuple[RingMetrics, ...]
    slices: Latency
    strays: int = 0
    unread: UnreadMetrics = UnreadMetrics()
    table_bytes: int = 0


class Engine(Protocol):
    """Called from one thread, except for `ask`, `collect`, `open_spans`, `problem` and `metrics`, which any thread may
    call.
    """

    @property
    def name(self) -> str: ...

    def why_not(self, capture: Capture, subject: Argument | BuiltIn, architecture: str) -> str | None:
        """Return why something cannot be captured as wanted, or None if it can. architecture: the object's."""

    def why_not_aggregated(self, aggregation: Aggregation, site: Site, architecture: str) -> str | None:
        """Return why hits of a site are to be emitted rather than aggregated in the kernel, or None if they can be.

        Where they cannot, arm() refuses Aggregate.
        """

    def why_not_paired(self, span: Span) -> str | None:
        """Return why the daemon has to pair starts and ends, or None if the engine does.

        Where it cannot, arm() refuses BeginSpan and EndSpan.
        """

    def open(
        self,
        subscription_key: SubscriptionKey,
        sink: Sink,
        kernel_buffer_kib: int,
        owner: str = "",
        rows: RowSink | None = None,
        *,
        client: str = "",
    ) -> None:
        """Open a subscription with nothing armed. owner: names the client that it belongs to. rows: takes what hits add
        up to, where sites are armed with Aggregate. client: who pays for reading its events.
        """

    def follow(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> Followed:
        """Follow processes, and what they fork from now on, until the subscription is closed. Scopes may name them.

        Raises LimitReachedError and OSError.
        """

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        """Arm sites. From its return on, every hit of a site not refused is delivered, filtered or counted as lost."""

    def arm_in_steps(self, subscription_key: SubscriptionKey, target: Target) -> Generator[None, None, list[Refusal]]:
        """As `arm`, but take some milliseconds at a time, between which other methods may be called.

        Closing it arms nothing more, and is all that may be done once this object is disarmed or the subscription
        closed. If it raises an error, some sites may be armed.
        """

    def renew(self, pid: int) -> None:
        """Keep armed what is armed in a process, whose main thread ended or is another one now. Raises OSError."""

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:
        """Disarm all of an object's sites for a subscription. is_awaited: quiesced() waits until that is done."""

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        """Disarm everything, and end the subscription. The future is done, in any thread, when the sink has its last
        events and losses; it is not called after that.
        """

    def close_in_steps(self, subscription_key: SubscriptionKey) -> Generator[None, None, Future[None]]:
        """As `close`, but take some milliseconds at a time, between which others may be armed and closed."""

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:
        """Return a future that is done, in any thread, when the sinks have all hits so far. It may have an error.

        Its result is until when they have all, and hardly any later ones: ns of CLOCK_MONOTONIC.
        """

    def open_spans(self, subscription_key: SubscriptionKey) -> OpenSpans:
        """Return the starts that wait for their ends, where the engine pairs them. Raises OSError."""

    def ask(self) -> Future[None]:
        """Return a future that is done when the reader thread gets to it, or has an error if that thread has ended."""

    def problem(self) -> str | None:
        """Return why nothing can be armed or read now, or None if all is well. Cheap, and never blocks."""

    def metrics(self) -> EngineMetrics:
        """Return the current metrics."""

    def quiesced(self, owner: str = "") -> Future[None]:
        """Return a future that is done when nothing is patched any more of what was disarmed for this owner so far
        with is_awaited, or by closing a subscription.
        """

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        """Count foreign hits since the last call: those in processes of users that a subscription may not trace.

        A site's hits do not count if another subscription wants it in all processes. Empty if the engine cannot tell.
        """

    def retry_cleanup(self) -> None:
        """Try again to disarm or remove what the kernel refused to; called periodically."""

    def shutdown(self) -> None:
        """Close all subscriptions and stop the engine's threads."""
