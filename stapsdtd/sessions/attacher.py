"""Opens objects' files and has the engine arm and disarm their sites: whatever may block on a file or in the kernel.

control thread                    arming thread
Armer: what is to be armed  ──►   Attacher: open the file, look at each instruction, Engine.arm
                            ◄──   Outcome: which sites were refused, and why
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from stapsdtd import model
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.selectors import SelectedSite, missing_argument
from stapsdtd.errors import ObjectForeignError, StapsdtdError, TracefsRejectedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, Site
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.objects import Parse, open_object
from stapsdtd.query.actions import Emit
from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.latency import Latency
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.instructions import why_not_armed
from stapsdtd.sessions.matcher import wanted_pids
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import Subscription

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """A subscription as the engine has it. error: why the engine could not begin it."""

    subscription: Subscription
    is_open: bool = False
    is_closed: bool = False
    error: StapsdtdError | OSError | None = None


@dataclass(frozen=True, slots=True)
class ArmRequest:
    """mappings: by pid of the processes that map the object."""

    object: Object
    selected_sites: Sequence[SelectedSite]
    mappings: Mapping[int, model.Mapping]
    is_ephemeral: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """reasons: of the sites that were refused; the others are armed. seconds: how long it took."""

    reasons: Mapping[Site, str]
    armed_sites: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Closed:
    """delivered: done when the subscription has all that fired. quiesced: when nothing is patched for it any more."""

    delivered: Future[None]
    quiesced: Future[None]


class Attacher:
    """Used by one thread, the arming thread. latency: of arming an object's sites; any thread may read it."""

    def __init__(
        self,
        engine: Engine,
        parse: Parse,
        *,
        nops: NopRewriting,
        filesystems: Filesystems,
        file_writes: FileWriteWatcher,
    ) -> None:
        """nops: what the kernel does to some instructions, which are not armed."""
        self._engine = engine
        self._parse = parse
        self._nops = nops
        self._filesystems = filesystems
        self._file_writes = file_writes
        self.latency = Latency()

    def open(self, session: Session) -> None:
        """Begin a subscription in the engine, unless that was done. Raises StapsdtdError and OSError if it cannot."""
        if session.error is not None:
            raise session.error
        if session.is_open:
            return
        subscription = session.subscription
        try:
            self._engine.open(
                subscription.subscription_key,
                subscription,
                subscription.spec.kernel_buffer_kib,
                owner_of(subscription.client),
            )
        except (StapsdtdError, OSError) as error:
            _log.warning("subscription %s could not begin: %s", subscription.id, error)
            session.error = error
            raise
        session.is_open = True

    def arm(self, session: Session, request: ArmRequest) -> Outcome:
        """Arm what may be armed.

        Raises ObjectGoneError, ObjectPendingError where the file cannot be opened yet, and OSError.
        """
        begin = time.monotonic()
        selected, reasons = request.selected_sites, dict[Site, str]()
        if not session.is_closed:
            try:
                self.open(session)
            except (StapsdtdError, OSError) as error:
                # Subscribe is told of it, unless that took so long that it has returned
                reasons = {each.capture.site: str(error) for each in selected}
                self._file_writes.armed(request.object.key, None)
            else:
                reasons = self._reasons(session.subscription, request)
        armed_sites = sum(each.capture.site not in reasons for each in selected)
        return Outcome(reasons, armed_sites, time.monotonic() - begin)

    def _reasons(self, subscription: Subscription, request: ArmRequest) -> dict[Site, str]:
        """Arm what may be armed. Return why the others were refused."""
        found, selected = request.object, request.selected_sites
        with contextlib.ExitStack() as opened:
            try:
                descriptor = open_object(found, request.mappings.items(), self._parse, self._filesystems)
            except ObjectForeignError as error:
                self._file_writes.armed(found.key, None)
                return {each.capture.site: error.reason for each in selected}
            opened.callback(os.close, descriptor)
            path = f"/proc/self/fd/{descriptor}"
            reasons = {
                each.capture.site: reason for each in selected if (reason := self._why_refused(descriptor, found, each))
            }
            fitting = [each for each in selected if each.capture.site not in reasons]
            principal = subscription.client
            granted = principal.take_sites(len(fitting))
            most = principal.quotas.max_sites
            reasons |= {each.capture.site: f"your role allows {most} sites at once" for each in fitting[granted:]}
            if granted:
                refusals = self._engine_refusals(subscription, request, path, fitting[:granted])
                principal.free_sites(len(refusals))
                reasons |= refusals
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
        self, subscription: Subscription, request: ArmRequest, file_path: str, selected: Sequence[SelectedSite]
    ) -> dict[Site, str]:
        """Arm sites. Return why which were refused: all of them where the object is more than the engine can take."""
        found, pids = request.object, request.mappings.keys()
        spec = subscription.spec
        target = Target(
            found,
            file_path,
            tuple(
                TargetSite(
                    each.capture.site,
                    subscription.site_id(found, each),
                    Emit(each.capture.captures),
                    wanted_pids(spec.scope, each),
                )
                for each in selected
            ),
            spec.predicate,
            exclude_pids=subscription.excluded & pids,
            exclude_later=subscription.excluded - pids,
            is_ephemeral=request.is_ephemeral,
            owners=spec.owners,
            owner=_bringer(pids) if request.is_ephemeral else "",
        )
        try:
            with self.latency.measured():
                refusals = self._engine.arm(subscription.subscription_key, target)
            return {refusal.site: refusal.reason for refusal in refusals}
        except (TracefsRejectedError, OSError) as error:
            _log.warning("%s could not be armed: %s", found.path, error)
            self._release(subscription, found, is_awaited=False)
            return {each.capture.site: str(error) for each in selected}

    def disarm(self, session: Session, found: Object, *, is_awaited: bool) -> Future[None]:
        """Disarm an object. Return a future that is done when that is so far that the client may be told.

        is_awaited: it is told only when nothing is patched any more.
        """
        if not session.is_open or session.is_closed:
            return finished()
        self._release(session.subscription, found, is_awaited=is_awaited)
        return self._engine.quiesced(owner_of(session.subscription.client)) if is_awaited else finished()

    def _release(self, subscription: Subscription, found: Object, *, is_awaited: bool) -> None:
        try:
            self._engine.disarm(subscription.subscription_key, found, is_awaited=is_awaited)
        except (TracefsRejectedError, OSError):
            _log.exception("%s could not be disarmed", found.path)

    def close(self, session: Session) -> Closed:
        """End a subscription in the engine. Whatever is still to be armed for it will not be."""
        session.is_closed = True
        if not session.is_open:
            return Closed(finished(), finished())
        delivered = self._engine.close(session.subscription.subscription_key)
        return Closed(delivered, self._engine.quiesced(owner_of(session.subscription.client)))


def owner_of(principal: Principal) -> str:
    """Return on whose behalf the engine works for a client."""
    return f"subscriptions of {principal.name}"


def _bringer(pids: Iterable[int]) -> str:
    """Name the user whose process brought an object."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
