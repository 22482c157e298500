"""Whose a subscription is, and what all of one client's subscriptions share."""

from __future__ import annotations

import threading

from stapsdtd.config import NO_QUOTAS, Quotas
from stapsdtd.errors import LimitReachedError
from stapsdtd.sessions.token_bucket import TokenBucket


class Principal:
    """Belongs to the control thread but for events and sites, which any thread may use.

    subscriptions, queue_bytes, sites: what it has now. events: what it may have a second; None for no bound.
    """

    def __init__(self, name: str = "", quotas: Quotas = NO_QUOTAS) -> None:
        self.name = name
        self.quotas = quotas
        self.subscriptions = 0
        self.queue_bytes = 0
        self.sites = 0
        self.events = _bucket(quotas)
        self._lock = threading.Lock()

    def change_quotas(self, quotas: Quotas) -> None:
        """What it has beyond them it may keep."""
        if quotas != self.quotas:
            self.quotas = quotas
            self.events = _bucket(quotas)

    def begin(self, queue_bytes: int, ended_bytes: int = 0) -> None:
        """Count one more subscription. ended_bytes: what those that ended still hold. Raises LimitReachedError."""
        most, most_bytes = self.quotas.max_subscriptions, self.quotas.max_queue_bytes
        if most is not None and self.subscriptions >= most:
            raise LimitReachedError(f"{self.name} has {most} subscriptions, as many as its role allows")
        wanted = self.queue_bytes + queue_bytes + ended_bytes
        if most_bytes is not None and wanted > most_bytes:
            raise LimitReachedError(f"{self.name}'s queues would take {wanted} bytes, and its role allows {most_bytes}")
        self.subscriptions += 1
        self.queue_bytes += queue_bytes

    def end(self, queue_bytes: int) -> None:
        self.subscriptions -= 1
        self.queue_bytes -= queue_bytes

    def take_sites(self, wanted: int) -> int:
        """Count more sites as armed. Return how many of those wanted the quota allows."""
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
        most = self.quotas.max_sites
        return None if most is None else max(most - self.sites, 0)


def _bucket(quotas: Quotas) -> TokenBucket | None:
    most = quotas.max_events_per_second
    return None if most is None else TokenBucket(most)
