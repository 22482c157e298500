"""The server and its subscriptions, as the client returns them. Times are Unix time in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stapsdtd.subscribe_options import Scope


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of the server's host.

    detail: what was found, or why the feature is missing.
    remedy: what an operator can do to get it.
    required: whether the server cannot capture without it. It has a fallback for the others.
    """

    name: str
    available: bool
    detail: str
    remedy: str
    required: bool


@dataclass(frozen=True, slots=True)
class Limits:
    max_lease_seconds: int
    max_queue_bytes: int
    max_kernel_buffer_kib: int
    max_selectors: int
    max_string_bytes: int


@dataclass(frozen=True, slots=True)
class Access:
    """The client's identity and rights.

    list, trace: ids of the users whose processes may be listed and traced; None means everybody's.
    manage: whether the client may list, stream and end other clients' subscriptions.
    trace_restriction: why nothing may be traced although the role would allow it, or empty.
    functions: whether kernel functions may be traced.
    """

    client: str
    role: str
    manage: bool
    list: tuple[int, ...] | None
    trace: tuple[int, ...] | None
    trace_restriction: str = ""
    functions: bool = False


@dataclass(frozen=True, slots=True)
class Arming:
    """waiting: how many objects, mostly, wait for their turn. running: what is being done, such as "arming PATH"; ""
    if nothing is, and for clients that may not list everybody's probes. seconds: for how long.
    """

    waiting: int = 0
    running: str = ""
    seconds: float = 0.0


class InventoryState(Enum):
    """FAILED: the last scan did; what an earlier one found is kept."""

    OFF = "off"
    SCANNING = "scanning"
    CURRENT = "current"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the server knows of installed files.

    files, probes: with probes, and in all of them. scanned_ns: when the last scan ended, 0 if none has. problem: why it
    failed, or that files are left out; otherwise empty.
    """

    state: InventoryState
    files: int = 0
    probes: int = 0
    scanned_ns: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server, its host, and the numbers of what it tracks.

    subscriptions, processes, objects, probes: how many of each this client may see.
    access: None if the server is too old to report it. arming: what it has to arm and disarm now, for all clients.
    inventory: None if the server is too old to have one.
    """

    version: str
    engine: str
    kernel_release: str
    machine: str
    pid: int
    subscriptions: int
    processes: int
    objects: int
    probes: int
    features: tuple[Feature, ...]
    limits: Limits
    access: Access | None = None
    arming: Arming = Arming()
    inventory: Inventory | None = None


@dataclass(frozen=True, slots=True)
class SpanAccount:
    """What became of a span's starts, where starts = paired + nested + died + timed_out + table_full + open.

    nested: while an earlier one with their key was waiting. died: their threads ended, or executed another program.
    table_full: there was no room. open: wait for their ends. unmatched: ends that no start waited for.
    """

    starts: int = 0
    paired: int = 0
    nested: int = 0
    died: int = 0
    timed_out: int = 0
    table_full: int = 0
    open: int = 0
    unmatched: int = 0

    def __add__(self, other: SpanAccount) -> SpanAccount:
        return SpanAccount(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


_NO_SPANS = SpanAccount()


@dataclass(frozen=True, slots=True)
class Account:
    """Numbers of events, where fired = delivered + aggregated + filtered + lost + in_flight + spans.starts +
    spans.unmatched.

    aggregated: counted in rows of an aggregation. sites: how many are, or were, armed. undecided: how many of those
    filtered could not be decided, since the filter divides by 0, or needs what could not be read. valueless: how many
    of those aggregated have no value, for the same reasons.
    """

    fired: int
    delivered: int
    filtered: int
    lost_kernel_buffer: int
    lost_queue: int
    lost_decode: int
    in_flight: int
    sites: int
    lost_quota: int = 0
    aggregated: int = 0
    lost_table_full: int = 0
    lost_missed: int = 0
    lost_filter: int = 0
    undecided: int = 0
    valueless: int = 0
    spans: SpanAccount = _NO_SPANS

    @property
    def lost(self) -> int:
        in_daemon = self.lost_queue + self.lost_decode + self.lost_quota + self.lost_filter
        return self.lost_kernel_buffer + in_daemon + self.lost_table_full + self.lost_missed

    def __add__(self, other: Account) -> Account:
        """Return the account of two subscriptions, one after the other, of which the sites are mostly the same."""
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Account(**added | {"sites": max(self.sites, other.sites)})


@dataclass(frozen=True, slots=True)
class ClauseInfo:
    """One of a subscription's clauses."""

    tag: str
    selectors: tuple[str, ...]
    where: str
    account: Account


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription, which may be another client's. lease_left_ms: 0 while streaming. where: empty if not filtered, or
    if there are several clauses. added_late: why the server adds hits up itself, each reason with the number of sites
    that it concerns.
    """

    id: str
    selectors: tuple[str, ...]
    scope: Scope
    created_ns: int
    streaming: bool
    lease_left_ms: int
    account: Account
    where: str = ""
    added_late: Mapping[str, int] = field(default_factory=dict)
    clauses: tuple[ClauseInfo, ...] = ()
