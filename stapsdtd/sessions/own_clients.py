"""The daemon's own clients: two that print each other's events would have each other fire on and on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from stapsdtd.events.columns import I32, Block, Bools

_COMMAND = b"stapsdt"
"""What the command's threads are called from exec on: all of its imports come before it connects."""


class ConnectedClients:
    """Which processes are connected by unix sockets. pids: in order; as all of this, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: Counter[int] = Counter()
        self.pids: I32 = np.array([], np.int32)

    def joined(self, pid: int) -> None:
        """Count one more connection of a process."""
        self._count(pid, 1)

    def left(self, pid: int) -> None:
        self._count(pid, -1)

    def _count(self, pid: int, change: int) -> None:
        with self._lock:
            self._connections[pid] += change
            self._connections += Counter()
            self.pids = np.array(sorted(self._connections), np.int32)


class ClientFilter:
    """Takes events of clients and of the command `stapsdt` out of one subscription's, but for processes in wanted."""

    def __init__(self, clients: ConnectedClients, wanted: Iterable[int]) -> None:
        self._clients = clients
        self._wanted = np.array(sorted(wanted), np.int32)

    def rest(self, blocks: Sequence[Block]) -> Sequence[Block]:
        clients = np.setdiff1d(self._clients.pids, self._wanted)
        kept = []
        for block in blocks:
            of_clients = _among(block.pid, clients) | ((block.comm == _COMMAND) & ~_among(block.pid, self._wanted))
            if not of_clients.any():
                kept.append(block)
            elif not of_clients.all():
                kept.append(block.take(np.flatnonzero(~of_clients)))
        return kept


def _among(pids: I32, some: I32) -> Bools:
    """Faster than numpy's isin for more than a few."""
    if not len(some):
        return np.zeros(len(pids), np.bool_)
    found: Bools = some[np.minimum(np.searchsorted(some, pids), len(some) - 1)] == pids
    return found
