"""Counts open connections, and admits new ones within the limits."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from stapsdtd.api.access import Gate
from stapsdtd.api.rights import Peer
from stapsdtd.errors import AccessDeniedError
from stapsdtd.sessions.token_bucket import TokenBuckets

ATTEMPTS_PER_SECOND = 50
"""To connect, by each client that has a quota of connections: who is disconnected may connect again at once."""
DISCONNECTED_ATTEMPTS = 10
"""What it costs a client to be disconnected for its frames."""
_MAX_HELD, _MAX_CLIENT_HELD = 256, 32
_HELD_SECONDS = 1.0


class OpenConnections:
    """Runs on the API's event loop; any thread may read `count` and `clients`."""

    def __init__(self, gate: Gate, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._limit = limit
        self._attempts = TokenBuckets(clock)
        self._by_client: Counter[str] = Counter()
        self.count = 0

    @property
    def clients(self) -> int:
        """The number of distinct clients that are connected."""
        return len(self._by_client)

    @property
    def client_names(self) -> list[str]:
        """The names of the clients that are connected. Any thread may read this."""
        return list(self._by_client)

    def take_attempt(self, peer: Peer) -> None:
        """Raises AccessDeniedError if the peer connects too often, or no role applies to it."""
        quota = self._gate.policy.rights(peer).quotas.max_connections
        if quota is not None and not self._attempts.take(peer.client, ATTEMPTS_PER_SECOND):
            raise AccessDeniedError(f"{peer.client} connects more than {ATTEMPTS_PER_SECOND} times a second", "connect")

    def take_disconnected(self, peer: Peer) -> None:
        """Take further attempts of a client that was disconnected, so that it waits before it goes on."""
        self._attempts.take(peer.client, ATTEMPTS_PER_SECOND, DISCONNECTED_ATTEMPTS)

    def admit(self, peer: Peer) -> AbstractContextManager[None]:
        """Return a context in which the connection is counted.

        Raises AccessDeniedError if there are too many connections, or no role applies to the peer.
        """
        quota = self._gate.policy.rights(peer).quotas.max_connections
        if quota is not None and self._by_client[peer.client] >= quota:
            raise AccessDeniedError(f"{peer.client} has {quota} connections, as many as its role allows", "connect")
        # clients with a quota cannot together lock out those without one
        limit = self._limit - (self._limit // 8 if quota is not None else 0)
        if self.count >= limit:
            raise AccessDeniedError(f"there are {self.count} connections, as many as this server allows", "connect")
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


class HeldConnections:
    """Refused connections that stay open and unread for a second: whoever waits for an answer connects less often."""

    def __init__(self) -> None:
        self._clients: dict[socket.socket, str] = {}
        self._by_client: Counter[str] = Counter()

    def hold(self, connection: socket.socket, client: str) -> bool:
        """Close a connection in a second, or at once if many are held already. Report whether it is held."""
        if len(self._clients) >= _MAX_HELD or self._by_client[client] >= _MAX_CLIENT_HELD:
            connection.close()
            return False
        self._clients[connection] = client
        self._by_client[client] += 1
        asyncio.get_running_loop().call_later(_HELD_SECONDS, self._close, connection)
        return True

    def close_all(self) -> None:
        for connection in list(self._clients):
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        client = self._clients.pop(connection, None)
        if client is not None:
            connection.close()
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
