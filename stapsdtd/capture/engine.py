"""What the daemon wants of a capture engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stapsdtd.events.batch import EventBatch
from stapsdtd.model import Argument, Capture, Object, ObjectKey, Site
from stapsdtd.query.actions import Action
from stapsdtd.query.expression import Expression

SubscriptionKey = int
"""Names a subscription to the engine; never used twice by one daemon."""


class LossStage(Enum):
    """Where events that fired were lost: engines lose in the first two, a subscription in the others."""

    KERNEL_BUFFER = "kernel buffer"
    DECODE = "decode"
    QUEUE = "queue"
    QUOTA = "quota"


class Sink(Protocol):
    """Receives one subscription's events, on the engine's reader thread; it must not block."""

    def deliver(self, batch: EventBatch) -> None:
        """Take events, in the order of time, that are not earlier than those of the calls before."""

    def fired(self, count: int) -> None:
        """Count more hits that the kernel counted. Each is also delivered, filtered or lost, before or after."""

    def filtered(self, count: int) -> None:
        """Count more events that fired outside the scope, or did not satisfy the predicate."""

    def lost(self, stage: LossStage, count: int) -> None:
        """Count more events that fired and will not be delivered."""


@dataclass(frozen=True, slots=True)
class TargetSite:
    """A site to arm, and what to do at its hits.

    site_id names it in what is delivered; pids is None where every process counts.
    """

    site: Site
    site_id: int
    action: Action
    pids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Sites of one object to arm.

    file_path opens the object's file in this process; it need not live beyond the call.
    predicate: which hits are wanted, None for all; others count as filtered.
    owners: users whose own processes count, None for everybody's; hits of others are as if they had never been.
    exclude_pids: processes that map the object and are to leave no events; their hits are not counted at all.
    exclude_later: others that are to leave no events should they come to map it; their hits may count as filtered.
    is_ephemeral: the object's file goes with its last process, as a memfd does, and must not be held longer.
    owner: whose it is, where it is ephemeral: one user's objects must not use up what is there for all.
    """

    object: Object
    file_path: str
    sites: tuple[TargetSite, ...]
    predicate: Expression | None = None
    exclude_pids: frozenset[int] = frozenset()
    is_ephemeral: bool = False
    exclude_later: frozenset[int] = frozenset()
    owners: frozenset[int] | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A site that could not be armed, and why, in the kernel's own words where it has some."""

    site: Site
    reason: str


@dataclass(frozen=True, slots=True)
class RingMetrics:
    """A buffer between kernel and daemon; the name is one of few, whatever clients do."""

    name: str
    filled_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnreadMetrics:
    """What became of values that were not in memory at the hit, since the daemon began.

    from_file: constants that were read from their files. unavailable: those that were delivered as that. pages_touched:
    brought in for later hits; pages_refused: not, since too many of their owner's waited, or it may have them hang.
    stuck: owners whose page has not come for more than a second.
    """

    from_file: int = 0
    unavailable: int = 0
    pages_touched: int = 0
    pages_refused: int = 0
    stuck: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """attachments: sites that are armed; what subscriptions share counts once. groups: tracefs events.

    strays: hits and records of nobody's, because something else had taken their place; 0 unless the engine or the
    kernel has a defect.
    """

    attachments: int
    groups: int
    rings: tuple[RingMetrics, ...]
    strays: int = 0
    unread: UnreadMetrics = UnreadMetrics()


class Engine(Protocol):
    """Called from one thread, but for `ask`, `problem` and `metrics`, which any thread may call."""

    @property
    def name(self) -> str: ...

    def why_not(self, capture: Capture, argument: Argument, architecture: str) -> str | None:
        """Return why an argument of an object of this architecture cannot be taken so; None where it can."""

    def open(self, subscription_key: SubscriptionKey, sink: Sink, kernel_buffer_kib: int, owner: str = "") -> None:
        """Begin a subscription with nothing armed. owner: names the client, who shares the engine with others."""

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        """Arm sites; when it returns, every hit of a site not refused is delivered or counted as lost."""

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:
        """Disarm all of an object's sites for this subscription. is_awaited: quiesced() tells when that is done."""

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        """Disarm everything. What is returned is done, in any thread, when the sink has the rest of the events and the
        last losses; it is told nothing after that.
        """

    def ask(self) -> Future[None]:
        """Return a future that is done when the reader thread comes round to it; it has an error where that ended."""

    def problem(self) -> str | None:
        """Return why nothing can be armed or read now; None where all is well. Cheap, and waits for nobody."""

    def metrics(self) -> EngineMetrics:
        """As of about now."""

    def quiesced(self, owner: str = "") -> Future[None]:
        """Return a future that is done when all that was disarmed so far for this owner, and is awaited, is out of the
        processes; that of a subscription that was closed always is.
        """

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        """Count hits since the last call in processes that a subscription does not see, as it is for some users' only,
        where nobody who sees them all wants the same. An engine that cannot tell answers nothing.
        """

    def retry_cleanup(self) -> None:
        """Try again what the kernel refused to disarm or remove; to be called every now and then."""

    def shutdown(self) -> None:
        """End what is left and stop the reader thread."""
