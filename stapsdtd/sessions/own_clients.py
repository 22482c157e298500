"""The daemon's own clients. Two of them that print each other's events would make each other fire without end."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np

from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import I32, Bools, Comms

_COMMAND = b"stapsdt"
"""What the command's threads are called from exec on: all of its imports come before it connects."""
_COMMAND_WORD = np.uint64(int.from_bytes(_COMMAND.ljust(8, b"\0"), sys.byteorder))


class ConnectedClients:
    """Which processes are connected by unix sockets. For any thread.

    pids: in rising order. Replaced, never changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: Counter[int] = Counter()
        self.pids: I32 = np.array([], np.int32)

    def joined(self, pid: int) -> None:
        """Count one more connection of a process."""
        self._count(pid, 1)

    def left(self, pid: int) -> None:
        """Count one connection less."""
        self._count(pid, -1)

    def _count(self, pid: int, change: int) -> None:
        with self._lock:
            self._connections[pid] += change
            self._connections += Counter()
            self.pids = np.array(sorted(self._connections), np.int32)


class ClientFilter:
    """Leaves out events of clients and of the command `stapsdt`, except for those of some processes."""

    def __init__(self, clients: ConnectedClients, wanted: Iterable[int]) -> None:
        """wanted: processes whose events are kept."""
        self._clients = clients
        self._wanted = np.array(sorted(wanted), np.int32)
        self._pids = clients.pids
        self._unwanted = self._unwanted_of(clients.pids)

    def rest(self, batch: EventBatch) -> EventBatch:
        pids = self._clients.pids
        if pids is not self._pids:
            self._pids, self._unwanted = pids, self._unwanted_of(pids)
        of_clients = _is_command(batch.comm)
        if np.count_nonzero(of_clients):
            of_clients &= ~_among(batch.pid, self._wanted)
        if len(self._unwanted):
            of_clients |= _among(batch.pid, self._unwanted)
        return batch.take(np.flatnonzero(~of_clients)) if np.count_nonzero(of_clients) else batch

    def _unwanted_of(self, pids: I32) -> I32:
        # numpy.setdiff1d would import numpy.ma, while the first client waits
        return pids[~_among(pids, self._wanted)]


def _is_command(comms: Comms) -> Bools:
    """Compare 8 bytes at once, which is many times faster than comparing strings."""
    words = np.ascontiguousarray(comms).view(np.uint64)
    is_command: Bools = words[::2] == _COMMAND_WORD
    return is_command & (words[1::2] == 0) if np.count_nonzero(is_command) else is_command


def _among(pids: I32, some: I32) -> Bools:
    """Report which pids are in some, which is sorted. Faster than numpy.isin for more than a few."""
    if not len(some):
        return np.zeros(len(pids), np.bool_)
    found: Bools = some[np.minimum(np.searchsorted(some, pids), len(some) - 1)] == pids
    return found
