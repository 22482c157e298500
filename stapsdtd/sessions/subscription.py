"""One client's subscription: the engine's sink on one side, what a stream reads on the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from stapsdtd.aggregate.table import Snapshot, Table
from stapsdtd.capture.engine import LossStage, Scope, SubscriptionKey
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, Site, SiteCapture
from stapsdtd.query.site_filter import WhyNotCaptured
from stapsdtd.runtime.futures import unfinished
from stapsdtd.sessions.aggregator import Aggregator
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.log import EventLog
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.pairing import Pairing
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.scoped_processes import ScopedProcesses
from stapsdtd.sessions.sink import Account, EventFilter, EventSink
from stapsdtd.sessions.site_ids import KnownSite, SiteIds, WhyNot
from stapsdtd.sessions.spec import SubscriptionSpec

_log = logging.getLogger(__name__)

_STATUSES_KEPT = 10_000


class SiteState(Enum):
    """ARMING and DISARMING are reported only for what takes long."""

    ARMING = "still arming"
    ARMED = "armed"
    DISARMING = "still disarming"
    DISARMED = "disarmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """A change of a site's state. reason is empty unless REFUSED. armed_after_ns: if ARMED, since it was noticed."""

    state: SiteState
    site_id: int
    object: Object
    site: Site
    reason: str = ""
    armed_after_ns: int = 0


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server stopping"
    LEASE_EXPIRED = "lease expired"
    ACCESS_REVOKED = "access revoked"
    PROCESSES_ENDED = "processes ended"


