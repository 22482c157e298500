"""What a subscription's stream carries: events, losses, and the state of sites.

Offsets are file offsets in bytes, times are Unix time in nanoseconds, and pids and tids are in the host's pid
namespace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stapsdtd.client.column_batch import ColumnBatch
    from stapsdtd.client.errors import ClientError
    from stapsdtd.client.probes import Probe, Site
    from stapsdtd.client.server import Account
    from stapsdtd.client.snapshots import Snapshot

_T = TypeVar("_T")


class Encoding(Enum):
    """ROWS: one object per event, easy to use. COLUMNS: one numpy array per field, fast."""

    ROWS = "rows"
    COLUMNS = "columns"


class SiteState(Enum):
    """ARMING and DISARMING: for more than a second, because the kernel or a file holds that up."""

    ARMING = "still arming"
    ARMED = "armed"
    DISARMING = "still disarming"
    DISARMED = "disarmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """The state of one site. reason: why it is refused, or what limits it though it is armed; otherwise empty.

    armed_after_ns: how long after the server noticed its object it was armed. tag: of the clause that chose it.
    function: in which it is, or empty.
    """

    state: SiteState
    site_id: int
    provider: str
    name: str
    path: str
    offset: int
    reason: str
    armed_after_ns: int = 0
    tag: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True)
class CapturedArgument:
    """Describes one value of an event.

    index: of the argument, from 0. missing: why some events lack the value. is_hex: the selector says `arg0:hex`.
    is_buffer: it says `arg0:buf[16]`, the bytes that the argument points to.
    field: what it is if it is no argument, one of `SubscribeOptions.fields`, or "elapsed", of a span. of_start: whether
    it is an argument of the start of a span.
    """

    index: int
    is_string: bool
    missing: str
    is_hex: bool = False
    field: str = ""
    of_start: bool = False
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class DescribedSite:
    """The site that an event's site_id refers to. captures describe the event's values, in order. tag: of the clause
    that chose it.
    """

    probe: Probe
    site: Site
    captures: tuple[CapturedArgument, ...]
    tag: str = ""

    @property
    def of_start(self) -> int:
        """Return how many values are arguments of the start of a span; they follow those of the site."""
        return sum(capture.of_start for capture in self.captures)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the last values, those that are fields."""
        return tuple(capture.field for capture in self.captures if capture.field)


@dataclass(frozen=True, slots=True)
class Descriptions:
    """Precedes the first event of these sites."""

    sites: tuple[DescribedSite, ...]


class CutText(str):
    """The beginning of a string of which there was more than was captured; else like any other str."""

    __slots__ = ()


Value = int | float | str | bytes | None
"""Strings are decoded as UTF-8, with invalid bytes escaped (`\\xff`); those that were cut are CutText. Values that do
not have the size of a number, such as structs, are bytes as they were in memory. None means that there is no value.
"""

ALL_AVAILABLE: Mapping[int, str] = MappingProxyType({})


class Event(NamedTuple):
    """One firing of a probe.

    seq: counts from 1 in the subscription, or in each of its clauses.
    probe: contains only those of its sites that were described together with this one.
    unavailable: why values are None, by position in values.
    tag: of the clause that it is an event of.
    time_ns: as the server's clock showed it. monotonic_ns: by CLOCK_MONOTONIC of its host; None from an older server.
    """

    seq: int
    time_ns: int
    pid: int
    tid: int
    cpu: int
    comm: str
    probe: Probe
    site: Site
    values: tuple[Value, ...]
    unavailable: Mapping[int, str] = ALL_AVAILABLE
    tag: str = ""
    monotonic_ns: int | None = None

    def __hash__(self) -> int:
        return hash((*self[:9], self.tag))

    def __repr__(self) -> str:
        what = f"{self.probe.provider}:{self.probe.name}"
        values = ", ".join(
            f"<{self.unavailable.get(position, '')}>" if value is None else repr(value)
            for position, value in enumerate(self.values)
        )
        return f"<Event {self.seq} {what}({values}) pid={self.pid} tid={self.tid} comm={self.comm!r}>"


