"""A client as the owner of subscriptions, and the quotas that its subscriptions share."""

from __future__ import annotations

import threading

from stapsdtd.config import NO_QUOTAS, Quotas
from stapsdtd.errors import LimitReachedError
from stapsdtd.sessions.token_bucket import TokenBucket


class Principal:
    """Belongs to the control thread, except for events and sites, which any thread may use.

    subscriptions, queue_bytes, sites: in use now. events: how many a second it may have; None for no limit.
    """

    def __init__(self, name: str = "", quotas: Quotas = NO_QUOTAS) -> None:
        self.name = name
        self.quotas = quotas
        self.subscriptions = 0
        self.queue_bytes = 0
        self.sites = 0
        self.events = _event_bucket(quotas)
        self._lock = threading.Lock()

    def change_quotas(self, quotas: Quotas) -> None:
        """Set new quotas. What the client has beyond them it keeps."""
        if quotas != self.quotas:
            self.quotas = quotas
            self.events = _event_bucket(quotas)

    def begin(self, queue_bytes: int, ended_bytes: int = 0) -> None:
        """Count one more subscription. ended_bytes: still held by those that ended. Raises LimitReachedError."""
        limit, byte_limit = self.quotas.max_subscriptions, self.quotas.max_queue_bytes
        if limit is not None and self.subscriptions >= limit:
            text = f"{self.name} has {limit} subscriptions, as many as its role allows"
            raise LimitReachedError(text, "max_subscriptions")
        wanted = self.queue_bytes + queue_bytes + ended_bytes
        if byte_limit is not None and wanted > byte_limit:
            text = f"{self.name}'s queues would take {wanted} bytes, and its role allows {byte_limit}"
            raise LimitReachedError(text, "max_queue_bytes", "queue_bytes")
        self.subscriptions += 1
        self.queue_bytes += queue_bytes

    def end(self, queue_bytes: int) -> None:
        self.subscriptions -= 1
        self.queue_bytes -= queue_bytes

    def take_sites(self, wanted: int) -> int:
        """Count more sites as armed, as far as the quota allows. Return how many."""
        with self._lock:
            left = self.sites_left
            granted = wanted if left is None else min(wanted, left)
            self.sites += granted
            return granted

    def free_sites(self, count: int) -> None:
        with self._lock:
            self.sites -= count

    @property
    def sites_left(self) -> int | None:
        limit = self.quotas.max_sites
        return None if limit is None else max(limit - self.sites, 0)


def _event_bucket(quotas: Quotas) -> TokenBucket | None:
    rate = quotas.max_events_per_second
    return None if rate is None else TokenBucket(rate)
