"""The probes of a watch, across streams."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stapsdtd.client.messages import Resubscribed
from stapsdtd.client.probes import Probe, ProbeAdded, ProbeRemoved, SnapshotComplete

if TYPE_CHECKING:
    from stapsdtd.client.probes import WatchMessage

_Key = tuple[str, str, str, str | None, tuple[int, ...]]


class WatchedProbes:
    """Finds out what changed between two streams, each of which begins with all probes."""

    def __init__(self) -> None:
        self._known: dict[_Key, Probe] = {}
        self._found: dict[_Key, Probe] | None = None
        self._ended_ns = 0

    def interrupted(self) -> None:
        """Compare what the next stream begins with."""
        self._ended_ns = self._ended_ns or time.time_ns()
        self._found = {}

    def read(self, message: WatchMessage) -> tuple[WatchMessage, ...]:
        """Return what a message of the stream means for whoever knows the ones before."""
        probes = self._known if self._found is None else self._found
        match message:
            case ProbeAdded(probe):
                probes[_key(probe)] = probe
            case ProbeRemoved(probe):
                probes.pop(_key(probe), None)
            case SnapshotComplete() if self._found is not None:
                return self._changes(self._found)
        return (message,) if self._found is None else ()

    def _changes(self, found: dict[_Key, Probe]) -> tuple[WatchMessage, ...]:
        known, self._known, self._found = self._known, found, None
        ended_ns, self._ended_ns = self._ended_ns, 0
        return (
            Resubscribed(ended_ns, time.time_ns(), None),
            *(ProbeRemoved(probe) for key, probe in known.items() if key not in found),
            *(ProbeAdded(probe) for key, probe in found.items() if key not in known),
        )


def _key(probe: Probe) -> _Key:
    return probe.provider, probe.name, probe.path, probe.build_id, probe.pids