@dataclass(frozen=True, slots=True, eq=False)
class EventBlock:
    """count events of one clause in order of seq, one sequence of Python values per field. Their values have the same
    types.

    `sites[site_id]` describes the site and the values. values: one sequence for each captured argument. cut: positions
    of those of which some are CutText. unavailable: as of Event; None if all events have all values.
    realtime_offset_ns: by how much time_ns is ahead of CLOCK_MONOTONIC; None from an older server.
    """

    count: int
    seq: Sequence[int]
    time_ns: Sequence[int]
    pid: Sequence[int]
    tid: Sequence[int]
    cpu: Sequence[int]
    comm: Sequence[str]
    site_id: Sequence[int]
    sites: Mapping[int, DescribedSite]
    values: tuple[Sequence[Value], ...]
    unavailable: Sequence[Mapping[int, str]] | None
    cut: tuple[int, ...] = ()
    realtime_offset_ns: int | None = None

    @property
    def monotonic_ns(self) -> Sequence[int | None]:
        """Return when the events fired, by CLOCK_MONOTONIC of the server's host; None from an older server."""
        offset_ns = self.realtime_offset_ns
        return [None] * self.count if offset_ns is None else [time_ns - offset_ns for time_ns in self.time_ns]

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the last values, those that are fields: the same at all sites of a subscription."""
        return self.sites[self.site_id[0]].fields if self.count else ()

    @property
    def tag(self) -> str:
        """Return the clause that these are events of."""
        return self.sites[self.site_id[0]].tag if self.count else ""

    def events(self) -> Iterable[Event]:
        probes = {site_id: self.sites[site_id].probe for site_id in set(self.site_id)}
        sites = {site_id: self.sites[site_id].site for site_id in probes}
        fields = zip(
            self.seq,
            self.time_ns,
            self.pid,
            self.tid,
            self.cpu,
            self.comm,
            map(probes.__getitem__, self.site_id),
            map(sites.__getitem__, self.site_id),
            zip(*self.values, strict=True) if self.values else repeat((), self.count),
            self.unavailable or repeat(ALL_AVAILABLE, self.count),
            repeat(self.tag, self.count),
            self.monotonic_ns,
            strict=True,
        )
        # Event's own constructor is Python code and would take longer than everything else here
        return map(tuple.__new__, repeat(Event), fields)


@dataclass(frozen=True, eq=False)
class EventBatch:
    """The events of one message, all of one clause, by type of their values: their sequence numbers interleave."""

    blocks: tuple[EventBlock, ...]

    @property
    def tag(self) -> str:
        """Return the clause that these are events of."""
        return self.blocks[0].tag if self.blocks else ""

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All of them, in order of seq."""
        return tuple(self.in_order(EventBlock.events))

    def in_order(self, function: Callable[[EventBlock], Iterable[_T]]) -> list[_T]:
        """Return what the function makes of each event of a block, in order of seq over all blocks."""
        items = list(chain.from_iterable(map(function, self.blocks)))
        if len(self.blocks) > 1:
            seqs = list(chain.from_iterable(block.seq for block in self.blocks))
            items = [items[index] for index in sorted(range(len(items)), key=seqs.__getitem__)]
        return items


class LossStage(Enum):
    """The kernel's buffer was full, the client was too slow, a record was invalid, a quota was exceeded, an aggregation
    has no room for more keys, the kernel could not hit a kernel function, or too many events waited for what is
    evaluated after the hit.
    """

    KERNEL_BUFFER = "kernel_buffer"
    QUEUE = "queue"
    DECODE = "decode"
    QUOTA = "quota"
    TABLE_FULL = "table_full"
    MISSED = "missed"
    FILTER = "filter"


@dataclass(frozen=True, slots=True)
class Loss:
    """count: events lost since the stream's previous Loss of this stage. total: since the subscription was made.
    tag: of the clause that lost them.
    """

    stage: LossStage
    count: int
    total: int
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """Sites that were armed, disarmed or refused after the subscription was made."""

    sites: tuple[SiteStatus, ...]


@dataclass(frozen=True, slots=True)
class ClockChange:
    """The server's clock was set, or its host was suspended. Events from before have the times that it showed then.

    time_ns, monotonic_ns: when that was noticed, by the changed clock and by CLOCK_MONOTONIC of its host. by_ns: by how
    much it was set forward; negative if it was set back. suspended_ns: how long the host was suspended.
    """

    time_ns: int
    monotonic_ns: int
    by_ns: int
    suspended_ns: int = 0


@dataclass(frozen=True, slots=True)
class Interruption:
    """The stream broke, or the server stopped and is waited for. seconds: for how long the client tries to go on."""

    error: ClientError
    seconds: float


@dataclass(frozen=True, slots=True)
class Resubscribed:
    """The server was restarted, and the client has subscribed again: numbers of events count from 1 again.

    What fired between ended_ns and subscribed_ns, Unix time by the client's clock, is in no account.
    account: the final one of the subscription that ended. None if the server gave none, since it was killed: what else
        fired until then is unknown.
    clauses: those of its clauses, by tag.
    """

    ended_ns: int
    subscribed_ns: int
    account: Account | None
    clauses: Mapping[str, Account] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return how long nothing was captured."""
        return (self.subscribed_ns - self.ended_ns) / 1e9


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A start that waits for its end.

    begin_ns: Unix time. waiting_ns: how long it has waited. key: as `Span.key`, empty if that is the thread. values: of
    the start, in the order of `OpenSpans.captures`; None for what could not be read. begin_monotonic_ns: by
    CLOCK_MONOTONIC of the server's host; None from an older server.
    """

    begin_ns: int
    waiting_ns: int
    pid: int
    tid: int
    key: tuple[Value, ...]
    values: tuple[Value, ...]
    begin_monotonic_ns: int | None = None


@dataclass(frozen=True, slots=True)
class OpenSpans:
    """spans: the oldest starts that wait, at most 100. count: of all that wait. captures: what their values are. tag:
    of their clause.
    """

    spans: tuple[OpenSpan, ...] = ()
    count: int = 0
    captures: tuple[CapturedArgument, ...] = ()
    tag: str = ""


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server_stopping"
    LEASE_EXPIRED = "lease_expired"
    ACCESS_REVOKED = "access_revoked"
    PROCESSES_ENDED = "processes_ended"


@dataclass(frozen=True, slots=True)
class End:
    """The last message. Nothing is in flight in its account.

    clauses: their own accounts, by tag. open: the spans that were open when they were disarmed, by tag.
    """

    reason: EndReason
    account: Account
    clauses: Mapping[str, Account] = field(default_factory=dict)
    open: Mapping[str, OpenSpans] = field(default_factory=dict)


Message: TypeAlias = (
    "Descriptions | EventBatch | ColumnBatch | Snapshot | OpenSpans | Loss | Status | ClockChange | Interruption | "
    "Resubscribed | End"
)
