"""The frozen data that the client returns.

Offsets are file offsets in bytes, times are Unix time in nanoseconds, and pids and tids are in the host's pid
namespace. Fields that the server leaves empty because they do not apply are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from stapsdtd.client.errors import ClientError
    from stapsdtd.subscribe_options import Scope


# Probes


@dataclass(frozen=True, slots=True)
class Constant:
    """The value is given in the note."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """The value is in a register, starting at bit first_bit. name is the full-width register's."""

    name: str
    first_bit: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The value is in the process's memory at base + index * scale + displacement.

    base, index: register names, None if not used.
    symbol: the symbol that the note names, if any; base is the program counter then, and displacement is relative to
    the site.
    """

    base: str | None
    displacement: int
    index: str | None = None
    scale: int = 1
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """The value is the address of a symbol: base + displacement."""

    base: str | None
    displacement: int
    symbol: str | None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The value cannot be fetched."""

    reason: str


Operand = Constant | Register | Memory | Address | Unavailable


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a site. text is as in the note, `-4@%esi`; size is in bytes."""

    text: str
    size: int
    signed: bool
    is_float: bool
    operand: Operand


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a probe can fire.

    site_id: identifies the site in a subscription's events; 0 elsewhere.
    refused: in listings, why the server's host never arms the site, or empty.
    """

    site_id: int
    offset: int
    semaphore_offset: int | None
    function: str | None
    arguments: tuple[Argument, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """`provider:name` in one object. pids: the processes that map the object. build_id: in lower-case hex."""

    provider: str
    name: str
    path: str
    build_id: str | None
    architecture: str
    pids: tuple[int, ...]
    sites: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that maps probes.

    cgroup: the path in the unified hierarchy.
    container_id: id or name of the innermost container. It is not authenticated: anyone who controls part of the cgroup
    tree can imitate a container.
    namespace_pid: the pid in the process's own pid namespace.
    """

    pid: int
    comm: str
    command_line: tuple[str, ...]
    user: str
    started_ns: int
    cgroup: str | None
    container_id: str | None
    namespace_pid: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A note that could not be used or, if provider and name are empty, a whole file."""

    path: str
    provider: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeListing:
    """A sequence of probes. processes and problems are filled in with details=True.

    sites_left_out: the number of sites of very large objects that were left out.
    """

    probes: tuple[Probe, ...]
    processes: tuple[Process, ...]
    problems: tuple[Problem, ...]
    sites_left_out: int = 0

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.probes)

    def __len__(self) -> int:
        return len(self.probes)


@dataclass(frozen=True, slots=True)
class ProbeAdded:
    probe: Probe


@dataclass(frozen=True, slots=True)
class ProbeRemoved:
    probe: Probe


@dataclass(frozen=True, slots=True)
class SnapshotComplete:
    """All probes that existed when the watch began have been sent; changes follow."""


WatchMessage = ProbeAdded | ProbeRemoved | SnapshotComplete


# The server


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
    """

    client: str
    role: str
    manage: bool
    list: tuple[int, ...] | None
    trace: tuple[int, ...] | None
    trace_restriction: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server is, and what it knows.

    subscriptions, processes, objects, probes: how many of each this client may see.
    access: None if the server is too old to report it.
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


@dataclass(frozen=True, slots=True)
class Account:
    """Numbers of events, where fired = delivered + filtered + lost + in_flight. sites: how many are, or were, armed."""

    fired: int
    delivered: int
    filtered: int
    lost_kernel_buffer: int
    lost_queue: int
    lost_decode: int
    in_flight: int
    sites: int
    lost_quota: int = 0

    @property
    def lost(self) -> int:
        return self.lost_kernel_buffer + self.lost_queue + self.lost_decode + self.lost_quota


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription, which may be another client's. lease_left_ms: 0 while streaming. where: empty if not filtered."""

    id: str
    selectors: tuple[str, ...]
    scope: Scope
    created_ns: int
    streaming: bool
    lease_left_ms: int
    account: Account
    where: str = ""


# Streams


class Encoding(Enum):
    """ROWS: one object per event, easy to use. COLUMNS: one numpy array per field, fast."""

    ROWS = "rows"
    COLUMNS = "columns"


class SiteState(Enum):
    ARMED = "armed"
    DISARMED = "disarmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """The state of one site. reason: why it is refused, otherwise empty."""

    state: SiteState
    site_id: int
    provider: str
    name: str
    path: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class CapturedArgument:
    """Describes one value of an event. index: of the argument, from 0. missing: why some events lack the value."""

    index: int
    is_string: bool
    missing: str


@dataclass(frozen=True, slots=True)
class DescribedSite:
    """The site that an event's site_id refers to. captures describe the event's values, in order."""

    probe: Probe
    site: Site
    captures: tuple[CapturedArgument, ...]


@dataclass(frozen=True, slots=True)
class Descriptions:
    """Precedes the first event of these sites."""

    sites: tuple[DescribedSite, ...]


Value = int | float | str | bytes | None
"""Strings are decoded as UTF-8, with invalid bytes escaped (`\\xff`). Values that do not have the size of a number,
such as structs, are bytes as they were in memory. None means that there is no value.
"""

ALL_AVAILABLE: Mapping[int, str] = MappingProxyType({})


class Event(NamedTuple):
    """One firing of a probe.

    seq: counts from 1 in the subscription.
    probe: contains only those of its sites that were described together with this one.
    unavailable: why values are None, by position in values.
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

    def __hash__(self) -> int:
        return hash(self[:-1])


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one message, in order of seq."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NumberColumn:
    """One number per event. unavailable: true for events without a value; None if all have one."""

    values: NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.float64]
    unavailable: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StringColumn:
    """One byte string per event, or a value's bytes: `column[i]` is the data between two ends."""

    data: bytes
    ends: NDArray[np.uint32]
    unavailable: NDArray[np.bool_] | None

    def __getitem__(self, row: int) -> bytes:
        if not 0 <= row < len(self.ends):
            raise IndexError(row)
        return self.data[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))


Column = NumberColumn | StringColumn


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBatch:
    """count events as one read-only array per field; the arrays are views of the message's bytes.

    comm has dtype `S16`. `sites[site_id]` describes the site and the values.
    """

    count: int
    seq: NDArray[np.uint64]
    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    cpu: NDArray[np.uint16]
    comm: NDArray[np.bytes_]
    site_id: NDArray[np.uint32]
    values: tuple[Column, ...]
    sites: Mapping[int, DescribedSite]


class LossStage(Enum):
    """The kernel's buffer was full, the client was too slow, a record was invalid, or a quota was exceeded."""

    KERNEL_BUFFER = "kernel_buffer"
    QUEUE = "queue"
    DECODE = "decode"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True)
class Loss:
    """count: events lost since the stream's previous Loss of this stage. total: since the subscription was made."""

    stage: LossStage
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Status:
    """Sites that were armed, disarmed or refused after the subscription was made."""

    sites: tuple[SiteStatus, ...]


@dataclass(frozen=True, slots=True)
class Interruption:
    """The stream broke. It is reopened, and resumes where it stopped, until the lease expires."""

    error: ClientError


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server_stopping"
    LEASE_EXPIRED = "lease_expired"
    ACCESS_REVOKED = "access_revoked"


@dataclass(frozen=True, slots=True)
class End:
    """The last message. Nothing is in flight in its account."""

    reason: EndReason
    account: Account


Message = Descriptions | EventBatch | ColumnBatch | Loss | Status | Interruption | End
