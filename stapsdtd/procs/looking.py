"""Looks at the processes that are due, within their users' shares of time."""

from __future__ import annotations

import logging
import time

from stapsdtd.errors import ObjectPendingError
from stapsdtd.procs.budgets import CpuBudget, user_of
from stapsdtd.procs.look_queue import LookQueue
from stapsdtd.procs.process_maps import ProcessMaps
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.logs import fields

_log = logging.getLogger(__name__)


class Looker:
    """Called from one thread.

    latency: of a look at a process, parsing included; any thread may read it.
    """

    def __init__(self, queue: LookQueue, maps: ProcessMaps) -> None:
        self._queue = queue
        self._maps = maps
        self._cpu = CpuBudget()
        self.latency = Latency()

    def charge(self, user: int, seconds: float) -> None:
        """Charge a user for time that another thread spent on its processes."""
        self._cpu.charge(user, seconds)

    def look_until(self, deadline: float | None) -> None:
        """Look at processes until none is due, or the deadline has passed."""
        while (pid := self._queue.first()) is not None:
            self.look_at(pid)
            if deadline is not None and time.monotonic() > deadline:
                break

    def look_at(self, pid: int) -> None:
        """Look at a process, or later if its user has no time left or it cannot be read now."""
        user = user_of(pid)
        if self._cpu.left(user) <= 0:
            self._queue.defer(pid)
            return
        records = self._queue.take(pid)
        try:
            with self.latency.measured(), self._cpu.taken(user):
                self._queue.looked(pid, self._maps.look_at(pid, user, records, self._cpu.slice(user)))
        except ObjectPendingError:
            # `Watcher.parsed` is called when it is worth another look
            self._queue.hold_up(pid, records)
        except OSError as error:
            _log.warning("pid %d: cannot read its mappings, trying again: %s", pid, error, extra=fields(uid=user))
            self._queue.add_later(pid, *records)