class Subscription:
    """Shared by three threads: the control thread arms, the engine's reader delivers to `sink`, the API's streams read
    `log`.
    """

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
        *,
        engine_pairs: bool = False,
    ) -> None:
        """why_not: the engine's. clients: whose events are left out unless the spec says otherwise. engine_pairs: if
        there is a span, the engine delivers pairs.

        is_ending: it is being disarmed, or was. ended: done when `end` was called.
        """
        self.client = client or Principal()
        self.id = ident
        self.subscription_key = subscription_key
        self.spec = spec
        self.created_ns = time.time_ns()
        self.realtime_offset_ns = self.created_ns - time.monotonic_ns()
        self.excluded = frozenset(spec.scope.exclude_pids) | {own_pid}
        self.log = EventLog(spec.queue_bytes, self._notify)
        self.processes = ScopedProcesses(spec.scope.pids)
        # nobody is made to fire by what hits add up to
        client_filter = None if clients is None or spec.aggregation else spec.filter_of(clients)
        filters: list[EventFilter] = [client_filter] if client_filter else []
        if spec.scope.pids and not spec.scope.follow:
            filters.append(self.processes)
        self._sites = SiteIds(why_not, clock)
        self._aggregator = (
            Aggregator(spec.aggregation, self._sites.known, spec.queue_bytes) if spec.aggregation else None
        )
        self.engine_pairs = engine_pairs
        self.pairing = (
            Pairing(spec.span.span, self._sites.known, spec.queue_bytes) if spec.span and not engine_pairs else None
        )
        self.sink = EventSink(
            ident,
            self.log,
            self.client,
            filters,
            self._notify,
            aggregator=self._aggregator,
            condition=None if spec.is_unfiltered else ConditionFilter(spec.filter_at, self._sites.known),
            pairing=self.pairing,
            pair_condition=ConditionFilter(spec.filter_of_pairs, self._sites.known) if spec.filters_pairs else None,
        )
        self._lock = threading.Lock()
        self._statuses: deque[SiteStatus] = deque(maxlen=_STATUSES_KEPT)
        self._end: EndReason | None = None
        self.is_ending = False
        self.ended = unfinished()
        self._waiters: list[Callable[[], object]] = []

    def why_not_paired(self, path: str, wanted: SiteCapture, why_not: WhyNotCaptured) -> str | None:
        """See `SubscriptionSpec.why_not_paired`."""
        return self.spec.why_not_paired(path, wanted, why_not, in_engine=self.engine_pairs)

    def wake_with(self, waiter: Callable[[], object]) -> Callable[[], None]:
        """Call waiter, in any thread, whenever there is something new to read. Return a function that ends that."""
        self._waiters.append(waiter)
        return lambda: self._waiters.remove(waiter)

    @property
    def pids(self) -> frozenset[int] | None:
        """The processes in its scope that have not ended, or None for all processes."""
        return self.processes.remaining if self.spec.scope.pids else None

    @property
    def scope(self) -> Scope:
        """The processes in its scope, as engines take them; None for all processes."""
        return self.processes.scope if self.spec.scope.pids else None

    @property
    def is_over(self) -> bool:
        """Whether every process in its scope has ended."""
        return self.pids == frozenset()

    @property
    def is_read(self) -> bool:
        """Whether a stream is open."""
        return bool(self._waiters)

    def _notify(self) -> None:
        for waiter in list(self._waiters):
            try:
                waiter()
            except Exception:  # noqa: BLE001 - the others are still to be woken
                _log.exception("%s: a stream could not be woken", self.id)

    # the control thread's side

    def site_id(self, found: Object, selected: SelectedSite) -> int:
        """Return the id of a site in this subscription's events, the same for the same site."""
        return self._sites.id_of(found, selected.capture)

    def id_to_arm(self, found: Object, selected: SelectedSite, added_late: str | None = None) -> int:
        """Like site_id, for a site that is about to be armed. Call this from the arming thread.

        added_late: see `SiteIds.id_to_arm`.
        """
        return self._sites.id_to_arm(found, selected.capture, added_late)

    def not_wanted(self, found: Object, selected_sites: Iterable[SelectedSite]) -> None:
        """Sites that were armed were not wanted any more by then, and the client is told nothing of them."""
        for selected in selected_sites:
            self._sites.retire(self._sites.id_of(found, selected.capture), self.log.next_seq)

    def changed(self, statuses: Sequence[SiteStatus]) -> None:
        """Record which sites were armed, disarmed or refused, and tell the stream."""
        next_seq = self.log.next_seq
        for status in statuses:
            if status.state is SiteState.ARMED:
                self._sites.arm(status.site_id)
            elif status.state in {SiteState.DISARMED, SiteState.REFUSED}:
                self._sites.retire(status.site_id, next_seq)
        with self._lock:
            self._statuses += statuses
        self._sites.forget_unused(self.log.first_kept)
        self._notify()

    def end(self, reason: EndReason) -> None:
        """The log has everything that fired, and the account is final but for what is still to be delivered."""
        self._end = reason
        self.ended.set_result(None)
        self._notify()

    # the stream's side

    @property
    def table(self) -> Table | None:
        """The rows of its aggregation, None if it delivers events."""
        return self._aggregator.table if self._aggregator else None

    @property
    def end_reason(self) -> EndReason | None:
        return self._end

    def known_sites(self, site_ids: Iterable[int]) -> dict[int, KnownSite]:
        """Return sites by their ids, without those that were forgotten."""
        return self._sites.known(site_ids)

    def added_late(self) -> dict[str, int]:
        """See `SiteIds.added_late`."""
        return self._sites.added_late()

    def new_statuses(self) -> list[SiteStatus]:
        """Return what changed since the last call."""
        if not self._statuses:
            return []
        with self._lock:
            statuses = list(self._statuses)
            self._statuses.clear()
            return statuses

    def losses(self) -> dict[LossStage, int]:
        """Return how many events were lost so far, by stage."""
        return self.sink.losses()

    def account(self, snapshot: Snapshot | None = None) -> Account:
        """As of now, or of a snapshot that was taken now; see `EventSink.account`."""
        return self.sink.account(self._sites.armed, None if snapshot is None else snapshot.hits)
