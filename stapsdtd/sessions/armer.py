"""Arms objects' sites for subscriptions, and disarms them: as far as engine, role and host allow."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from stapsdtd import model
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.registry import Registry
from stapsdtd.catalog.selectors import SelectedSite, missing_argument
from stapsdtd.errors import ObjectForeignError, ObjectGoneError, TracefsRejectedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.kernel.ownership import belonging
from stapsdtd.model import Object, Site
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.objects import Parse, is_host_file, leads_to, open_object, was_written_to
from stapsdtd.query.actions import Emit
from stapsdtd.runtime.latency import Latency
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import Excess, ForeignBounds
from stapsdtd.sessions.held import ConsideredObject, Held
from stapsdtd.sessions.instructions import why_not_armed
from stapsdtd.sessions.matcher import is_mapped_in_scope, selected_sites, wanted_pids
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import SiteState, Subscription

_log = logging.getLogger(__name__)

_DOUBT_SECONDS = 1.0

CallSoon = Callable[[Callable[[], None]], object]


class Armer:
    """Called from the control thread. arming: how long it takes to arm an object's sites; for any thread."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        parse: Parse,
        *,
        nops: NopRewriting,
        filesystems: Filesystems,
        file_writes: FileWriteWatcher,
        foreign: ForeignBounds,
        call_soon: CallSoon,
        clock: Callable[[], float],
    ) -> None:
        """nops: what the kernel does to some instructions, which are not armed. call_soon: in the control thread."""
        self._registry = registry
        self._engine = engine
        self._parse = parse
        self._nops = nops
        self._filesystems = filesystems
        self._file_writes = file_writes
        self._foreign = foreign
        self._call_soon = call_soon
        self._clock = clock
        self.arming = Latency()

    def consider(self, held: Held, found: Object) -> None:
        """Bring a subscription in step with the processes that map an object. Raises OSError."""
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
        if earlier := held.version_of(found.key):
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
                subscription.changed([held.status(SiteState.REFUSED, found, each, reason) for each in selected])
            return
        with contextlib.suppress(ObjectGoneError):
            is_ephemeral = not self.is_host_file(found)
            reasons = self._armed(held, found, selected, mappings, is_ephemeral=is_ephemeral)
            self._tell(held, found, selected, reasons, is_ephemeral=is_ephemeral)

    def _is_gone(self, held: Held, found: Object) -> bool:
        """Report whether no later process can map it. Where the kernel cannot tell, it counts only some looks later."""
        leads = leads_to(found, self._filesystems)
        if leads is not None or held.considered[found.key].is_ephemeral:
            held.doubtful.pop(found.key, None)
            return not leads
        return self._clock() - held.doubtful.setdefault(found.key, self._clock()) >= _DOUBT_SECONDS

    def _tell(
        self,
        held: Held,
        found: Object,
        selected: Sequence[SelectedSite],
        reasons: Mapping[Site, str],
        *,
        is_ephemeral: bool,
    ) -> None:
        armed = tuple(each for each in selected if each.capture.site not in reasons)
        held.add(ConsideredObject(found, tuple(selected), armed, is_ephemeral))
        held.subscription.changed(
            [
                held.status(SiteState.REFUSED, found, each, reason)
                if (reason := reasons.get(each.capture.site))
                else held.status(SiteState.ARMED, found, each)
                for each in selected
            ]
        )

    def _armed(
        self,
        held: Held,
        found: Object,
        selected: Sequence[SelectedSite],
        mappings: Mapping[int, model.Mapping],
        *,
        is_ephemeral: bool,
    ) -> dict[Site, str]:
        """Arm what may be armed. Return why the others were refused. Raises ObjectGoneError, OSError."""
        with contextlib.ExitStack() as opened:
            try:
                descriptor = open_object(found, mappings.items(), self._parse, self._filesystems)
            except ObjectForeignError as error:
                self._file_writes.armed(found.key, None)
                return {each.capture.site: error.reason for each in selected}
            except ObjectGoneError as error:
                _log.debug("%s", error)
                raise
            opened.callback(os.close, descriptor)
            path = f"/proc/self/fd/{descriptor}"
            reasons = {
                each.capture.site: reason for each in selected if (reason := self._why_refused(descriptor, found, each))
            }
            fitting = [each for each in selected if each.capture.site not in reasons]
            principal = held.subscription.client
            left = len(fitting) if principal.sites_left is None else principal.sites_left
            most = principal.quotas.max_sites
            reasons |= {each.capture.site: f"your role allows {most} sites at once" for each in fitting[left:]}
            if fitting[:left]:
                reasons |= self._engine_refusals(held, found, path, fitting[:left], is_ephemeral=is_ephemeral)
            self._file_writes.armed(found.key, path)
        return reasons

    def _why_refused(self, descriptor: int, found: Object, selected: SelectedSite) -> str | None:
        """Return why no engine is to arm a site of the file that is open there; None where one may."""
        architecture = found.parsed.architecture
        return (
            why_foreign(architecture)
            or missing_argument(selected.capture)
            or why_not_armed(descriptor, architecture, selected.capture.site, self._nops)
        )

    def _engine_refusals(
        self, held: Held, found: Object, file_path: str, selected: Sequence[SelectedSite], *, is_ephemeral: bool
    ) -> dict[Site, str]:
        """Arm sites. Return why which were refused: all of them where the object is more than the engine can take."""
        subscription = held.subscription
        scope, pids = subscription.spec.scope, self._registry.mappings(found.key).keys()
        target = Target(
            found,
            file_path,
            tuple(
                TargetSite(
                    each.capture.site,
                    subscription.site_id(found, each),
                    Emit(each.capture.captures),
                    wanted_pids(scope, each),
                )
                for each in selected
            ),
            subscription.spec.predicate,
            exclude_pids=subscription.excluded & pids,
            exclude_later=subscription.excluded - pids,
            is_ephemeral=is_ephemeral,
            owners=subscription.spec.owners,
            owner=_bringer(pids) if is_ephemeral else "",
        )
        try:
            with self.arming.measured():
                refusals = self._engine.arm(subscription.subscription_key, target)
            return {refusal.site: refusal.reason for refusal in refusals}
        except (TracefsRejectedError, OSError) as error:
            _log.warning("%s could not be armed: %s", found.path, error)
            self._release(subscription, found)
            return {each.capture.site: str(error) for each in selected}

    def is_host_file(self, found: Object) -> bool:
        return is_host_file(found, self._filesystems)

    def disarm(self, held: Held, found: Object, *, is_awaited: bool = False) -> None:
        """is_awaited: the subscription is told only when nothing is patched any more."""
        considered, subscription = held.pop(found.key), held.subscription
        self._file_writes.disarmed(found.key)
        statuses = [held.status(SiteState.DISARMED, considered.object, each) for each in considered.armed]
        self._release(subscription, found, is_awaited=is_awaited)
        if is_awaited:
            self.when_quiesced(subscription.client, lambda: subscription.changed(statuses))
        else:
            subscription.changed(statuses)

    def bar(self, held: Held, excess: Excess) -> None:
        """Disarm an object whose probes cost others too much, and say why."""
        considered, subscription = held.pop(excess.key), held.subscription
        held.barred[excess.key] = considered.object
        self._file_writes.disarmed(excess.key)
        self._release(subscription, considered.object)
        subscription.changed(
            [held.status(SiteState.REFUSED, considered.object, each, excess.reason) for each in considered.armed]
        )

    def forget(self, held: Held) -> None:
        """Its subscription is being closed, which disarms everything."""
        for key in list(held.considered):
            held.pop(key)
            self._file_writes.disarmed(key)

    def quiesced(self, principal: Principal) -> Future[None]:
        """Return a future that is done when all that was disarmed so far for a client is out of the processes."""
        return self._engine.quiesced(owner_of(principal))

    def when_quiesced(self, principal: Principal, work: Callable[[], None]) -> None:
        """Do work in the control thread then."""
        self.quiesced(principal).add_done_callback(lambda _: self._call_soon(work))

    def _release(self, subscription: Subscription, found: Object, *, is_awaited: bool = False) -> None:
        try:
            self._engine.disarm(subscription.subscription_key, found, is_awaited=is_awaited)
        except (TracefsRejectedError, OSError):
            _log.exception("%s could not be disarmed", found.path)


def owner_of(principal: Principal) -> str:
    """Return on whose behalf the engine works for a client."""
    return f"subscriptions of {principal.name}"


def _bringer(pids: Iterable[int]) -> str:
    """Name the user whose process brought an object."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
