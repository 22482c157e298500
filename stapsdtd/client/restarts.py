"""What a subscription needs to go on after a restart of the server, which knows nothing of it then."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

RESTART_SECONDS = 120
"""How long a server is waited for that was restarted: an upgrade of its package takes less."""

_START_TIME = 19
"""The place of starttime in /proc/PID/stat behind the command, which may contain anything; see proc_pid_stat(5)."""


class Resubscription:
    """The request to subscribe again, and the numbers of its sites.

    A server numbers sites from 1. Those of a later subscription get numbers that no earlier one had, so that whoever
    keeps something by `site_id` need not know of restarts.
    """

    def __init__(self, request: pb.SubscribeRequest, *, is_local: bool) -> None:
        """is_local: whether processes of the server's host are this host's."""
        self._request = pb.SubscribeRequest()
        self._request.CopyFrom(request)
        # what matched before may appear again
        self._request.require_match = False
        self._processes = ScopedProcesses(request.scope.pids, follow=request.scope.follow) if is_local else None
        self._instance = ""
        self._last_site_id = 0
        self._shift = 0

    def begin(self, response: pb.SubscribeResponse) -> None:
        """Note what a server responded, and number its sites."""
        self._instance = response.instance
        self._shift = self._last_site_id
        self._renumber(response.sites)

    def is_of_same_server(self, response: pb.SubscribeResponse) -> bool:
        """Report whether the server has not been restarted since `begin`, as far as it tells."""
        return bool(response.instance) and response.instance == self._instance

    def interrupted(self) -> None:
        """Look which processes are followed, before more of them end."""
        if self._processes is not None:
            self._processes.look()

    def request(self) -> pb.SubscribeRequest | None:
        """Return what to ask for, of the processes that still run; None if there are none left."""
        pids = None if self._processes is None else self._processes.running()
        if pids is None:
            return self._request
        if not pids:
            return None
        request = pb.SubscribeRequest()
        request.CopyFrom(self._request)
        request.scope.pids[:] = pids
        return request

    def read(self, response: pb.StreamResponse) -> None:
        """Number the sites of a message."""
        match response.WhichOneof("payload"):
            case "descriptions":
                self._renumber(each for probe in response.descriptions.probes for each in probe.probe.sites)
            case "status":
                self._renumber(response.status.sites)
            case "columns" if self._shift:
                for block in response.columns.blocks:
                    form = f"<{len(block.site_id) // 4}I"
                    numbers = struct.unpack(form, block.site_id)
                    block.site_id = struct.pack(form, *(number + self._shift for number in numbers))

    def _renumber(self, sites: Iterable[pb.Site] | Iterable[pb.SiteStatus]) -> None:
        for site in sites:
            site.site_id += self._shift
            self._last_site_id = max(self._last_site_id, site.site_id)


class ScopedProcesses:
    """Processes by pid, and those that they forked, as far as their parents are there when it is looked.

    A pid may be another process's by the time that the server is back, which its start time tells.
    """

    def __init__(self, pids: Iterable[int], *, follow: bool) -> None:
        self._follow = follow
        self._started = {pid: _started(pid) for pid in pids}
        # the server's pids may be of another namespace
        self._is_known = bool(self._started) and None not in self._started.values()

    def look(self) -> None:
        pids = list(self._started) if self._follow else []
        while pids:
            children = [each for each in _children(pids.pop()) if each not in self._started]
            self._started |= {each: _started(each) for each in children}
            pids += children

    def running(self) -> list[int] | None:
        """Return the pids of those that still run; None if it is not known."""
        if not self._is_known:
            return None
        return [pid for pid, started in self._started.items() if started is not None and _started(pid) == started]


def _started(pid: int) -> str | None:
    """Return when a process began, in ticks since the host's start; None if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if state in {"Z", "X"} else fields[_START_TIME - 1]
    return None


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children
