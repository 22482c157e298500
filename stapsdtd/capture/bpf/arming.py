"""Arms and disarms an object's sites for a subscription: all at once, or in steps between which others have their turn.

arm_in_steps()   some sites:  plans ──► attached in some processes ──► ... in all ──► the next sites
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stapsdtd.capture.bpf.armed import ArmedObject, ArmedSite, Consumer, patched_in
from stapsdtd.capture.bpf.armed_objects import ArmedObjects
from stapsdtd.capture.bpf.consumers import Consumers
from stapsdtd.capture.bpf.groups import Groups
from stapsdtd.capture.bpf.missed import MissedCalls
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.prepared import NOTHING, Prepared
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.reconciler import Reconciler
from stapsdtd.capture.bpf.subscriptions import Subscriptions
from stapsdtd.capture.bpf.turns import MAX_EPHEMERAL
from stapsdtd.capture.engine import Refusal, SubscriptionKey, Target, TargetSite
from stapsdtd.model import Site
from stapsdtd.runtime.slices import Portion, Turn

_log = logging.getLogger(__name__)

_SITES_OF_EVENT = 1000
_LEAST_SITES_OF_LINK = 16
"""Each link takes a descriptor for every process that it is for, and a grace period when it is closed."""


class Arming:
    """Called from one thread."""

    def __init__(
        self,
        *,
        subscriptions: Subscriptions,
        objects: ArmedObjects,
        consumers: Consumers,
        groups: Groups,
        reconciler: Reconciler,
        reaper: EventReaper,
        missed: MissedCalls,
    ) -> None:
        self._subscriptions = subscriptions
        self._objects = objects
        self._consumers = consumers
        self._groups = groups
        self._reconciler = reconciler
        self._reaper = reaper
        self._missed = missed

    def arm_in_steps(self, subscription_key: SubscriptionKey, target: Target) -> Generator[None, None, list[Refusal]]:
        """Arm some sites at a time, each in some processes at a time."""
        if reason := self._why_not_armed(subscription_key, target):
            return [Refusal(wanted.site, reason) for wanted in target.sites]
        refusals: list[Refusal] = []
        portion = self._portion(target)
        first = 0
        while first < len(target.sites):
            part = replace(target, sites=target.sites[first : first + portion.count])
            first += len(part.sites)
            refusals += yield from self._arm_part(subscription_key, part, portion)
            yield
        return refusals

    def _portion(self, target: Target) -> Portion:
        """Return how many sites are armed at a time, which have to be removed together."""
        if target.object.is_kernel:
            # functions share a link
            return Portion(len(target.sites), len(target.sites), len(target.sites))
        if target.sites and self._groups.are_links(patched_in(target.sites[0].scope)):
            return Portion(_SITES_OF_EVENT, _LEAST_SITES_OF_LINK, _SITES_OF_EVENT)
        # each of the kernel's events takes 0.1 s to be removed
        return Portion(_SITES_OF_EVENT, _SITES_OF_EVENT, _SITES_OF_EVENT)

    def _arm_part(
        self, subscription_key: SubscriptionKey, target: Target, portion: Portion
    ) -> Generator[None, None, list[Refusal]]:
        armed, prepared, turn = self._objects.of(target), Prepared(), Turn()
        try:
            for wanted in target.sites:
                self._prepare(subscription_key, target, wanted, armed, prepared)
                if turn.is_over:
                    yield
                    turn.begin()
            turn.begin()
            with portion.measured():
                refusals = self.arm(subscription_key, target, prepared, turn)
        finally:
            self._reconciler.discard(prepared)
            self._objects.forget_unwanted(armed)
        subscription = self._subscriptions[subscription_key]
        sites = [armed.sites[wanted.site] for wanted in target.sites if wanted.site in armed.sites]
        unpatched = yield from self._reconciler.patch_in_steps(sites, subscription.owner)
        lost = [site for site in unpatched if subscription_key in site.consumers]
        if lost:
            self.release(subscription_key, lost, is_awaited=False)
            subscription.forget(armed.key, lost)
        return refusals + [Refusal(site.site, unpatched[site]) for site in lost]

    def _prepare(
        self,
        subscription_key: SubscriptionKey,
        target: Target,
        wanted: TargetSite,
        armed: ArmedObject,
        prepared: Prepared,
    ) -> None:
        """Make what a site takes to be armed, unless that fails now, without changing what is armed."""
        with contextlib.suppress(TableFullError, ValueError, OSError):
            consumer = prepared.consumers[wanted.site] = self._consumer(subscription_key, target, wanted)
            self._reconciler.prepare(ArmedObjects.preview(armed, wanted.site, subscription_key, consumer), prepared)

    def _consumer(self, subscription_key: SubscriptionKey, target: Target, wanted: TargetSite) -> Consumer:
        """Raises TableFullError, ValueError and OSError."""
        subscription = self._subscriptions[subscription_key]
        plan_ends = partial(self._plan_ends, subscription_key)
        return self._consumers.make(subscription.channel, subscription.owner, target, wanted, plan_ends)

    def _why_not_armed(self, subscription_key: SubscriptionKey, target: Target) -> str | None:
        reason = self._reaper.why_not(target.owner, MAX_EPHEMERAL) if target.is_ephemeral else None
        return reason or self._reaper.why_not(self._subscriptions[subscription_key].owner)

    def arm(
        self,
        subscription_key: SubscriptionKey,
        target: Target,
        prepared: Prepared = NOTHING,
        turn: Turn | None = None,
    ) -> list[Refusal]:
        """See `Engine.arm`. prepared: what was made for it before. turn: see `Groups.regroup`."""
        subscription = self._subscriptions[subscription_key]
        if reason := self._why_not_armed(subscription_key, target):
            return [Refusal(wanted.site, reason) for wanted in target.sites]
        if target.object.is_kernel:
            # of calls before this one, for those who were there
            self._missed.tell(self._objects.groups())
        armed = self._objects.of(target)
        subscription.channel.excluded |= target.exclude_pids | target.exclude_later
        refusals: dict[Site, str] = {}
        sites = []
        for wanted in target.sites:
            try:
                site = self._objects.site(armed, wanted.site)
                site.consumers[subscription_key] = prepared.consumers.get(wanted.site) or self._consumer(
                    subscription_key, target, wanted
                )
            except (TableFullError, ValueError, OSError) as error:
                refusals[wanted.site] = str(error)
            else:
                sites.append(site)
        try:
            refused = self._reconciler.reconcile(
                sites, subscription.owner, subscription_key, prepared=prepared, turn=turn
            )
        except BaseException:
            # do not try this one again whenever other subscriptions' wishes for these sites change
            self.release(subscription_key, sites, is_awaited=False)
            raise
        further = [site for site in sites if subscription_key in site.consumers]
        # some may be armed, for other processes
        subscription.sites[armed.key] = list(dict.fromkeys(subscription.sites.get(armed.key, []) + further))
        self._objects.forget_unwanted(armed)
        refusals |= {site.site: refused[site] for site in sites if site in refused}
        return [Refusal(site, reason) for site, reason in refusals.items()]

    def release_in_steps(
        self, subscription_key: SubscriptionKey, sites: Sequence[ArmedSite], turn: Turn
    ) -> Generator[None, None, None]:
        """Disarm sites for a subscription that is closed, and leave them armed for others."""
        self.release(subscription_key, sites, is_awaited=True, turn=turn)
        owner = self._subscriptions[subscription_key].owner
        _log_refused((yield from self._reconciler.patch_in_steps(sites, owner)))

    def renew(self, pid: int) -> None:
        """See `Engine.renew`."""
        for group in dict.fromkeys(self._objects.groups()):
            if group.scope is not None and pid in group.scope and not group.event.renew_in(pid):
                group.is_stale = True
                _log_refused(self._reconciler.reconcile(group.sites, group.sites[0].object.owner))

    def release(
        self,
        subscription_key: SubscriptionKey,
        sites: Sequence[ArmedSite],
        *,
        is_awaited: bool,
        turn: Turn | None = None,
    ) -> None:
        """Disarm sites for a subscription. is_awaited: see `Engine.disarm`. turn: see `Groups.regroup`."""
        if any(site.object.is_kernel for site in sites):
            self._missed.tell(self._objects.groups())
        for site in sites:
            # an earlier attempt that ran out of memory may have removed it
            site.consumers.pop(subscription_key, None)
        owner = self._subscriptions[subscription_key].owner
        _log_refused(self._reconciler.reconcile(sites, owner, is_awaited=is_awaited, turn=turn))
        for armed in {site.object for site in sites}:
            self._objects.forget_unwanted(armed)

    def _plan_ends(self, subscription_key: SubscriptionKey) -> None:
        """Raises TableFullError."""
        subscription = self._subscriptions[subscription_key]
        for reason in self._reconciler.reconcile(subscription.ends, subscription.owner).values():
            raise TableFullError(reason)


def _log_refused(refused: Mapping[ArmedSite, str]) -> None:
    for site, reason in refused.items():
        _log.warning("%s: %s stays armed as it was: %s", site.object.path, site.site.name, reason)
