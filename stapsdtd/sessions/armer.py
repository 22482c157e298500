"""Has the arming thread arm and disarm objects, and keeps track of their state for each subscription.

Only that thread waits (`Attacher`), so that a slow file or kernel call delays nobody's request. Sites that take long
are reported as ARMING or DISARMING.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from stapsdtd.errors import ObjectGoneError, ObjectPendingError
from stapsdtd.model import Object
from stapsdtd.procs.budgets import user_of
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.futures import once_done, when_done
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.attacher import Attacher, Outcome
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import Excess
from stapsdtd.sessions.lateness import Lateness
from stapsdtd.sessions.live import ConsideredObject, Disarming, FirstArming, LiveSubscription
from stapsdtd.sessions.session import Closed
from stapsdtd.sessions.subscription import SiteState, SiteStatus
from stapsdtd.sessions.targets import ArmRequest

_log = logging.getLogger(__name__)

_MAX_MAPPERS = 8
_ROOT = 0
_CLOSING = -1
"""No user: subscriptions are closed in turn with what is armed for the same client."""

CallSoon = Callable[[Callable[[], None]], object]
Charge = Callable[[int, float], None]


class Armer:
    """Runs in the control thread. late: tells clients what takes long."""

    def __init__(
        self,
        attacher: Attacher,
        thread: FairThread,
        *,
        file_writes: FileWriteWatcher,
        call_soon: CallSoon,
        charge: Charge,
        clock: Callable[[], float],
    ) -> None:
        """thread: the arming thread. call_soon: has the control thread call something; may be called from any thread.
        charge: bills seconds of the arming thread to a user.
        """
        self._attacher = attacher
        self._thread = thread
        self._file_writes = file_writes
        self._call_soon = call_soon
        self._charge = charge
        self._clock = clock
        self.late = Lateness(clock)

    def open(self, live: LiveSubscription, first: FirstArming) -> None:
        """Open a subscription in the engine."""
        first.add()
        opening = self._thread.take_turns(
            Queue(live.subscription.client.name),
            self._attacher.open(live.session),
            "opening a subscription",
            is_whole=True,
        )
        opening.add_done_callback(lambda done: self._call_soon(partial(first.settle, done.exception())))

    def arm(self, live: LiveSubscription, request: ArmRequest, on_gone: Callable[[], None]) -> None:
        """Arm an object for a subscription. on_gone: called if it cannot be opened any more."""
        client, obj = live.subscription.client.name, request.object
        # users take turns, so that one with many objects does not delay another's; of several, the least busy is chosen
        users = {user_of(pid) for pid in itertools.islice(request.mappings, _MAX_MAPPERS)}
        if request.named is not None:
            users.add(request.named.credentials.user)
        # nobody maps the kernel
        user = min(users or {_ROOT}, key=lambda user: (self._thread.waiting(Queue(client, user)), user))
        considered = ConsideredObject(
            obj,
            request.selected_sites,
            request.is_ephemeral,
            user,
            self._clock(),
            is_quiet=request.is_quiet,
            only_in=request.only_in,
        )
        live.add(considered)
        first = live.first if live.first and live.first.is_waiting else None
        if first is not None:
            first.add()
        considered.arming = self._thread.take_turns(
            Queue(client, user),
            self._attacher.arm(live.session, request, considered.since),
            f"arming {obj.path}",
            is_whole=True,
        )
        once_done(
            considered.arming,
            lambda done: self._call_soon(partial(self._on_armed, live, considered, first, on_gone, done)),
        )

    def rearm(self, live: LiveSubscription, request: ArmRequest, on_gone: Callable[[], None]) -> None:
        """Arm an object that is armed in other processes, too, or in fewer. No hit in those that stay is missed."""
        considered = live.pop(request.object.key)
        if not considered.arming.cancel() and considered.outcome is not None:
            self._forget(live, considered)
        self.arm(live, request, on_gone)

    def _on_armed(
        self,
        live: LiveSubscription,
        considered: ConsideredObject,
        first: FirstArming | None,
        on_gone: Callable[[], None],
        done: Future[Outcome],
    ) -> None:
        is_wanted = live.considered.get(considered.object.key) is considered
        error: BaseException | None = None
        if done.cancelled():
            pass
        elif done.exception() is None:
            outcome = considered.outcome = done.result()
            if first is None:
                self._charge(considered.user, outcome.seconds)
            if is_wanted and considered.is_quiet:
                self.reveal_fired(live, considered)
            elif is_wanted:
                live.report(outcome.statuses)
            else:
                self._forget(live, considered)
                live.subscription.not_wanted(considered.object, considered.selected_sites)
        elif is_wanted:
            live.pop(considered.object.key)
            error = self._on_error(live, considered, on_gone, done.exception())
        if first is not None:
            first.settle(error)
        if error is not None and (first is None or live.first is None):
            # nobody else reports it
            subscription = live.subscription
            what = "subscription %s: cannot arm %s"
            extra = fields(client=subscription.client.name)
            _log.error(what, subscription.id, considered.object.path, exc_info=error, extra=extra)

    def _on_error(
        self,
        live: LiveSubscription,
        considered: ConsideredObject,
        on_gone: Callable[[], None],
        error: BaseException | None,
    ) -> BaseException | None:
        """Return the error, or None if the object is merely gone or cannot be opened yet."""
        obj = considered.object
        if isinstance(error, ObjectPendingError):
            live.pending[obj.key] = considered
            self.late.report_arming(live, considered)
            return None
        if isinstance(error, ObjectGoneError):
            _log.debug("%s", error)
            on_gone()
        if considered.is_late:
            if again := live.considered.get(obj.key):
                again.is_late = True
            else:
                state = SiteState.DISARMED if isinstance(error, ObjectGoneError) else SiteState.REFUSED
                reason = "" if state is SiteState.DISARMED else str(error)
                live.report_all(state, obj, considered.selected_sites, reason)
        return None if isinstance(error, ObjectGoneError) else error

    def reveal(self, live: LiveSubscription, considered: ConsideredObject) -> None:
        """Report an object of which the client knew nothing."""
        considered.is_quiet = False
        if considered.outcome is not None:
            live.report(considered.outcome.statuses)

    def reveal_fired(self, live: LiveSubscription, considered: ConsideredObject) -> None:
        """Report an object of which the client knew nothing if a process that it may trace has fired a probe there."""
        if considered.is_quiet and live.subscription.has_fired(considered.object, considered.selected_sites):
            self.reveal(live, considered)

    def renew(self, live: LiveSubscription, pid: int) -> None:
        """Keep armed what is armed in a process in the subscription's scope that has another main thread, or none."""
        queue = Queue(live.subscription.client.name, user_of(pid))
        self._thread.submit(queue, partial(self._attacher.renew, pid), f"arming process {pid} by another thread")

    def disarm(
        self,
        live: LiveSubscription,
        obj: Object,
        *,
        is_awaited: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Disarm an object's sites and report them as DISARMED.

        is_awaited: report only once nothing is patched any more. then: called after that report.
        """
        considered = live.pop(obj.key)
        if considered.is_quiet:
            live.subscription.not_wanted(considered.object, considered.armed)
        statuses = considered.disarmed(live.subscription)
        self._disarm(live, considered, statuses, is_awaited=is_awaited, then=then)

    def bar(self, live: LiveSubscription, excess: Excess) -> None:
        """Disarm an object whose probes cost other users too much, and report them as REFUSED."""
        considered = live.pop(excess.key)
        sites = considered.selected_sites if considered.outcome is None else considered.armed
        if considered.is_quiet:
            live.subscription.not_wanted(considered.object, considered.armed)
            sites = ()
        statuses = live.subscription.statuses(SiteState.REFUSED, considered.object, sites, excess.why_refused)
        self._disarm(live, considered, statuses)

    def _disarm(
        self,
        live: LiveSubscription,
        considered: ConsideredObject,
        statuses: list[SiteStatus],
        *,
        is_awaited: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        disarming = Disarming(considered.object, self._clock(), statuses)
        live.disarming.add(disarming)

        def finish() -> None:
            live.disarming.discard(disarming)
            again = live.considered.get(considered.object.key)
            if again is None or again.outcome is None:
                live.report(statuses)
            then()

        if considered.arming.cancel():
            finish()
            return
        if considered.outcome is not None:
            self._forget(live, considered)
        work = partial(self._attacher.disarm, live.session, considered.object, is_awaited=is_awaited)
        # nothing is to be armed before: the object itself has been by now, or never will be
        disarmed = self._thread.submit(None, work, f"disarming {considered.object.path}")
        when_done(disarmed, partial(self._call_soon, finish))

    def close(self, live: LiveSubscription, unmapped: Sequence[Object]) -> Future[Closed]:
        """Disarm everything that only this subscription used, and close it in the engine. unmapped: not waited for."""
        for key in list(live.considered):
            considered = live.pop(key)
            if not considered.arming.cancel() and considered.outcome is not None:
                self._forget(live, considered)
        self._thread.submit(None, live.session.end, "ending a subscription")
        queue = Queue(live.subscription.client.name, _CLOSING)
        return self._thread.take_turns(
            queue, self._attacher.close(live.session, unmapped), "closing a subscription", is_whole=True
        )

    def _forget(self, live: LiveSubscription, considered: ConsideredObject) -> None:
        """Release the object's file watch and quota, though its sites may stay armed for a moment."""
        self._file_writes.disarmed(considered.object.key)
        live.subscription.client.free_sites(len(considered.armed))
