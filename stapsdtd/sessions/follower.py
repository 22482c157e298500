"""Decides which objects are armed for which subscriptions, as processes map and unmap them, and clients name them or
they are installed.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stapsdtd import model
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.inodes import why_no_reader
from stapsdtd.kernel.ownership import belonging
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.file_keys import is_host_file, leads_to, was_written_to
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.procs.process_maps import MANY_MAPPINGS
from stapsdtd.sessions.armer import Armer
from stapsdtd.sessions.choices import names_of
from stapsdtd.sessions.chooser import Chooser
from stapsdtd.sessions.confining import Confining, visible
from stapsdtd.sessions.foreign_bounds import ForeignBounds
from stapsdtd.sessions.live import ConsideredObject, Doubtful, FirstArming, LiveSubscription
from stapsdtd.sessions.matcher import (
    Belonging,
    has_semaphores,
    is_in_scope,
    is_mapped_in_scope,
    is_wanted_unmapped,
    selected_sites,
)
from stapsdtd.sessions.subscription import SiteState, Subscription
from stapsdtd.sessions.targets import ArmRequest

MAX_SITES = 10_000
"""Of one object that are armed for a subscription, as many as it keeps statuses of."""
_TURN_SECONDS = 0.003
"""Of processor time that a turn of the control thread takes to consider objects."""
_UNKNOWN_SECONDS = 1.0
_REWRITTEN_SECONDS = 2.0


class ObjectFollower:
    """Has objects armed for the live subscriptions when they come, and disarmed when they go. Runs on an event loop."""

    def __init__(
        self,
        live: Mapping[str, LiveSubscription],
        registry: Registry,
        armer: Armer,
        foreign: ForeignBounds,
        *,
        chooser: Chooser,
        filesystems: Filesystems,
        clock: Callable[[], float],
    ) -> None:
        """live: the live subscriptions, by id."""
        self._chooser = chooser
        self._loop = asyncio.get_running_loop()
        self._live = live
        self._registry = registry
        self._armer = armer
        self._filesystems = filesystems
        self._clock = clock
        self._belongs = Belonging(self._loop)
        self._confining = Confining(registry, armer, foreign, self._belongs)
        self._is_in_scope = partial(is_in_scope, belongs=self._belongs)
        self._is_mapped_in_scope = partial(is_mapped_in_scope, belongs=self._belongs)
        self._stop_listening = registry.listen(self._on_change)

    def stop(self) -> None:
        self._stop_listening()

    def consider_all(self, live: LiveSubscription, first: FirstArming) -> None:
        """Arm all that a new subscription wants, in turns with what else is to be done."""
        first.add_match()
        self._consider_some(live, first, deque(self._registry.objects()))

    def _consider_some(self, live: LiveSubscription, first: FirstArming, objects: deque[Object]) -> None:
        until = time.thread_time() + _TURN_SECONDS
        try:
            while objects and time.thread_time() < until and live.subscription.id in self._live:
                self.consider(live, objects.popleft())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            first.settle_match(error)
            return
        if objects and live.subscription.id in self._live:
            self._loop.call_soon(self._consider_some, live, first, objects)
        else:
            first.settle_match()

    def consider(self, live: LiveSubscription, obj: Object) -> None:
        """Arm or disarm an object for a subscription as the processes that map it now require.

        What takes long to match is considered once it is matched.
        """
        if not live.choices.may_choose(obj):
            return
        if self._chooser.has_chosen(live, obj, self._names(live, obj), partial(self.consider, live, obj)):
            self._consider_chosen(live, obj)

    def _names(self, live: LiveSubscription, obj: Object) -> list[str]:
        """Return the names by which a subscription may choose sites of an object; none if it wants none anyway."""
        mappings = self._registry.mappings(obj.key)
        named = live.files.get(obj.key)
        if obj.key in live.considered or (named is None and not self._is_in_scope(live.subscription, mappings)):
            return []
        return names_of(obj, mappings, named)

    def _consider_chosen(self, live: LiveSubscription, obj: Object) -> None:
        pending = live.pending.pop(obj.key, None)
        doubtful = live.doubtful.pop(obj.key, None)
        self._consider(live, obj, is_reported=doubtful is not None)
        if pending is not None:
            if considered := live.considered.get(obj.key):
                considered.is_late = True
            elif obj.key not in live.barred and not pending.is_quiet:
                live.report_all(SiteState.DISARMED, obj, pending.selected_sites)
        if doubtful is not None and not {obj.key} & (live.doubtful.keys() | live.considered.keys()):
            live.report_all(SiteState.DISARMED, obj, doubtful.reported_sites)

    def _consider(self, live: LiveSubscription, obj: Object, *, is_reported: bool = False) -> None:
        """is_reported: the client knows that the object is doubtful."""
        subscription = live.subscription
        mappings: Mapping[int, model.Mapping] = self._registry.mappings(obj.key)
        named = self._named_file(live, obj.key)
        is_free = named is not None and not _is_only_others(live, obj.key, mappings)
        is_installed = obj.key in live.installed
        limit = self._confining.limit(live, obj.key, mappings)
        on_gone = partial(self._on_gone, live, obj, mappings.keys())
        if considered := live.considered.get(obj.key):
            if limit.refusal:
                self._confining.refuse(live, obj, limit.refusal, ())
                return
            selected = considered.selected_sites
            is_mapped = self._is_mapped_in_scope(subscription, selected, mappings)
            if is_mapped and considered.is_quiet:
                self._armer.reveal(live, considered)
            if is_mapped or (is_free and is_wanted_unmapped(subscription, selected, is_installed=is_installed)):
                live.unknown_since.pop(obj.key, None)
                self._confining.keep_within(live, considered, limit, named, on_gone)
            elif (considered.is_quiet and not is_free) or self._is_gone(live, obj):
                self._armer.disarm(live, obj, is_awaited=was_written_to(obj, self._filesystems))
                self._consider_doubtful(live)
            return
        if named is None and not self._is_in_scope(subscription, mappings):
            return
        selected = selected_sites(subscription, live.choices, obj, names_of(obj, mappings, named))
        is_mapped = self._is_mapped_in_scope(subscription, selected, mappings)
        if not is_mapped and not (is_free and is_wanted_unmapped(subscription, selected, is_installed=is_installed)):
            return
        if named is None and not _is_in_files(subscription, obj, mappings, self._filesystems):
            return
        if earlier := live.version_of(obj.key):
            if not is_mapped:
                # the named file was written to since, and a process maps what it is now
                return
            self._armer.disarm(live, earlier.object, is_awaited=True)
        owners = subscription.spec.owners
        if owners is not None:
            # do not reveal other users' processes, nor the paths under which they map the object
            mappings = visible(mappings, owners)
            paths = [mapping.path for mapping in mappings.values()] + ([named.path] if named else [])
            obj = replace(obj, path=next(iter(paths), obj.path))
            selected = selected_sites(subscription, live.choices, obj, names_of(obj, mappings, named))
        if not selected:
            return
        is_quiet = owners is not None and is_installed and not is_mapped
        if len(selected) > MAX_SITES:
            too_many = f"{len(selected)} sites of this file match, and a subscription may have {MAX_SITES} of one; "
            _refuse_once(live, live.oversized, obj, [] if is_quiet else selected[:1], too_many + "name fewer probes")
            return
        if other := live.candidate_for(obj.key):
            live.doubtful[obj.key] = Doubtful(obj, () if is_quiet else selected)
            if not is_reported:
                doubt = _why_doubtful(live, other, self._registry)
                sites = live.doubtful[obj.key].reported_sites
                live.report_all(SiteState.REFUSED, obj, sites, doubt)
            return
        if (crowding := self._registry.crowding(obj.key)) and has_semaphores(selected):
            is_known = owners is None or self._belongs(crowding, owners)
            too_slow = _why_too_slow(f"process {crowding}" if is_known else "a process")
            _refuse_once(live, live.crowded, obj, [] if is_quiet else selected, too_slow)
            return
        live.crowded.discard(obj.key)
        if limit.refusal:
            self._confining.refuse(live, obj, limit.refusal, [] if is_quiet else selected)
            return
        is_ephemeral = named is None and not self.is_host_file(obj)
        request = ArmRequest(obj, selected, mappings, is_ephemeral, named, is_quiet)
        self._confining.arm(live, request, limit, on_gone)

    def _named_file(self, live: LiveSubscription, key: ObjectKey) -> NamedFile | None:
        """Return the file if the client named it, until it is deleted: only those who have it open can map it then."""
        named = live.files.get(key)
        if named is None or not named.is_deleted:
            return named
        self._let_go(live, key)
        return None

    def hold(
        self, live: LiveSubscription, files: Iterable[tuple[Object, NamedFile]], *, are_installed: bool = False
    ) -> None:
        """Keep the objects of files, mapped or not, until they are let go. are_installed: no client named them."""
        for obj, file in files:
            if obj.key not in live.files:
                live.files[obj.key] = file
                if are_installed:
                    live.installed.add(obj.key)
                self._registry.hold(obj)
                # others may have it already, so that the registry tells nothing new
                self.consider(live, obj)

    def end(self, live: LiveSubscription) -> None:
        """Close all files that the client named, or that are installed, and match nothing any more."""
        for key in list(live.files):
            self._let_go(live, key)
        for choosing in live.choosing.values():
            choosing.search.cancel()

    def let_go(self, live: LiveSubscription, key: ObjectKey) -> None:
        """Close a file, and disarm it unless a process maps it."""
        considered = live.considered.get(key)
        self._let_go(live, key)
        if considered is not None:
            self.consider(live, considered.object)

    def _let_go(self, live: LiveSubscription, key: ObjectKey) -> None:
        del live.files[key]
        live.installed.discard(key)
        self._registry.release(key)

    def _is_gone(self, live: LiveSubscription, obj: Object) -> bool:
        """Report whether no later process can map the object. If the kernel cannot tell, wait before believing it."""
        leads = leads_to(obj, self._filesystems)
        if leads is not None or live.considered[obj.key].is_ephemeral:
            live.unknown_since.pop(obj.key, None)
            return not leads
        return self._clock() - live.unknown_since.setdefault(obj.key, self._clock()) >= _UNKNOWN_SECONDS

    def _on_gone(self, live: LiveSubscription, obj: Object, pids: Collection[int]) -> None:
        """Try again if other processes map the object now."""
        if self._registry.mappings(obj.key).keys() - pids:
            self._consider(live, obj)

    def consider_pending(self, live: LiveSubscription) -> None:
        """Try again to arm objects that could not be opened, or might have been the same file as others."""
        for considered in list(live.pending.values()):
            self.consider(live, considered.object)
        self._consider_doubtful(live)

    def _consider_doubtful(self, live: LiveSubscription) -> None:
        """Arm objects of which no other one that is armed may be the same file any more."""
        for doubtful in list(live.doubtful.values()):
            if live.candidate_for(doubtful.object.key) is None:
                self.consider(live, doubtful.object)

    def is_host_file(self, obj: Object) -> bool:
        return is_host_file(obj, self._filesystems)

    def _on_change(self, change: Change) -> None:
        for live in list(self._live.values()):
            self.consider(live, change.object)
            if change.vanished:
                live.forget(change.object.key)

    def on_main_thread(self, pid: int) -> None:
        """Keep a process armed that has another main thread, or none. For those that are followed, all are patched."""
        for live in self._live.values():
            if not live.subscription.spec.scope.follow and pid in live.subscription.processes.remaining:
                self._armer.renew(live, pid)
                break

    def on_write(self, written: set[ObjectKey]) -> None:
        """Disarm files before anyone maps their new content. If the probes did not change, arm them again soon."""
        for live in list(self._live.values()):
            for key in written & live.considered.keys():
                obj = live.considered[key].object
                self._armer.disarm(live, obj, is_awaited=True, then=partial(self._consider_later, live, obj))

    def _consider_later(self, live: LiveSubscription, obj: Object) -> None:
        self._loop.call_later(_REWRITTEN_SECONDS, self._consider_again, live, obj)

    def _consider_again(self, live: LiveSubscription, obj: Object) -> None:
        if live.subscription.id in self._live:
            self.consider(live, obj)


def _refuse_once(
    live: LiveSubscription, refused: set[ObjectKey], obj: Object, selected: Sequence[SelectedSite], reason: str
) -> None:
    """refused: what the client knows to be refused for this reason."""
    if obj.key not in refused:
        refused.add(obj.key)
        live.report_all(SiteState.REFUSED, obj, selected, reason)


def _why_too_slow(crowding: str) -> str:
    return (
        f"{crowding} maps this file more than {MANY_MAPPINGS:,} times: while the kernel attaches to a probe with a "
        f"semaphore there, no process on this host could fork"
    )


def _is_only_others(live: LiveSubscription, key: ObjectKey, pids: Collection[int]) -> bool:
    """Report whether an installed file is mapped, but by nobody that the client may trace: his probes are no reason to
    patch it.
    """
    owners = live.subscription.spec.owners
    return owners is not None and key in live.installed and bool(pids) and not belonging(pids, owners)


def _is_in_files(
    subscription: Subscription, obj: Object, mappings: Mapping[int, model.Mapping], filesystems: Filesystems
) -> bool:
    """Report whether an object is where the client named files, such as one that took the place of another."""
    files = subscription.spec.files
    if files is None:
        return True
    paths = {obj.path, *(mapping.path for mapping in mappings.values())}
    at_files = [path for path in paths if path in files or posixpath.dirname(path) in files]
    # another mount namespace may have the same path
    return any(is_host_file(replace(obj, path=path), filesystems) for path in at_files)


def _why_doubtful(live: LiveSubscription, other: ConsideredObject, registry: Registry) -> str:
    """Return why an object is not armed that may be the same file as another."""
    owners = live.subscription.spec.owners
    pids = registry.mappings(other.object.key).keys()
    visible = pids if owners is None else belonging(pids, owners)
    whose = f" of process {min(visible)}" if visible else ""
    return (
        f"it may be the same file as {other.object.path}{whose}, which is armed: a hit would be delivered twice; "
        f"which files are the same is unknown: {why_no_reader() or 'the process ended too soon'}"
    )
