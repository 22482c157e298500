"""Decides what of which object is armed for a subscription, and keeps track of what has become of it.

Decisions are the control thread's. What they lead to is done in the arming thread, by `Attacher`, so that a file or a
kernel call that takes long holds up nobody's request: what is late is told as ARMING or DISARMING.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from stapsdtd import model
from stapsdtd.catalog.registry import Registry
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.errors import ObjectGoneError, ObjectPendingError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.ownership import belonging
from stapsdtd.model import Object, Site
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.objects import is_host_file, leads_to, was_written_to
from stapsdtd.runtime.fair_thread import FairThread
from stapsdtd.runtime.futures import when_done
from stapsdtd.sessions.attacher import ArmRequest, Attacher, Closed, Outcome
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import Excess, ForeignBounds
from stapsdtd.sessions.held import ConsideredObject, Disarming, FirstArming, Held, Queue
from stapsdtd.sessions.matcher import is_mapped_in_scope, selected_sites
from stapsdtd.sessions.subscription import SiteState, SiteStatus

_log = logging.getLogger(__name__)

_DOUBT_SECONDS = 1.0
_LATE_SECONDS = 1.0

CallSoon = Callable[[Callable[[], None]], object]
Charge = Callable[[int, float], None]


class Armer:
    """Runs in the control thread."""

    def __init__(
        self,
        registry: Registry,
        attacher: Attacher,
        thread: FairThread,
        *,
        filesystems: Filesystems,
        file_writes: FileWriteWatcher,
        foreign: ForeignBounds,
        call_soon: CallSoon,
        charge: Charge,
        clock: Callable[[], float],
    ) -> None:
        """thread: the attacher's. call_soon: in the control thread; may be called in any. charge: counts seconds that
        a user's processes cost.
        """
        self._registry = registry
        self._attacher = attacher
        self._thread = thread
        self._filesystems = filesystems
        self._file_writes = file_writes
        self._foreign = foreign
        self._call_soon = call_soon
        self._charge = charge
        self._clock = clock

    def open(self, held: Held, first: FirstArming) -> None:
        """Begin a subscription in the engine."""
        first.add()
        opened = self._thread.submit(
            Queue(held.subscription.client.name), partial(self._attacher.open, held.session), "beginning a subscription"
        )
        opened.add_done_callback(lambda done: self._call_soon(partial(first.settle, done.exception())))

    def consider(self, held: Held, found: Object) -> None:
        """Bring a subscription in step with the processes that map an object."""
        pending = held.pending.pop(found.key, None)
        self._consider(held, found)
        if pending is not None:
            if considered := held.considered.get(found.key):
                considered.is_late = True
            else:
                held.tell([held.status(SiteState.DISARMED, found, each) for each in pending.selected_sites])

    def _consider(self, held: Held, found: Object) -> None:
        subscription = held.subscription
        mappings: Mapping[int, model.Mapping] = self._registry.mappings(found.key)
        if found.key in held.considered:
            known = held.considered[found.key].selected_sites
            if is_mapped_in_scope(subscription, known, mappings):
                held.doubtful.pop(found.key, None)
            elif self._is_gone(held, found):
                self.disarm(held, found, is_awaited=was_written_to(found, self._filesystems))
            return
        selected = selected_sites(subscription.spec, found, mappings)
        if not selected or not is_mapped_in_scope(subscription, selected, mappings):
            return
        earlier = held.version_of(found.key)
        if earlier is not None:
            self.disarm(held, earlier.object, is_awaited=True)
        owners = subscription.spec.owners
        if owners is not None:
            # other users may have it elsewhere, which is not this one's business
            own = belonging(mappings, owners)
            mappings = {pid: mapping for pid, mapping in mappings.items() if pid in own}
            found = replace(found, path=next((mapping.path for mapping in mappings.values()), found.path))
            selected = selected_sites(subscription.spec, found, mappings)
        if not selected:
            return
        if reason := self._foreign.why_not(subscription.client.name, found.key):
            if found.key not in held.barred:
                held.barred[found.key] = found
                held.tell([held.status(SiteState.REFUSED, found, each, reason) for each in selected])
            return
        # one user's objects take turns with the others', so that many of them delay none of those
        queue = (
            Queue(held.subscription.client.name, user_of(next(iter(mappings)))) if earlier is None else earlier.queue
        )
        self._arm(held, found, selected, mappings, queue)

    def _is_gone(self, held: Held, found: Object) -> bool:
        """Report whether no later process can map it. Where the kernel cannot tell, it counts only some looks later."""
        leads = leads_to(found, self._filesystems)
        if leads is not None or held.considered[found.key].is_ephemeral:
            held.doubtful.pop(found.key, None)
            return not leads
        return self._clock() - held.doubtful.setdefault(found.key, self._clock()) >= _DOUBT_SECONDS

    def _arm(
        self,
        held: Held,
        found: Object,
        selected: tuple[SelectedSite, ...],
        mappings: Mapping[int, model.Mapping],
        queue: Queue,
    ) -> None:
        is_ephemeral = not self.is_host_file(found)
        considered = ConsideredObject(found, selected, is_ephemeral, queue, self._clock())
        held.add(considered)
        first = held.first
        if first is not None:
            first.add()
        request = ArmRequest(found, selected, mappings, is_ephemeral)
        considered.arming = self._thread.submit(
            queue, partial(self._attacher.arm, held.session, request), f"arming {found.path}"
        )
        considered.arming.add_done_callback(
            lambda done: self._call_soon(partial(self._on_armed, held, considered, first, done))
        )

    def _on_armed(
        self, held: Held, considered: ConsideredObject, first: FirstArming | None, done: Future[Outcome]
    ) -> None:
        error: BaseException | None = None
        if not done.cancelled():
            is_wanted = held.considered.get(considered.object.key) is considered
            error = done.exception()
            if error is not None:
                if is_wanted:
                    held.pop(considered.object.key)
                error = self._on_error(held, considered, error, is_wanted=is_wanted)
            else:
                outcome = done.result()
                if first is None and considered.queue.user is not None:
                    self._charge(considered.queue.user, outcome.seconds)
                considered.outcome = outcome
                if is_wanted:
                    held.tell(_statuses(held, considered, outcome.reasons))
                else:
                    self._forget(held, considered)
        if first is not None:
            first.settle(error)
        elif isinstance(error, OSError):
            _log.warning("%s: %s could not be armed: %s", held.subscription.id, considered.object.path, error)
        elif error is not None:
            _log.error("%s: %s could not be armed", held.subscription.id, considered.object.path, exc_info=error)

    def _on_error(
        self, held: Held, considered: ConsideredObject, error: BaseException, *, is_wanted: bool
    ) -> BaseException | None:
        """Return the error, unless it says no more than that the object cannot be had."""
        found = considered.object
        if isinstance(error, ObjectPendingError):
            if is_wanted:
                held.pending[found.key] = considered
                self._tell_late(held, considered)
            return None
        if isinstance(error, ObjectGoneError):
            _log.debug("%s", error)
            return None
        return error

    def is_host_file(self, found: Object) -> bool:
        return is_host_file(found, self._filesystems)

    def disarm(
        self, held: Held, found: Object, *, is_awaited: bool = False, then: Callable[[], None] = lambda: None
    ) -> None:
        """is_awaited: the subscription is told only when nothing is patched any more. then: called when it was told."""
        considered = held.pop(found.key)
        statuses = [held.status(SiteState.DISARMED, considered.object, each) for each in considered.told_sites]
        self._disarm(held, considered, statuses, is_awaited=is_awaited, then=then)

    def bar(self, held: Held, excess: Excess) -> None:
        """Disarm an object whose probes cost others too much, and say why."""
        considered = held.pop(excess.key)
        held.barred[excess.key] = considered.object
        statuses = [
            held.status(SiteState.REFUSED, considered.object, each, excess.reason) for each in considered.told_sites
        ]
        self._disarm(held, considered, statuses)

    def _disarm(
        self,
        held: Held,
        considered: ConsideredObject,
        statuses: list[SiteStatus],
        *,
        is_awaited: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        disarming = Disarming(considered.object, self._clock(), statuses)
        held.disarming.add(disarming)

        def finish() -> None:
            held.disarming.discard(disarming)
            held.tell(statuses)
            then()

        if considered.arming.cancel():
            finish()
            return
        if considered.outcome is not None:
            self._forget(held, considered)
        work = partial(self._attacher.disarm, held.session, considered.object, is_awaited=is_awaited)
        disarmed = self._thread.submit(considered.queue, work, f"disarming {considered.object.path}")
        when_done(disarmed, partial(self._call_soon, finish))

    def close(self, held: Held) -> Future[Closed]:
        """Disarm everything that only this subscription used, and end it in the engine."""
        for key in list(held.considered):
            considered = held.pop(key)
            if not considered.arming.cancel() and considered.outcome is not None:
                self._forget(held, considered)
        return self._thread.submit(
            Queue(held.subscription.client.name),
            partial(self._attacher.close, held.session),
            "ending a subscription",
        )

    def _forget(self, held: Held, considered: ConsideredObject) -> None:
        """What is not wanted any more counts no more, though it may be armed for a moment yet."""
        self._file_writes.disarmed(considered.object.key)
        held.subscription.client.free_sites(len(considered.armed))

    def tell_late(self, held: Held, seconds: float = _LATE_SECONDS) -> None:
        """Tell what has been arming or disarming for so long, each once."""
        before = self._clock() - seconds
        for considered in held.considered.values():
            if considered.outcome is None and considered.since <= before:
                self._tell_late(held, considered)
        for disarming in held.disarming:
            if not disarming.is_late and disarming.since <= before:
                disarming.is_late = True
                held.tell([replace(status, state=SiteState.DISARMING, reason="") for status in disarming.statuses])

    def _tell_late(self, held: Held, considered: ConsideredObject) -> None:
        if not considered.is_late:
            considered.is_late = True
            sites = considered.selected_sites
            held.tell([held.status(SiteState.ARMING, considered.object, each) for each in sites])

    def arming_of(self, held: Held) -> list[Future[Outcome]]:
        """Return what is being armed, and is not late."""
        after = self._clock() - _LATE_SECONDS
        return [
            considered.arming
            for considered in held.considered.values()
            if considered.outcome is None and considered.since > after
        ]

    def consider_pending(self, held: Held) -> None:
        """Try again what could not be opened."""
        for considered in list(held.pending.values()):
            self.consider(held, considered.object)


def _statuses(held: Held, considered: ConsideredObject, reasons: Mapping[Site, str]) -> list[SiteStatus]:
    return [
        held.status(SiteState.REFUSED, considered.object, each, reason)
        if (reason := reasons.get(each.capture.site))
        else held.status(SiteState.ARMED, considered.object, each)
        for each in considered.selected_sites
    ]
