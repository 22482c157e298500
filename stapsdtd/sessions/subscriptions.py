"""All subscriptions: which sites of which objects each one wants armed, as objects come and go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from stapsdtd.capture.engine import Engine, SubscriptionKey, Target, TargetSite
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.catalog.selectors import SelectedSite, choose, missing_argument
from stapsdtd.config import NO_QUOTAS, Limits, Quotas
from stapsdtd.errors import (
    LimitReachedError,
    ObjectForeignError,
    ObjectGoneError,
    ServerStoppingError,
    TracefsRejectedError,
    UnknownSubscriptionError,
)
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.machine import why_foreign
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.model import Mapping, Object, ObjectKey, Site
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.objects import Parse, is_host_file, open_object, was_written_to
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.latency import Latency
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import Excess, ForeignBounds
from stapsdtd.sessions.instructions import why_not_armed
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import EndReason, Scope, SiteState, SiteStatus, Subscription, SubscriptionSpec
from stapsdtd.sessions.totals import AccountTotals

_log = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 2.0
_ENDED_KEPT_SECONDS = 10.0
_LOOK_SECONDS = 1.0


class Subscriptions:
    """Runs on the control thread's event loop; `get` and `all` may be called from any thread.

    nops: what the kernel does to some instructions, which are not armed.
    totals: what became of all events. arming: how long it takes to arm an object's sites. Both may be read anywhere.
    """

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        watcher: Watcher,
        parse: Parse,
        limits: Limits,
        *,
        connected: ConnectedClients,
        nops: NopRewriting,
        filesystems: Filesystems,
    ) -> None:
        self._connected = connected
        self._parse = parse
        self._nops = nops
        self._filesystems = filesystems
        self._registry = registry
        self._engine = engine
        self._watcher = watcher
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._subscription_keys = itertools.count(1)
        self._held: dict[str, _Held] = {}
        self._clients: dict[str, Principal] = {}
        self._closing = False
        self._ended: dict[str, Subscription] = {}
        self.totals = AccountTotals()
        self.arming = Latency()
        self._file_writes = FileWriteWatcher(self._on_write)
        self._stop_listening = registry.listen(self._on_change)
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)
        self.foreign = ForeignBounds()
        self._clients_of: dict[SubscriptionKey, Principal] = {}
        self._looking = self._loop.call_later(_LOOK_SECONDS, self._look_at_foreign_hits)

    def subscribe(
        self, spec: SubscriptionSpec, client: str = "", quotas: Quotas = NO_QUOTAS
    ) -> tuple[Subscription, list[SiteStatus]]:
        """Arm all that matches now. client: whose it is, and who shares quotas with others of the same name.

        Raises LimitReachedError, and TracefsRejectedError where the engine cannot begin at all.
        """
        if self._closing:
            raise ServerStoppingError
        self._watcher.refresh()
        whose = self._begin(spec, client, quotas)
        subscription = Subscription(
            secrets.token_hex(8),
            next(self._subscription_keys),
            spec,
            os.getpid(),
            self._engine.why_not,
            whose,
            self._connected,
        )
        try:
            self._engine.open(subscription.subscription_key, subscription, spec.kernel_buffer_kib, _owner_of(whose))
        except BaseException:
            self._end(subscription)
            raise
        held = _Held(subscription)
        self._held[subscription.id] = held
        self._clients_of[subscription.subscription_key] = whose
        self.totals.began(subscription)
        statuses: list[SiteStatus] = []
        try:
            for found in self._registry.objects():
                self._consider(held, found)
                statuses += subscription.new_statuses()
        except BaseException:
            self.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)
            raise
        self._start_lease(held)
        return subscription, statuses

    def _begin(self, spec: SubscriptionSpec, name: str, quotas: Quotas) -> Principal:
        """Count a subscription as its client's. Raises LimitReachedError."""
        limits = self._limits
        if len(self._held) >= limits.max_subscriptions:
            raise LimitReachedError(
                f"there are {limits.max_subscriptions} subscriptions, as many as this server allows"
            )
        # a stream that nobody reads keeps what it is for as long as the client likes
        ended = [(each.client.name, each.log.kept_bytes) for each in list(self._ended.values())]
        queues = sum(held.subscription.spec.queue_bytes for held in self._held.values()) + spec.queue_bytes
        queues += sum(kept for _, kept in ended)
        if queues > limits.max_total_queue_bytes:
            # how much others have is not to be told
            most = limits.max_total_queue_bytes
            raise LimitReachedError(f"all queues would take more than the {most} bytes that this server allows")
        client = self._clients.get(name) or Principal(name)
        client.change_quotas(quotas)
        client.begin(spec.queue_bytes, sum(kept for owner, kept in ended if owner == name))
        self._clients[name] = client
        return client

    def _end(self, subscription: Subscription) -> None:
        client = subscription.client
        client.end(subscription.spec.queue_bytes)
        if not client.subscriptions:
            del self._clients[client.name]

    def unsubscribe(self, ident: str, reason: EndReason) -> Subscription:
        """Disarm what only this subscription used. `ended` is done when its log has all that fired; see quiesced() too.

        The log can still be read for some seconds after that, also by a stream that begins only then.
        """
        held = self._held.get(ident)
        if held is None:
            raise UnknownSubscriptionError(ident)
        # in this order, since another thread may look for it in between
        self._ended[ident] = held.subscription
        del self._held[ident]
        if held.lease is not None:
            held.lease.cancel()
        self._end(held.subscription)
        held.subscription.client.sites -= sum(len(armed.armed) for armed in held.armed.values())
        for key in held.armed:
            self._file_writes.disarmed(key)
        subscription = held.subscription
        subscription.is_ending = True
        self.totals.ended(subscription)
        try:
            delivered = self._engine.close(subscription.subscription_key)
        except BaseException:
            self._end_with(subscription, reason)
            raise
        if delivered.done():
            self._end_with(subscription, reason)
        else:
            delivered.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._end_with, subscription, reason))
        return subscription

    def _end_with(self, subscription: Subscription, reason: EndReason) -> None:
        subscription.end(reason)
        self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, subscription)

    def _forget(self, ended: Subscription) -> None:
        if ended.is_read:
            # a slow client still gets what was left for it
            self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, ended)
            return
        del self._ended[ended.id]
        self.totals.settle(ended)
        # it refers to itself, and the collector may take its time
        ended.log.forget()

    def quiesced(self, client: Principal) -> Future[None]:
        """Answer what is done when all that was disarmed so far for a client is out of the processes."""
        return self._engine.quiesced(_owner_of(client))

    def close_all(self) -> list[Future[None]]:
        """Unsubscribe all. What is returned is done when their streams have all that fired."""
        self._closing = True
        self._housekeeping.cancel()
        self._looking.cancel()
        self._stop_listening()
        self._file_writes.close()
        self._unsubscribe_each(list(self._held), EndReason.SERVER_STOPPING)
        return [subscription.ended for subscription in list(self._ended.values())]

    def _unsubscribe_each(self, idents: Iterable[str], reason: EndReason) -> None:
        for ident in idents:
            try:
                self.unsubscribe(ident, reason)
            except Exception:  # noqa: BLE001 - the others are to end as well
                _log.exception("subscription %s did not end cleanly", ident)

    def get(self, ident: str) -> Subscription:
        """Answer a subscription that lives, or ended a moment ago. Raises UnknownSubscriptionError."""
        held = self._held.get(ident)
        found = held.subscription if held else self._ended.get(ident)
        if found is None:
            raise UnknownSubscriptionError(ident)
        return found

    def all(self) -> list[tuple[Subscription, bool, float]]:
        """Each subscription, whether a stream is open, and the seconds that are left of its lease."""
        now = self._loop.time()
        return [
            (held.subscription, held.streams > 0, max(held.lease.when() - now, 0) if held.lease else 0.0)
            for held in list(self._held.values())
        ]

    def stream_opened(self, ident: str) -> None:
        """A stream holds the lease, unless the subscription ended."""
        held = self._held.get(ident)
        if held is None:
            return
        held.streams += 1
        if held.lease is not None:
            held.lease.cancel()
            held.lease = None

    def stream_closed(self, ident: str) -> None:
        held = self._held.get(ident)
        if held is not None:
            held.streams -= 1
            if held.streams == 0:
                self._start_lease(held)

    def _start_lease(self, held: _Held) -> None:
        held.lease = self._loop.call_later(held.subscription.spec.lease_seconds, self._expire, held.subscription.id)

    def _expire(self, ident: str) -> None:
        _log.info("subscription %s: its lease ran out", ident)
        self.unsubscribe(ident, EndReason.LEASE_EXPIRED)

    def _on_change(self, change: Change) -> None:
        failure: OSError | None = None
        for held in list(self._held.values()):
            try:
                self._consider(held, change.object)
            except OSError as error:
                failure = failure or error
            except Exception:  # noqa: BLE001 - the others are to have it armed as well
                _log.exception("%s: %s could not be armed", held.subscription.id, change.object.path)
        if failure is not None:
            raise failure

    def _consider(self, held: _Held, found: Object) -> None:
        """Bring one subscription in step with who maps an object."""
        subscription = held.subscription
        mappings = self._registry.mappings(found.key)
        if found.key in held.armed:
            known = held.armed[found.key].selected_sites
            if not is_host_file(found, self._filesystems) and not self._eligible(held, known, mappings.keys()):
                self._disarm(held, found, is_awaited=was_written_to(found, self._filesystems))
            return
        selected_sites = _choices(subscription.spec, found, mappings)
        if not selected_sites or not self._eligible(held, selected_sites, mappings.keys()):
            return
        if earlier := held.version_of(found.key):
            self._disarm(held, earlier.object, is_awaited=True)
        owners = subscription.spec.owners
        if owners is not None:
            # other users may have it elsewhere, which is not this one's business
            own = belonging(mappings, owners)
            mappings = {pid: mapping for pid, mapping in mappings.items() if pid in own}
            for mapping in list(mappings.values())[:1]:
                found = replace(found, path=mapping.path)
            selected_sites = _choices(subscription.spec, found, mappings)
            if not selected_sites:
                return
        if reason := self.foreign.why_not(subscription.client.name, found.key):
            if found.key not in held.barred:
                held.barred[found.key] = found
                subscription.changed(
                    [_status(subscription, SiteState.REFUSED, found, selected, reason) for selected in selected_sites]
                )
            return
        refusals: dict[Site, str] = {}
        with contextlib.ExitStack() as opened:
            path = None
            try:
                descriptor = open_object(found, mappings.items(), self._parse, self._filesystems)
            except ObjectForeignError as error:
                refused: list[str | None] = [error.reason] * len(selected_sites)
            except ObjectGoneError as error:
                _log.debug("%s", error)
                return
            else:
                opened.callback(os.close, descriptor)
                path = f"/proc/self/fd/{descriptor}"
                refused = [self._why_refused(descriptor, found, selected) for selected in selected_sites]
            fitting = [selected for selected, reason in zip(selected_sites, refused, strict=True) if reason is None]
            left = subscription.client.sites_left
            beyond = [] if left is None else fitting[left:]
            fitting = fitting[: len(fitting) - len(beyond)]
            if path is not None and fitting:
                refusals = self._arm(held, found, path, fitting)
            self._file_writes.armed(found.key, path)
        most = subscription.client.quotas.max_sites
        refusals |= {selected.capture.site: f"your role allows {most} sites at once" for selected in beyond}
        reasons = [
            reason or refusals.get(selected.capture.site)
            for selected, reason in zip(selected_sites, refused, strict=True)
        ]
        armed = tuple(selected for selected, reason in zip(selected_sites, reasons, strict=True) if reason is None)
        held.add(_Armed(found, tuple(selected_sites), armed))
        subscription.client.sites += len(armed)
        subscription.changed(
            [
                _status(subscription, SiteState.REFUSED if reason else SiteState.ARMED, found, selected, reason or "")
                for selected, reason in zip(selected_sites, reasons, strict=True)
            ]
        )

    def _why_refused(self, descriptor: int, found: Object, selected: SelectedSite) -> str | None:
        """Return why no engine is to arm a site of the file that is open there; None where one may."""
        architecture = found.parsed.architecture
        return (
            why_foreign(architecture)
            or missing_argument(selected.capture)
            or why_not_armed(descriptor, architecture, selected.capture.site, self._nops)
        )

    def revoke(self, is_allowed: Callable[[Subscription], bool]) -> int:
        """End the subscriptions that are not allowed any more; answer how many."""
        ended = [held.subscription.id for held in self._held.values() if not is_allowed(held.subscription)]
        self._unsubscribe_each(ended, EndReason.ACCESS_REVOKED)
        return len(ended)

    def _arm(
        self, held: _Held, found: Object, file_path: str, selected_sites: Sequence[SelectedSite]
    ) -> dict[Site, str]:
        """Answer why which sites were refused: all of them where this object is more than the engine can take."""
        subscription = held.subscription
        scope, mapping = subscription.spec.scope, self._registry.mappings(found.key).keys()
        is_ephemeral = not is_host_file(found, self._filesystems)
        target = Target(
            found,
            file_path,
            tuple(
                TargetSite(selected.capture, subscription.site_id(found, selected), _pids(scope, selected))
                for selected in selected_sites
            ),
            subscription.spec.predicate,
            exclude_pids=subscription.excluded & mapping,
            exclude_later=subscription.excluded - mapping,
            is_ephemeral=is_ephemeral,
            owners=subscription.spec.owners,
            owner=_bringer(mapping) if is_ephemeral else "",
        )
        try:
            with self.arming.measured():
                refusals = self._engine.arm(subscription.subscription_key, target)
            return {refusal.site: refusal.reason for refusal in refusals}
        except (TracefsRejectedError, OSError) as error:
            _log.warning("%s could not be armed: %s", found.path, error)
            self._release(subscription, found)
            return {selected.capture.site: str(error) for selected in selected_sites}

    def _eligible(self, held: _Held, selected_sites: Sequence[SelectedSite], pids: Iterable[int]) -> bool:
        """Answer whether any process in the subscription's scope maps the object."""
        spec = held.subscription.spec
        wanted = set(pids) - held.subscription.excluded
        if spec.scope.pids:
            wanted &= spec.scope.pids
        if all(selected.pids is not None for selected in selected_sites):
            wanted &= frozenset().union(*(selected.pids or () for selected in selected_sites))
        return bool(wanted) if spec.owners is None else any(belongs(pid, spec.owners) for pid in wanted)

    def _disarm(self, held: _Held, found: Object, *, is_awaited: bool = False) -> None:
        """is_awaited: it is told only when nothing is patched any more."""
        armed, subscription = held.pop(found.key), held.subscription
        self._file_writes.disarmed(found.key)
        subscription.client.sites -= len(armed.armed)
        statuses = [_status(subscription, SiteState.DISARMED, armed.object, selected) for selected in armed.armed]
        self._release(subscription, found, is_awaited=is_awaited)
        if is_awaited:
            self._when_settled(subscription, lambda: subscription.changed(statuses))
        else:
            subscription.changed(statuses)

    def _when_settled(self, subscription: Subscription, work: Callable[[], None]) -> None:
        """Do it here when what was disarmed until now for its client is out of the processes."""
        self.quiesced(subscription.client).add_done_callback(lambda _: self._loop.call_soon_threadsafe(work))

    def _release(self, subscription: Subscription, found: Object, *, is_awaited: bool = False) -> None:
        try:
            self._engine.disarm(subscription.subscription_key, found, is_awaited=is_awaited)
        except (TracefsRejectedError, OSError):
            _log.exception("%s could not be disarmed", found.path)

    def _on_write(self, written: set[ObjectKey]) -> None:
        """Disarm files before anybody maps what is in them now; those whose probes are what they were, for a while."""
        for held in list(self._held.values()):
            for key in written & held.armed.keys():
                found = held.armed[key].object
                self._disarm(held, found, is_awaited=True)
                # not before that was told
                self._when_settled(held.subscription, partial(self._consider_later, held, found))

    def _consider_later(self, held: _Held, found: Object) -> None:
        self._loop.call_later(_HOUSEKEEPING_SECONDS, self._consider_again, held, found)

    def _consider_again(self, held: _Held, found: Object) -> None:
        if held.subscription.id in self._held:
            self._consider(held, found)

    def _look_at_foreign_hits(self) -> None:
        """Disarm what costs too much for processes that its client does not see, and arm again what may be again."""
        self._looking = self._loop.call_later(_LOOK_SECONDS, self._look_at_foreign_hits)
        hits: Counter[tuple[str, ObjectKey]] = Counter()
        for (subscription_key, key), count in self._engine.foreign_hits().items():
            if client := self._clients_of.get(subscription_key):
                hits[client.name, key] += count
        quotas = {client.name: client.quotas.max_foreign_hits_per_second for client in self._clients_of.values()}
        bounds = {name: most for name, most in quotas.items() if most is not None}
        for name, excess in self.foreign.look(hits, bounds):
            _log.warning("%s: %s", name, excess.reason)
            for held in [held for held in self._held.values() if held.subscription.client.name == name]:
                if excess.key in held.armed:
                    self._refuse(held, excess)
        self.foreign.forget()
        self._clients_of = {
            held.subscription.subscription_key: held.subscription.client for held in self._held.values()
        }
        for held in list(self._held.values()):
            for key, found in list(held.barred.items()):
                if self.foreign.why_not(held.subscription.client.name, key) is None:
                    del held.barred[key]
                    self._consider(held, found)

    def _refuse(self, held: _Held, excess: Excess) -> None:
        """Disarm an object's sites for a subscription, and say why."""
        armed, subscription = held.pop(excess.key), held.subscription
        held.barred[excess.key] = armed.object
        self._file_writes.disarmed(excess.key)
        subscription.client.sites -= len(armed.armed)
        self._release(subscription, armed.object)
        subscription.changed(
            [
                _status(subscription, SiteState.REFUSED, armed.object, selected, excess.reason)
                for selected in armed.armed
            ]
        )

    def _keep_house(self) -> None:
        """An armed event holds its object's file. Nothing reports munmap, so memfds and deleted files are looked at."""
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)
        self._engine.retry_cleanup()
        volatile = {
            key: armed.object
            for held in self._held.values()
            for key, armed in held.armed.items()
            if not is_host_file(armed.object, self._filesystems)
        }
        self._watcher.look_at({pid for key in volatile for pid in self._registry.mappings(key)})
        for held in list(self._held.values()):
            for found in [found for key, found in volatile.items() if key in held.armed]:
                self._consider(held, found)


