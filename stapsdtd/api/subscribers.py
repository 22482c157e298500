"""Who made which subscription, and who may use it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from stapsdtd.api.access import Caller, Gate
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import Peer
from stapsdtd.errors import UnknownSubscriptionError
from stapsdtd.model import Object
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.sessions.installed import credentials_of
from stapsdtd.sessions.live import FirstArming
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.sessions.subscription import EndReason, Subscription
from stapsdtd.sessions.subscriptions import Subscriptions


class Subscribers:
    """Runs on the API's event loop, except as noted."""

    def __init__(self, subscriptions: Subscriptions, gate: Gate) -> None:
        self._subscriptions = subscriptions
        self._gate = gate
        self._peers: WeakKeyDictionary[Subscription, Peer] = WeakKeyDictionary()

    def subscribe(
        self,
        spec: SubscriptionSpec,
        peer: Peer,
        files: Sequence[NamedFile] = (),
        functions: Sequence[Object] = (),
    ) -> tuple[Subscription, FirstArming]:
        """Subscribe with the rights that the peer has now; see `Subscriptions.subscribe`. Runs in the control thread.

        Raises AccessDeniedError, LimitReachedError and ServerStoppingError.
        """
        # by the current policy, since a change that was applied before this would not be applied again
        rights = self._gate.policy.rights(peer)
        rights.check_trace(spec.scope.pids)
        if functions:
            rights.check_functions()
        allowed = replace(spec, owners=rights.trace, subscriber_pid=peer.pid, has_functions=bool(functions))
        allowed = replace(allowed, credentials=credentials_of(rights.client, allowed, peer.uid, peer.groups))
        subscription, first = self._subscriptions.subscribe(allowed, rights.client, rights.quotas, files, functions)
        self._peers[subscription] = peer
        return subscription, first

    def abandon(self, subscriptions: Iterable[Subscription]) -> None:
        """End subscriptions whose clients never learned of them. Runs in the control thread."""
        for subscription in subscriptions:
            self._subscriptions.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)

    def find(self, ident: str, caller: Caller) -> Subscription:
        """Raises UnknownSubscriptionError, also for another client's subscription: its existence is not revealed."""
        subscription = self._subscriptions.get(ident)
        owner = None if subscription.client.name == caller.rights.client else subscription.client.name
        # the subscriber may still read the End, and what fired before, after its rights were revoked
        is_subscriber = self._peers.get(subscription) == caller.peer
        if not is_subscriber and not caller.rights.may_use(subscription):
            caller.record_refusal("more than allowed", subscription=ident, owner=owner)
            raise UnknownSubscriptionError(ident)
        caller.log(logging.INFO, "allowed", subscription=ident, owner=owner)
        return subscription

    def revoke(self, policy: Policy) -> int:
        """End the subscriptions that policy does not allow, and return their number. Runs in the control thread."""

        def is_allowed(subscription: Subscription) -> bool:
            peer = self._peers.get(subscription)
            rights = policy.rights_or_none(peer) if peer else None
            if rights is not None:
                subscription.client.change_quotas(rights.quotas)
            return rights is not None and rights.allow(subscription.spec)

        return self._subscriptions.revoke(is_allowed)
