"""Counts open connections, and admits new ones within the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from stapsdtd.api.access import Gate
from stapsdtd.api.rights import Peer
from stapsdtd.errors import AccessDeniedError


class OpenConnections:
    """Runs on the API's event loop; any thread may read `count` and `clients`."""

    def __init__(self, gate: Gate, limit: int) -> None:
        self._gate = gate
        self._limit = limit
        self._by_client: Counter[str] = Counter()
        self.count = 0

    @property
    def clients(self) -> int:
        """The number of distinct clients that are connected."""
        return len(self._by_client)

    def admit(self, peer: Peer) -> AbstractContextManager[None]:
        """Return a context in which the connection is counted.

        Raises AccessDeniedError if there are too many connections, or no role applies to the peer.
        """
        quota = self._gate.policy.rights(peer).quotas.max_connections
        if quota is not None and self._by_client[peer.client] >= quota:
            raise AccessDeniedError(f"{peer.client} has {quota} connections, as many as its role allows")
        # clients with a quota cannot together lock out those without one
        limit = self._limit - (self._limit // 8 if quota is not None else 0)
        if self.count >= limit:
            raise AccessDeniedError(f"there are {self.count} connections, as many as this server allows")
        return self._counted(peer)

    @contextmanager
    def _counted(self, peer: Peer) -> Iterator[None]:
        self.count += 1
        self._by_client[peer.client] += 1
        try:
            yield
        finally:
            self.count -= 1
            self._by_client[peer.client] -= 1
            if not self._by_client[peer.client]:
                del self._by_client[peer.client]
