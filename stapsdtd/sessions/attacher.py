"""Opens objects' files and has the engine arm and disarm their sites: all that may block on a file or in the kernel.

    control thread                    arming thread
    Armer: what is to be armed  ──►   Attacher: open the file, check each instruction, Engine.arm
                                ◄──   Outcome: which sites were refused, and why

Only the arming thread waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stapsdtd import model
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.selectors import SelectedSite, missing_argument
from stapsdtd.errors import ObjectForeignError, ObjectGoneError, StapsdtdError, TracefsRejectedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, Site
from stapsdtd.procs.named_files import open_named
from stapsdtd.procs.objects import Parse, open_object
from stapsdtd.query.site_filter import SiteFilter
from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.latency import Latency
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.instructions import why_not_armed
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.targets import ArmRequest, FilteredSite, target_of, why_not_computed

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """A subscription's state in the engine. error: why the engine could not open it."""

    subscription: Subscription
    is_open: bool = False
    is_closed: bool = False
    error: StapsdtdError | OSError | None = None


class Opener(Protocol):
    """Opens an object's file, as `procs.objects.open_object`."""

    def __call__(
        self, obj: Object, mappings: Iterable[tuple[int, model.Mapping]], parse: Parse, filesystems: Filesystems, /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """refusals: reasons by site; all other sites are armed. seconds: how long it took."""

    refusals: Mapping[Site, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Closed:
    """delivered: done when the subscription has all its events. quiesced: when nothing is patched for it any more."""

    delivered: Future[None]
    quiesced: Future[None]


class Attacher:
    """Runs in the arming thread. latency: of arming an object's sites; any thread may read it."""

    def __init__(
        self,
        engine: Engine,
        parse: Parse,
        *,
        nops: NopRewriting,
        filesystems: Filesystems,
        file_writes: FileWriteWatcher,
        open_object: Opener = open_object,
    ) -> None:
        """nops: which instructions the kernel rewrites; those are not armed."""
        self._engine = engine
        self._parse = parse
        self._nops = nops
        self._filesystems = filesystems
        self._file_writes = file_writes
        self._open_object = open_object
        self.latency = Latency()

    def open(self, session: Session) -> None:
        """Open a subscription in the engine, unless that was done. Raises StapsdtdError and OSError, then each time."""
        if session.error is not None:
            raise session.error
        # closing comes first, also where it was submitted later
        if session.is_open or session.is_closed:
            return
        subscription = session.subscription
        try:
            self._engine.open(
                subscription.subscription_key,
                subscription.sink,
                subscription.spec.kernel_buffer_kib,
                owner_of(subscription.client),
                subscription.sink if subscription.spec.aggregation else None,
            )
            session.is_open = True
            self._follow(subscription)
        except (StapsdtdError, OSError) as error:
            _log.warning("subscription %s: the engine cannot open it: %s", subscription.id, error)
            session.error = error
            raise

    def _follow(self, subscription: Subscription) -> None:
        """Raises LimitReachedError and OSError."""
        if subscription.spec.scope.follow:
            processes = subscription.processes
            processes.follow(self._engine.follow(subscription.subscription_key, processes.remaining))

    def arm(self, session: Session, request: ArmRequest) -> Outcome:
        """Arm the sites that may be armed.

        Raises ObjectGoneError, ObjectPendingError if the file cannot be opened yet, and OSError.
        """
        if session.is_closed:
            raise ObjectGoneError(request.object.path)
        begin = time.monotonic()
        try:
            self.open(session)
        except (StapsdtdError, OSError) as error:
            # Subscribe fails with the same error, unless it has returned by now
            refusals = {each.capture.site: str(error) for each in request.selected_sites}
            self._file_writes.armed(request.object.key, None)
        else:
            refusals = self._arm(session.subscription, request)
        return Outcome(refusals, time.monotonic() - begin)

    def _arm(self, subscription: Subscription, request: ArmRequest) -> dict[Site, str]:
        """Arm the sites that may be armed. Return why the others were refused."""
        obj, selected = request.object, request.selected_sites
        with contextlib.ExitStack() as opened:
            try:
                descriptor = self._open(request)
            except ObjectForeignError as error:
                self._file_writes.armed(obj.key, None)
                return {each.capture.site: error.reason for each in selected}
            opened.callback(os.close, descriptor)
            path = f"/proc/self/fd/{descriptor}"
            refusals: dict[Site, str] = {}
            armable: list[FilteredSite] = []
            for each in selected:
                site_filter = subscription.spec.filter_at(each.capture)
                if reason := self._why_refused(subscription, descriptor, obj, each, site_filter):
                    refusals[each.capture.site] = reason
                else:
                    armable.append((each, site_filter))
            principal = subscription.client
            granted = principal.take_sites(len(armable))
            limit = principal.quotas.max_sites
            refusals |= {each.capture.site: f"your role allows {limit} sites at once" for each, _ in armable[granted:]}
            try:
                by_engine = self._arm_in_engine(subscription, request, path, armable[:granted]) if granted else {}
            except BaseException:
                principal.free_sites(granted)
                raise
            principal.free_sites(len(by_engine))
            refusals |= by_engine
            self._file_writes.armed(obj.key, path)
        return refusals

    def _open(self, request: ArmRequest) -> int:
        """Open the object's file. Raises ObjectGoneError, ObjectPendingError, ObjectForeignError and OSError."""
        obj = request.object
        if request.named is not None:
            try:
                return open_named(obj, request.named, self._parse, self._filesystems)
            except ObjectGoneError:
                if not request.mappings:
                    raise
        return self._open_object(obj, request.mappings.items(), self._parse, self._filesystems)

    def _why_refused(
        self,
        subscription: Subscription,
        descriptor: int,
        obj: Object,
        selected: SelectedSite,
        site_filter: SiteFilter,
    ) -> str | None:
        """Return why a site of the file open at the descriptor must not be armed, or None if it may be."""
        architecture = obj.parsed.architecture
        why_not = partial(self._engine.why_not, architecture=architecture)
        return (
            why_foreign(architecture)
            or missing_argument(site_filter.wanted)
            or site_filter.why_not(why_not)
            or why_not_computed(subscription.spec.aggregation, selected.capture, why_not)
            or subscription.why_not_paired(obj.path, selected.capture, why_not)
            or why_not_armed(descriptor, architecture, selected.capture.site, self._nops)
        )

    def _arm_in_engine(
        self,
        subscription: Subscription,
        request: ArmRequest,
        file_path: str,
        selected: Sequence[FilteredSite],
    ) -> dict[Site, str]:
        """Arm sites. Return why the engine refused some of them, or all if it failed."""
        obj = request.object
        target = target_of(self._engine, subscription, request, file_path, selected)
        try:
            with self.latency.measured():
                refusals = self._engine.arm(subscription.subscription_key, target)
            return {refusal.site: refusal.reason for refusal in refusals}
        except (TracefsRejectedError, OSError) as error:
            _log.warning("cannot arm %s: %s", obj.path, error)
            self._release(subscription, obj, is_awaited=False)
            return {each.capture.site: str(error) for each, _ in selected}

    def renew(self, pid: int) -> None:
        """See `Engine.renew`."""
        try:
            self._engine.renew(pid)
        except OSError as error:
            _log.warning("process %d is no longer traced, since its main thread ended: %s", pid, error)

    def disarm(self, session: Session, obj: Object, *, is_awaited: bool) -> Future[None]:
        """Disarm an object. Return a future that is done when the client may be told.

        is_awaited: that is only when nothing is patched any more.
        """
        if not session.is_open or session.is_closed:
            return finished()
        self._release(session.subscription, obj, is_awaited=is_awaited)
        return self._engine.quiesced(owner_of(session.subscription.client)) if is_awaited else finished()

    def _release(self, subscription: Subscription, obj: Object, *, is_awaited: bool) -> None:
        try:
            self._engine.disarm(subscription.subscription_key, obj, is_awaited=is_awaited)
        except Exception:  # noqa: BLE001 - the client is told all the same, and nobody else would log it
            _log.exception("cannot disarm %s", obj.path)

    def close(self, session: Session, unmapped: Sequence[Object]) -> Closed:
        """Close a subscription in the engine. Nothing is armed for it after that.

        unmapped: objects that are patched nowhere, so that their removal, which takes the kernel 0.1 s each, can wait.
        """
        session.is_closed = True
        if not session.is_open:
            return Closed(finished(), finished())
        for obj in unmapped:
            self._release(session.subscription, obj, is_awaited=False)
        delivered = self._engine.close(session.subscription.subscription_key)
        return Closed(delivered, self._engine.quiesced(owner_of(session.subscription.client)))


def owner_of(principal: Principal) -> str:
    """Name a client's subscriptions as an owner of events (see `capture.bpf.turns`)."""
    return f"subscriptions of {principal.name}"