class _Armed:
    """An object that was considered for a subscription: what the selectors choose of it, and what of that is armed."""

    def __init__(
        self, found: Object, selected_sites: tuple[SelectedSite, ...], armed: tuple[SelectedSite, ...]
    ) -> None:
        self.object = found
        self.selected_sites = selected_sites
        self.armed = armed


class _Held:
    """A subscription and what the control thread knows of it. barred: objects that it may not have for a while."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.armed: dict[ObjectKey, _Armed] = {}
        self.barred: dict[ObjectKey, Object] = {}
        self._by_file: dict[tuple[int, int], _Armed] = {}
        self.streams = 0
        self.lease: asyncio.TimerHandle | None = None

    def version_of(self, key: ObjectKey) -> _Armed | None:
        """The same file with what was in it before."""
        return self._by_file.get(_file(key))

    def add(self, armed: _Armed) -> None:
        key = armed.object.key
        self.armed[key] = self._by_file[_file(key)] = armed

    def pop(self, key: ObjectKey) -> _Armed:
        del self._by_file[_file(key)]
        return self.armed.pop(key)


def _bringer(pids: Iterable[int]) -> str:
    """Name the user whose process brought an object."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")


def _owner_of(client: Principal) -> str:
    return f"subscriptions of {client.name}"


def _file(key: ObjectKey) -> tuple[int, int]:
    return key.dev, key.inode


def _choices(spec: SubscriptionSpec, found: Object, mappings: dict[int, Mapping]) -> list[SelectedSite]:
    """What is wanted of an object that these processes map, if they do."""
    if not mappings:
        return []
    # a file with several names is one object, which is known by the first that was seen
    names = dict.fromkeys([found.path, *(mapping.path for mapping in mappings.values())])
    by_name = (choose(spec.selectors, name, found.parsed.sites) for name in names)
    return [selected for selected in next(filter(None, by_name), []) if _pids(spec.scope, selected) != frozenset()]


def _pids(scope: Scope, selected: SelectedSite) -> frozenset[int] | None:
    """Whose hits of a site count; None for everybody's."""
    if not scope.pids:
        return selected.pids
    return scope.pids if selected.pids is None else scope.pids & selected.pids


def _status(
    subscription: Subscription, state: SiteState, found: Object, selected: SelectedSite, reason: str = ""
) -> SiteStatus:
    return SiteStatus(state, subscription.site_id(found, selected), found, selected.capture.site, reason)
