"""One client's subscription: the engine's sink on one side, what a stream reads on the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from stapsdtd.capture.engine import LossStage, SubscriptionKey
from stapsdtd.catalog.selectors import SelectedSite, Selector
from stapsdtd.events.columns import Block
from stapsdtd.model import Argument, Capture, Object, ObjectKey, Site, SiteCapture
from stapsdtd.query.expression import Expression
from stapsdtd.runtime.futures import unfinished
from stapsdtd.sessions.fairness import Admission, shared_out
from stapsdtd.sessions.log import ENTRY_OVERHEAD, EventLog, rows_bytes
from stapsdtd.sessions.own_clients import ClientFilter, ConnectedClients
from stapsdtd.sessions.principal import Principal
from stapsdtd.subscribe_options import Scope

_log = logging.getLogger(__name__)

_RESERVE = 8
"""When only an eighth of the queue is left, what comes in is shared out among the processes, ..."""
_ALWAYS_ROOM = 16
"""... with some for each that has less, even if the oldest events have to go for it."""

_STATUSES_KEPT = 10_000
_RETIRED_KEPT = 10_000
_RETIRED_SECONDS = 60.0
"""Longer than it takes until the last events of a site that is disarmed have come."""


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """What a client asked for, checked and with the server's defaults filled in.

    where is the text that the client wrote; predicate is what it and the scope come to, None where all hits are wanted.
    The uids, execnames, cgroups and containers of the scope are part of the predicate.
    owners: users whose own processes it may see, None for everybody's. Of others it is told nothing.
    subscriber_pid: the client's own process, None where nobody knows it.
    """

    selectors: tuple[Selector, ...]
    scope: Scope
    lease_seconds: int
    queue_bytes: int
    kernel_buffer_kib: int
    where: str = ""
    predicate: Expression | None = None
    owners: frozenset[int] | None = None
    subscriber_pid: int | None = None

    def filter_of(self, clients: ConnectedClients) -> ClientFilter | None:
        """What takes the daemon's own clients' events out; None where they are asked for, as by naming processes."""
        if self.scope.include_clients or self.scope.pids or self.scope.execnames:
            return None
        named = {selector.provider_of_pid[1] for selector in self.selectors if selector.provider_of_pid}
        return ClientFilter(clients, named if self.subscriber_pid is None else named | {self.subscriber_pid})


class SiteState(Enum):
    """ARMING and DISARMING are told only of what takes long."""

    ARMING = "still arming"
    ARMED = "armed"
    DISARMING = "still disarming"
    DISARMED = "disarmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """A site's standing changed; reason is empty but for REFUSED."""

    state: SiteState
    site_id: int
    object: Object
    site: Site
    reason: str = ""


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server stopping"
    LEASE_EXPIRED = "lease expired"
    ACCESS_REVOKED = "access revoked"


@dataclass(frozen=True, slots=True)
class Account:
    """fired = delivered + filtered + lost_kernel_buffer + lost_queue + lost_decode + lost_quota + in_flight."""

    delivered: int
    filtered: int
    lost_kernel_buffer: int
    lost_queue: int
    lost_decode: int
    lost_quota: int
    in_flight: int
    sites: int

    @property
    def fired(self) -> int:
        return self.delivered + self.filtered + self.lost + self.in_flight

    @property
    def lost(self) -> int:
        return self.lost_kernel_buffer + self.lost_queue + self.lost_decode + self.lost_quota


WhyNot = Callable[[Capture, Argument, str], str | None]
"""As `Engine.why_not`."""


@dataclass(frozen=True, slots=True)
class KnownSite:
    """A site that events of this subscription name."""

    object: Object
    capture: SiteCapture
    why_not: WhyNot

    def why_missing(self, position: int) -> str:
        """Why an event has no value there: its operand or the engine, else the process's memory at that moment."""
        capture = self.capture.captures[position]
        argument = self.capture.site.arguments[capture.index]
        reason = self.why_not(capture, argument, self.object.parsed.architecture)
        return reason or "the memory it points to could not be read"


class _Retired(NamedTuple):
    """When a site was disarmed, and the number of the next event then."""

    at: float
    next_seq: int


