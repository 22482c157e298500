"""What became of all events since the daemon began, of subscriptions that ended too."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.subscription import Subscription


@dataclass(frozen=True, slots=True)
class SessionMetrics:
    """subscriptions: of those that live. account: of all that ever lived; its sites mean nothing.

    unread: what ended subscriptions had in flight when nobody could read it any more, which is in no account.
    """

    subscriptions: int
    account: Account
    unread: int
    queue_unread_bytes: int
    queue_limit_bytes: int


class AccountTotals:
    """The control thread tells what begins and ends; any thread may ask for the metrics.

    Nothing is counted here when an event comes: each subscription has its account.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Subscription] = set()
        self._ended: set[Subscription] = set()
        self._past = _NOTHING
        self._unread = 0

    def began(self, subscription: Subscription) -> None:
        with self._lock:
            self._live.add(subscription)

    def ended(self, subscription: Subscription) -> None:
        """What it has in flight may still be delivered."""
        with self._lock:
            self._live.discard(subscription)
            self._ended.add(subscription)

    def settle(self, subscription: Subscription) -> None:
        """Its account will not change any more."""
        with self._lock:
            self._ended.discard(subscription)
            account = subscription.account()
            self._past = _sum(self._past, replace(account, in_flight=0))
            self._unread += account.in_flight

    def metrics(self) -> SessionMetrics:
        with self._lock:
            account = self._past
            for subscription in self._live | self._ended:
                account = _sum(account, subscription.account())
            return SessionMetrics(
                len(self._live),
                account,
                self._unread,
                sum(subscription.log.unread_bytes for subscription in self._live),
                sum(subscription.spec.queue_bytes for subscription in self._live),
            )


_NOTHING = Account(0, 0, 0, 0, 0, 0, 0, 0)


def _sum(one: Account, other: Account) -> Account:
    return Account(
        delivered=one.delivered + other.delivered,
        filtered=one.filtered + other.filtered,
        lost_kernel_buffer=one.lost_kernel_buffer + other.lost_kernel_buffer,
        lost_queue=one.lost_queue + other.lost_queue,
        lost_decode=one.lost_decode + other.lost_decode,
        lost_quota=one.lost_quota + other.lost_quota,
        in_flight=one.in_flight + other.in_flight,
        sites=0,
    )
