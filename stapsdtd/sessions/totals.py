"""Totals over all subscriptions since the daemon started, those that ended included."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.subscription import Subscription


@dataclass(frozen=True, slots=True)
class SessionMetrics:
    """subscriptions and queue bytes: of live ones. account: of all that ever were; its sites mean nothing.

    unread: events that ended subscriptions had in flight when their logs were dropped, which are in no account.
    """

    subscriptions: int
    account: Account
    unread: int
    queue_unread_bytes: int
    queue_limit_bytes: int


class AccountTotals:
    """Adds up the subscriptions' accounts. Changed by the control thread; any thread may call metrics().

    Events cost nothing here: each subscription counts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Subscription] = set()
        self._ended: set[Subscription] = set()
        self._past = Account()
        self._unread = 0

    def began(self, subscription: Subscription) -> None:
        with self._lock:
            self._live.add(subscription)

    def ended(self, subscription: Subscription) -> None:
        """Count it as live no more; events in flight may still be delivered."""
        with self._lock:
            self._live.discard(subscription)
            self._ended.add(subscription)

    def settle(self, subscription: Subscription) -> None:
        """Add an ended subscription's account for good: it does not change any more."""
        with self._lock:
            self._ended.discard(subscription)
            account = subscription.account()
            self._past = self._past + replace(account, in_flight=0)
            self._unread += account.in_flight

    def metrics(self) -> SessionMetrics:
        with self._lock:
            account = sum((each.account() for each in self._live | self._ended), self._past)
            return SessionMetrics(
                len(self._live),
                account,
                self._unread,
                sum(clause.log.unread_bytes for each in self._live for clause in each.clauses),
                sum(each.spec.queue_bytes for each in self._live),
            )
