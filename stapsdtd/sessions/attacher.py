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
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from stapsdtd import model
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.selectors import SelectedSite, missing_argument
from stapsdtd.errors import ObjectForeignError, ObjectGoneError, StapsdtdError, TracefsRejectedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.host_calls import ARM, KEEP_ARMED, OPEN_FILE, host_call
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, Site
from stapsdtd.procs.named_files import open_named
from stapsdtd.procs.objects import Parse, open_object
from stapsdtd.query.site_filter import SiteFilter
from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.slices import Turn
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.instructions import why_not_armed
from stapsdtd.sessions.session import Closed, Session, owner_of, release
from stapsdtd.sessions.subscription import SiteState, SiteStatus, Subscription
from stapsdtd.sessions.targets import ArmRequest, FilteredSite, target_in_steps, why_not_computed

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

Refusals = dict[tuple[int, Site], str]
"""Why sites were refused, by `SelectedSite.key`."""


class Opener(Protocol):
    """Opens an object's file, as `procs.objects.open_object`."""

    def __call__(
        self, obj: Object, mappings: Iterable[tuple[int, model.Mapping]], parse: Parse, filesystems: Filesystems, /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """refusals: all other sites are armed. statuses: of all of them. seconds: how long it took."""

    refusals: Refusals
    statuses: Sequence[SiteStatus]
    seconds: float


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
        clock: Callable[[], float],
        open_object: Opener = open_object,
    ) -> None:
        """nops: which instructions the kernel rewrites; those are not armed."""
        self._engine = engine
        self._parse = parse
        self._nops = nops
        self._filesystems = filesystems
        self._file_writes = file_writes
        self._clock = clock
        self._open_object = open_object
        self.latency = Latency()

    def open(self, session: Session) -> Generator[None, None, None]:
        """See `Session.open`."""
        return session.open(self._engine)

    def arm(self, session: Session, request: ArmRequest, since: float) -> Generator[None, None, Outcome]:
        """Arm the sites that may be armed, some in each step. since: when it was noticed that they are there.

        Raises ObjectGoneError, also if it is disarmed meanwhile, ObjectPendingError if the file cannot be opened yet,
        and OSError.
        """
        if session.is_closed:
            raise ObjectGoneError(request.object.path)
        begin = time.monotonic()
        session.arming[request.object.key] = request
        try:
            try:
                yield from session.open(self._engine)
            except (StapsdtdError, OSError) as error:
                # Subscribe fails with the same error, unless it has returned by now
                refusals = {each.key: str(error) for each in request.selected_sites}
                self._file_writes.armed(request.object.key, None)
            else:
                _check_wanted(session, request)
                refusals = yield from self._arm(session, request)
        finally:
            if session.arming.get(request.object.key) is request:
                del session.arming[request.object.key]
        statuses = yield from self._statuses(session.subscription, request, refusals, since)
        return Outcome(refusals, statuses, time.monotonic() - begin)

    def _statuses(
        self, subscription: Subscription, request: ArmRequest, refusals: Refusals, since: float
    ) -> Generator[None, None, list[SiteStatus]]:
        # the client knows nothing of it
        armed_after_ns = 0 if request.is_quiet else int((self._clock() - since) * 1e9)
        statuses, turn = [], Turn()
        for each in request.selected_sites:
            if reason := refusals.get(each.key):
                statuses.append(subscription.status(SiteState.REFUSED, request.object, each, reason))
            else:
                statuses.append(
                    subscription.status(
                        SiteState.ARMED, request.object, each, request.note_of(each), armed_after_ns=armed_after_ns
                    )
                )
            if turn.is_over:
                yield
                turn.begin()
        return statuses

    def _arm(self, session: Session, request: ArmRequest) -> Generator[None, None, Refusals]:
        """Arm the sites that may be armed. Return why the others were refused."""
        subscription = session.subscription
        obj, selected = request.object, request.selected_sites
        with contextlib.ExitStack() as opened:
            try:
                with host_call(OPEN_FILE, obj.path):
                    descriptor = None if obj.is_kernel else self._open(request)
            except (ObjectForeignError, OSError) as error:
                self._file_writes.armed(obj.key, None)
                why = error.reason if isinstance(error, ObjectForeignError) else str(error)
                return dict.fromkeys((each.key for each in selected), why)
            path = ""
            if descriptor is not None:
                opened.callback(os.close, descriptor)
                path = f"/proc/self/fd/{descriptor}"
            refusals: Refusals = {}
            armable: list[FilteredSite] = []
            turn = Turn()
            for each in selected:
                clause = subscription.clauses[each.clause]
                site_filter = clause.spec.filter_at(each.capture)
                if reason := self._why_refused(clause, descriptor, obj, each, site_filter):
                    refusals[each.key] = reason
                else:
                    armable.append((each, site_filter))
                if turn.is_over:
                    yield from _pause(session, request)
                    turn.begin()
            principal = subscription.client
            granted = principal.take_sites(len(armable))
            limit = principal.quotas.max_sites
            refusals |= {each.key: f"your role allows {limit} sites at once" for each, _ in armable[granted:]}
            try:
                by_engine = yield from self._arm_in_engine(session, request, path, armable[:granted])
            except BaseException:
                principal.free_sites(granted)
                raise
            principal.free_sites(len(by_engine))
            refusals |= by_engine
            self._file_writes.armed(obj.key, path or None)
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
        clause: Clause,
        descriptor: int | None,
        obj: Object,
        selected: SelectedSite,
        site_filter: SiteFilter,
    ) -> str | None:
        """Return why a site of an object must not be armed, or None if it may be. descriptor: None for the kernel."""
        architecture = obj.parsed.architecture
        why_not = partial(self._engine.why_not, architecture=architecture)
        return (
            selected.capture.site.refused
            or why_foreign(architecture)
            or missing_argument(site_filter.wanted)
            or site_filter.why_not(why_not)
            or why_not_computed(clause.spec.aggregation, selected.capture, why_not)
            or clause.why_not_paired(selected, why_not)
            or self._why_not_armed(descriptor, obj, selected.capture.site)
        )

    def _why_not_armed(self, descriptor: int | None, obj: Object, site: Site) -> str | None:
        if descriptor is None:
            return obj.refused.get(site)
        return why_not_armed(descriptor, obj.parsed.architecture, site, self._nops)

    def _arm_in_engine(
        self, session: Session, request: ArmRequest, file_path: str, selected: Sequence[FilteredSite]
    ) -> Generator[None, None, Refusals]:
        """Arm sites. Return why the engine refused some of them, or all of a clause if it failed."""
        refusals: Refusals = {}
        for position, clause in enumerate(session.subscription.clauses):
            of_clause = [each for each in selected if each[0].clause == position]
            if not of_clause:
                continue
            target = yield from _taken(
                session,
                request,
                target_in_steps(self._engine, session.subscription, clause, request, of_clause, file_path=file_path),
            )
            try:
                refused = yield from _taken(
                    session, request, self._engine.arm_in_steps(clause.key, target), self.latency
                )
                refusals |= {(position, each.site): each.reason for each in refused}
            except (TracefsRejectedError, OSError) as error:
                extra = fields(client=session.subscription.client.name)
                _log.warning("subscription %s: %s", session.subscription.id, error, extra=extra)
                release(self._engine, clause, request.object)
                refusals |= {each.key: str(error) for each, _ in of_clause}
        return refusals

    def renew(self, pid: int) -> None:
        """See `Engine.renew`."""
        try:
            with host_call(KEEP_ARMED, f"process {pid}"):
                self._engine.renew(pid)
        except OSError as error:
            _log.warning("process %d is no longer traced, since its main thread ended: %s", pid, error)

    def disarm(self, session: Session, obj: Object, *, is_awaited: bool) -> Future[None]:
        """Disarm an object. Return a future that is done when the client may be told.

        is_awaited: that is only when nothing is patched any more.
        """
        # if it is still being armed, that goes no further
        session.arming.pop(obj.key, None)
        if not session.opened or session.is_closed:
            return finished()
        for clause in session.opened:
            release(self._engine, clause, obj, is_awaited=is_awaited)
        return self._engine.quiesced(owner_of(session.subscription.client)) if is_awaited else finished()

    def close(self, session: Session, unmapped: Sequence[Object]) -> Generator[None, None, Closed]:
        """See `Session.close`."""
        return session.close(self._engine, unmapped)


def _taken(
    session: Session, request: ArmRequest, steps: Generator[None, None, _T], latency: Latency | None = None
) -> Generator[None, None, _T]:
    """Take steps, until the object is disarmed. latency: observes how long they took."""
    taken = 0.0
    with contextlib.closing(steps):
        while True:
            begin = time.perf_counter()
            try:
                with host_call(ARM, request.object.path):
                    next(steps)
            except StopIteration as end:
                if latency is not None:
                    latency.observe(taken + time.perf_counter() - begin)
                result: _T = end.value
                return result
            taken += time.perf_counter() - begin
            yield from _pause(session, request)


def _pause(session: Session, request: ArmRequest) -> Generator[None, None, None]:
    """Let others have their turn. Raises ObjectGoneError if the object has been disarmed meanwhile."""
    yield
    _check_wanted(session, request)


def _check_wanted(session: Session, request: ArmRequest) -> None:
    """Raises ObjectGoneError if the object has been disarmed."""
    if session.is_closed or session.arming.get(request.object.key) is not request:
        raise ObjectGoneError(request.object.path)