class Subscription:
    """Shared by three threads: the control thread arms, the engine's reader delivers, the API's streams."""

    def __init__(  # noqa: PLR0917 - what it is made of
        self,
        ident: str,
        subscription_key: SubscriptionKey,
        spec: SubscriptionSpec,
        own_pid: int,
        why_not: WhyNot,
        client: Principal | None = None,
        clients: ConnectedClients | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """why_not: the engine's. clients: whose events are left out unless the spec says otherwise.

        is_ending: it is being disarmed, or was. ended: done when `end` was called.
        """
        self._why_not = why_not
        self.client = client or Principal()
        self.id = ident
        self.subscription_key = subscription_key
        self.spec = spec
        self.created_ns = time.time_ns()
        self.realtime_offset_ns = self.created_ns - time.monotonic_ns()
        self.excluded = frozenset(spec.scope.exclude_pids) | {own_pid}
        self.log = EventLog(spec.queue_bytes, self._notify)
        self._admission = Admission()
        self._client_filter = None if clients is None else spec.filter_of(clients)
        self._lock = threading.Lock()
        self._sites: OrderedDict[int, KnownSite] = OrderedDict()
        self._ids: dict[tuple[ObjectKey, SiteCapture], int] = {}
        self._next_site_id = 1
        self._armed: set[int] = set()
        self._clock = clock
        self._retired: OrderedDict[int, _Retired] = OrderedDict()
        self._statuses: deque[SiteStatus] = deque(maxlen=_STATUSES_KEPT)
        self._fired = 0
        self._filtered = 0
        self._lost = dict.fromkeys(LossStage, 0)
        self._end: EndReason | None = None
        self.is_ending = False
        self.ended = unfinished()
        self._waiters: list[Callable[[], object]] = []

    def wake_with(self, waiter: Callable[[], object]) -> Callable[[], None]:
        """Call waiter, in any thread, whenever there is something new to read. Answer what ends that."""
        self._waiters.append(waiter)
        return lambda: self._waiters.remove(waiter)

    @property
    def is_read(self) -> bool:
        """Whether a stream is open."""
        return bool(self._waiters)

    def _notify(self) -> None:
        for waiter in list(self._waiters):
            try:
                waiter()
            except Exception:  # noqa: BLE001 - what there is to read is there, whoever learns of it
                _log.exception("%s: a stream could not be woken", self.id)

    # the engine's side: capture.engine.Sink

    def deliver(self, blocks: Sequence[Block]) -> None:
        """Each event is counted once: as filtered, as lost, or by the log, which takes all that it is given or none."""
        rest = blocks
        try:
            rest = self._without_clients(rest)
            rest = self._within_quota(rest)
            if not rest:
                return
            if self._left() - rows_bytes(rest) > self.spec.queue_bytes // _RESERVE:
                self.log.append(rest)
                return
            rest = admitted = self._within_queue(rest)
            if admitted:
                self.log.append(admitted, is_short=True)
                rest = ()
                self._admission.admitted(admitted, self.log.positions().end)
        except Exception:  # noqa: BLE001 - what is not in the log by now never will be
            _log.exception("%s: events could not be kept", self.id)
            self.lost(LossStage.DECODE, sum(map(len, rest)))

    def _without_clients(self, blocks: Sequence[Block]) -> Sequence[Block]:
        if self._client_filter is None:
            return blocks
        kept = self._client_filter.rest(blocks)
        self.filtered(sum(map(len, blocks)) - sum(map(len, kept)))
        return kept

    def _within_quota(self, blocks: Sequence[Block]) -> Sequence[Block]:
        # another policy may put another one in its place meanwhile
        quota = self.client.events
        count = sum(map(len, blocks))
        if quota is None or (granted := quota.take(count)) == count:
            return blocks
        return self._instead_of(blocks, shared_out(blocks, granted), LossStage.QUOTA)

    def _within_queue(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return as much as may come in where the client reads too slowly."""
        self._admission.read(self.log.positions().read)
        free = self._left() * sum(map(len, blocks)) // rows_bytes(blocks)
        return self._instead_of(blocks, self._admission.admit(blocks, free, _ALWAYS_ROOM), LossStage.QUEUE)

    def _left(self) -> int:
        """Bytes that the next entry may take before unread events have to go for it."""
        return max(self.spec.queue_bytes - self.log.unread_bytes - ENTRY_OVERHEAD, 0)

    def _instead_of(self, blocks: Sequence[Block], kept: Sequence[Block], stage: LossStage) -> Sequence[Block]:
        """Count what is missing in kept as lost, and return kept."""
        if lost := sum(map(len, blocks)) - sum(map(len, kept)):
            self.lost(stage, lost)
        return kept

    def fired(self, count: int) -> None:
        self._fired += count

    def filtered(self, count: int) -> None:
        self._filtered += count

    def lost(self, stage: LossStage, count: int) -> None:
        self._lost[stage] += count
        self._notify()

    # the control thread's side

    def site_id(self, found: Object, selected: SelectedSite) -> int:
        """Return the number of a site in this subscription's events; the same for the same site."""
        with self._lock:
            known = self._ids.get((found.key, selected.capture))
            if known is not None:
                return known
            number = self._next_site_id
            self._next_site_id += 1
            self._ids[found.key, selected.capture] = number
            self._sites[number] = KnownSite(found, selected.capture, self._why_not)
            return number

    def changed(self, statuses: Sequence[SiteStatus]) -> None:
        """Record what was armed, disarmed or refused, and tell the stream."""
        with self._lock:
            for status in statuses:
                if status.state is SiteState.ARMED:
                    self._armed.add(status.site_id)
                if status.state is not SiteState.DISARMED and status.state is not SiteState.REFUSED:
                    self._retired.pop(status.site_id, None)
                else:
                    self._armed.discard(status.site_id)
                    self._retired[status.site_id] = _Retired(self._clock(), self.log.next_seq)
                self._statuses.append(status)
            self._forget_retired()
        self._notify()

    def _forget_retired(self) -> None:
        """Objects come and go for as long as a subscription lives; those are remembered that events kept may name, and
        no more than so many.
        """
        excess = len(self._sites) - len(self._armed) - _RETIRED_KEPT
        if excess > 0:
            for number in [number for number in self._sites if number not in self._armed][:excess]:
                self._forget(number)
        before, first_kept = self._clock() - _RETIRED_SECONDS, self.log.first_kept
        while self._retired:
            number, retired = next(iter(self._retired.items()))
            if retired.at > before or retired.next_seq > first_kept:
                break
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._retired.pop(number, None)
        known = self._sites.pop(number, None)
        if known is not None:
            self._ids.pop((known.object.key, known.capture), None)

    def end(self, reason: EndReason) -> None:
        """The log has all that fired, and the account is final but for what is still to be delivered."""
        self._end = reason
        self.ended.set_result(None)
        self._notify()

    # the stream's side

    @property
    def end_reason(self) -> EndReason | None:
        return self._end

    def known_sites(self, numbers: Sequence[int]) -> dict[int, KnownSite]:
        with self._lock:
            return {number: self._sites[number] for number in numbers if number in self._sites}

    def new_statuses(self) -> list[SiteStatus]:
        """What changed since the last call."""
        with self._lock:
            statuses = list(self._statuses)
            self._statuses.clear()
            return statuses

    def losses(self) -> dict[LossStage, int]:
        """Count what was lost since the beginning."""
        in_log = self.log.counts().lost
        return {**self._lost, LossStage.QUEUE: self._lost[LossStage.QUEUE] + in_log}

    def account(self) -> Account:
        """As of now; what is on its way through the kernel as of when the engine counted last."""
        counts = self.log.counts()
        known = counts.received + self._filtered + sum(self._lost.values())
        return Account(
            delivered=counts.delivered,
            filtered=self._filtered,
            lost_kernel_buffer=self._lost[LossStage.KERNEL_BUFFER],
            lost_queue=counts.lost + self._lost[LossStage.QUEUE],
            lost_decode=self._lost[LossStage.DECODE],
            lost_quota=self._lost[LossStage.QUOTA],
            in_flight=counts.pending + max(self._fired - known, 0),
            sites=len(self._armed),
        )
