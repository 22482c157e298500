"""The frozen data that the client returns; protobuf stays inside this package.

Offsets are file offsets in bytes, times are Unix time in nanoseconds, pids and tids are those of the host's
pid namespace. What the server leaves empty because there is none is None here.
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


# What there is to trace


@dataclass(frozen=True, slots=True)
class Constant:
    """The value stands in the note."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """The value is in a register, from its bit first_bit on; name is that of the full-width register."""

    name: str
    first_bit: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The value is in the process's memory at base + index * scale + displacement, registers None where there is none.

    symbol: what the note names; base is the program counter then, and the displacement counts from the site.
    """

    base: str | None
    displacement: int
    index: str | None = None
    scale: int = 1
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """The value is the address of a symbol, displacement bytes from the base."""

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
    """One argument of a site; text is as in the note, `-4@%esi`, and size is the value's, in bytes."""

    text: str
    size: int
    signed: bool
    is_float: bool
    operand: Operand


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a probe can fire; site_id names it in a subscription's events and is 0 elsewhere.

    refused: in listings, why the server's host arms it for nobody; empty where it does.
    """

    site_id: int
    offset: int
    semaphore_offset: int | None
    function: str | None
    arguments: tuple[Argument, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """`provider:name` in one object, and the processes that map it. build_id is lower-case hex."""

    provider: str
    name: str
    path: str
    build_id: str | None
    architecture: str
    pids: tuple[int, ...]
    sites: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """cgroup is the path in the unified hierarchy, container_id the innermost container's id or name; whoever owns a
    part of the hierarchy may name a cgroup there like any container. namespace_pid: the pid in the process's own pid
    namespace.
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
    """A note, or with empty provider and name a whole file, that could not be used."""

    path: str
    provider: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeListing:
    """The probes there are now; iterates over them. processes and problems are filled with details=True.

    sites_left_out: an object with very many is told in part; selectors and pids choose first.
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
    """All that was there when the watch began has been told; what follows are changes."""


WatchMessage = ProbeAdded | ProbeRemoved | SnapshotComplete


# The server


@dataclass(frozen=True, slots=True)
class Feature:
    """detail says what was found, remedy what an operator can do where the feature is missing.

    required: the server cannot capture without it; for others it has a fallback.
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
    """Who the server takes this client for, and what that allows.

    list, trace: the ids of users whose processes may be listed and traced; None for everybody's. manage: other clients'
    subscriptions may be seen, streamed and ended too. trace_restriction: why nothing may be traced although the role
    allows it; empty where that is not so.
    """

    client: str
    role: str
    manage: bool
    list: tuple[int, ...] | None
    trace: tuple[int, ...] | None
    trace_restriction: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """subscriptions, processes, objects and probes are how many there are for this client.

    access is None where the server is too old to tell it.
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
class Scope:
    """Whose events are delivered: of each kind that is not empty one has to be met, but never exclude_pids."""

    pids: tuple[int, ...] = ()
    exclude_pids: tuple[int, ...] = ()
    uids: tuple[int, ...] = ()
    execnames: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    include_clients: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """fired = delivered + filtered + lost + in_flight, in events; sites is how many are, or were, armed."""

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
    """Anybody's subscription; lease_left_ms counts while streaming is false. where is empty where all are wanted."""

    id: str
    selectors: tuple[str, ...]
    scope: Scope
    created_ns: int
    streaming: bool
    lease_left_ms: int
    account: Account
    where: str = ""


# What a stream carries


class Encoding(Enum):
    """ROWS: one object an event, easy. COLUMNS: one numpy array a field, fast."""

    ROWS = "rows"
    COLUMNS = "columns"


class SiteState(Enum):
    ARMED = "armed"
    DISARMED = "disarmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """What became of one site; reason is the kernel's own where it is refused, otherwise empty."""

    state: SiteState
    site_id: int
    provider: str
    name: str
    path: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class CapturedArgument:
    """Which argument of the probe a value is, counted from 0; missing says why events that lack it do."""

    index: int
    is_string: bool
    missing: str


@dataclass(frozen=True, slots=True)
class DescribedSite:
    """What an event's site_id stands for; captures are its values' meanings, in order."""

    probe: Probe
    site: Site
    captures: tuple[CapturedArgument, ...]


@dataclass(frozen=True, slots=True)
class Descriptions:
    """Comes before the first event of these sites."""

    sites: tuple[DescribedSite, ...]


Value = int | float | str | bytes | None
"""A string's bytes are decoded as UTF-8, others escaped (`\\xff`). A value of another size than a number's, such as a
struct, is bytes as they were in memory; None is where there is no value.
"""

ALL_AVAILABLE: Mapping[int, str] = MappingProxyType({})


class Event(NamedTuple):
    """A probe that fired: when, in which process and thread, where, and with which values.

    seq counts from 1 in the subscription. probe holds those of its sites that were described together with
    this one. unavailable says, by position in values, why a value is None.
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
    """Events that came in one message, in the order of seq."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NumberColumn:
    """One number an event; unavailable is true where there is none, None where all events have one."""

    values: NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.float64]
    unavailable: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StringColumn:
    """One byte string, or a value's bytes, an event: `column[i]` is data between two ends."""

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
    """count events, one read-only array a field: views on the message's bytes, not copies.

    comm is of dtype `S16`. `sites[site_id]` tells what a site_id stands for and what the values are.
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
    """The kernel's buffer was full, this client was too slow, an event made no sense, or a quota was used up."""

    KERNEL_BUFFER = "kernel_buffer"
    QUEUE = "queue"
    DECODE = "decode"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True)
class Loss:
    """count events were lost since the stream's last Loss of this stage, and total since the subscription began."""

    stage: LossStage
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Status:
    """Sites that were armed, disarmed or refused after the subscription began."""

    sites: tuple[SiteStatus, ...]


@dataclass(frozen=True, slots=True)
class Interruption:
    """The stream broke; it is opened again, and goes on without a gap, while the lease lasts."""

    error: ClientError


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server_stopping"
    LEASE_EXPIRED = "lease_expired"
    ACCESS_REVOKED = "access_revoked"


@dataclass(frozen=True, slots=True)
class End:
    """The last message; nothing is in flight in the account any more."""

    reason: EndReason
    account: Account


Message = Descriptions | EventBatch | ColumnBatch | Loss | Status | Interruption | End
