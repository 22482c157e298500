"""One client's subscription: its clauses, and what they have in common."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from weakref import WeakMethod

import msgspec

from stapsdtd.capture.engine import Scope, SubscriptionKey
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, Site
from stapsdtd.runtime.futures import unfinished
from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.evaluating import Evaluating
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.scoped_processes import ScopedProcesses
from stapsdtd.sessions.sink import Account, EventFilter
from stapsdtd.sessions.site_ids import SiteIds, WhyNot
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.spans.span import NO_OPEN_SPANS, OpenSpans

_log = logging.getLogger(__name__)

_STATUSES_KEPT = 10_000


class SiteState(Enum):
    """ARMING and DISARMING are reported only for what takes long."""

    ARMING = "still arming"
    ARMED = "armed"
    DISARMING = "still disarming"
    DISARMED = "disarmed"
    REFUSED = "refused"


_NOT_ARMED = frozenset({SiteState.DISARMED, SiteState.REFUSED})


class SiteStatus(msgspec.Struct, frozen=True, gc=False):
    """A change of a site's state. reason is empty unless REFUSED. armed_after_ns: if ARMED, since it was noticed.
    clause: its position in the subscription.
    """

    state: SiteState
    site_id: int
    object: Object
    site: Site
    reason: str = ""
    armed_after_ns: int = 0
    clause: int = 0


class EndReason(Enum):
    UNSUBSCRIBED = "unsubscribed"
    SERVER_STOPPING = "server stopping"
    LEASE_EXPIRED = "lease expired"
    ACCESS_REVOKED = "access revoked"
    PROCESSES_ENDED = "processes ended"


class Subscription:
    """Shared by three threads: the control thread arms, the engine's reader delivers to the clauses' sinks, the API's
    streams read what these keep.
    """

    def __init__(  # noqa: PLR0917 - what it is made of
        self,
        ident: str,
        keys: Iterator[SubscriptionKey],
        spec: SubscriptionSpec,
        own_pid: int,
        why_not: WhyNot,
        client: Principal | None = None,
        clients: ConnectedClients | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        engine_pairs: Callable[[ClauseSpec], bool] = lambda _: False,
        open_in_engine: Callable[[SubscriptionKey], OpenSpans] = lambda _: NO_OPEN_SPANS,
        evaluating: Evaluating | None = None,
        wall_clock: WallClock | None = None,
    ) -> None:
        """keys: has one for each clause. why_not: the engine's. clients: whose events are left out unless the spec says
        otherwise. engine_pairs: tells whether the engine delivers the pairs of a clause. open_in_engine, evaluating:
        see `Clause`. wall_clock: which tells when events happened; None for one of its own.

        is_ending: it is being disarmed, or was. ended: done when `end` was called.
        """
        self.client = client or Principal()
        self.id = ident
        self.spec = spec
        self.wall_clock = wall_clock or WallClock()
        self.created_monotonic_ns = time.monotonic_ns()
        self.created_ns = self.wall_clock.time_ns(self.created_monotonic_ns)
        self.excluded = frozenset(spec.scope.exclude_pids) | {own_pid}
        self.processes = ScopedProcesses(spec.scope.pids, spec.children)
        site_ids = itertools.count(1)
        # who has a subscription has its clauses: no cycle, which only a garbage collection would dispose of
        notify = WeakMethod(self._notify)
        self.clauses = tuple(
            Clause(
                f"{ident} {clause.tag}".rstrip(),
                key,
                clause,
                SiteIds(why_not, clock, ids=site_ids, fields=clause.fields),
                self.client,
                filters=self._filters(clause, clients),
                notify=lambda: _call(notify),
                queue_bytes=spec.queue_bytes // len(spec.clauses),
                engine_pairs=engine_pairs(clause),
                open_in_engine=partial(open_in_engine, key),
                evaluating=evaluating,
            )
            # as many keys as there are clauses
            for clause, key in zip(spec.clauses, keys, strict=False)
        )
        self._lock = threading.Lock()
        self._statuses: deque[SiteStatus] = deque(maxlen=_STATUSES_KEPT)
        self._end: EndReason | None = None
        self.is_ending = False
        self.ended = unfinished()
        self._waiters: list[Callable[[], object]] = []

    def _filters(self, clause: ClauseSpec, clients: ConnectedClients | None) -> list[EventFilter]:
        """Return what leaves out events that the scope does not allow."""
        # nobody is made to fire by what hits add up to
        client_filter = None if clients is None or clause.aggregation else self.spec.filter_of(clients)
        filters: list[EventFilter] = [client_filter] if client_filter else []
        if self.spec.scope.pids and not self.spec.scope.follow:
            filters.append(self.processes)
        return filters

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
                _log.exception("%s: a stream could not be woken", self.id, extra=fields(client=self.client.name))

    # the control thread's side

    def site_id(self, found: Object, selected: SelectedSite) -> int:
        """Return the id of a site in this subscription's events, the same for the same site and clause."""
        return self.clauses[selected.clause].sites.id_of(found, selected.capture)

    def status(
        self, state: SiteState, found: Object, selected: SelectedSite, reason: str = "", armed_after_ns: int = 0
    ) -> SiteStatus:
        """Any thread may call this."""
        site_id = self.site_id(found, selected)
        return SiteStatus(state, site_id, found, selected.capture.site, reason, armed_after_ns, selected.clause)

    def statuses(
        self, state: SiteState, found: Object, selected: Iterable[SelectedSite], reason: str = ""
    ) -> list[SiteStatus]:
        return [self.status(state, found, each, reason) for each in selected]

    def not_wanted(self, found: Object, selected_sites: Iterable[SelectedSite]) -> None:
        """Sites that were armed were not wanted any more by then, and the client is told nothing of them."""
        for selected in selected_sites:
            self.clauses[selected.clause].retired([self.site_id(found, selected)])

    def has_fired(self, found: Object, selected_sites: Iterable[SelectedSite]) -> bool:
        """Report whether any of some sites fired in a process that the client may trace, though it knows none yet."""
        fired = [clause.sites.hit_untold() for clause in self.clauses]
        return any(self.site_id(found, selected) in fired[selected.clause] for selected in selected_sites)

    def changed(self, statuses: Sequence[SiteStatus]) -> None:
        """Record which sites were armed, disarmed or refused, and tell the stream."""
        armed: defaultdict[int, list[int]] = defaultdict(list)
        retired: defaultdict[int, list[int]] = defaultdict(list)
        for status in statuses:
            if status.state is SiteState.ARMED:
                armed[status.clause].append(status.site_id)
            elif status.state in _NOT_ARMED:
                retired[status.clause].append(status.site_id)
        for position, site_ids in armed.items():
            self.clauses[position].armed(site_ids)
        for position, site_ids in retired.items():
            self.clauses[position].retired(site_ids)
        with self._lock:
            self._statuses += statuses
        for clause in self.clauses:
            clause.forget_unused_sites()
        self._notify()

    def end(self, reason: EndReason) -> None:
        """The logs have everything that fired, and the account is final but for what is still to be delivered.

        Spans are settled, see `settled_spans`.
        """
        if fired := self._fired_untold():
            self.changed(fired)
        self._end = reason
        self.ended.set_result(None)
        self._notify()

    def _fired_untold(self) -> list[SiteStatus]:
        """Return that sites are armed of which the client learns by their hits alone: the program that fired was over
        before anybody saw that it maps them.
        """
        return [
            SiteStatus(SiteState.ARMED, site_id, known.object, known.capture.site, clause=position)
            for position, clause in enumerate(self.clauses)
            for site_id, known in clause.known_sites(sorted(clause.sites.hit_untold())).items()
        ]

    # the stream's side

    @property
    def end_reason(self) -> EndReason | None:
        return self._end

    def new_statuses(self) -> list[SiteStatus]:
        """Return what changed since the last call."""
        if not self._statuses:
            return []
        with self._lock:
            statuses = list(self._statuses)
            self._statuses.clear()
            return statuses

    def account(self) -> Account:
        """Return the sum of the clauses' accounts, as of now."""
        return sum((clause.account() for clause in self.clauses), Account())


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object is gone."""
    if (found := method()) is not None:
        found()
