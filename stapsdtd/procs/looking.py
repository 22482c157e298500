"""Looks at the processes that are due, within their users' shares of time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple

from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel.perf import Mapped
from stapsdtd.procs.budgets import NOBODY, CpuBudget, user_or_nobody
from stapsdtd.procs.look_queue import LookQueue
from stapsdtd.procs.process_maps import ProcessMaps
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.logs import fields

_log = logging.getLogger(__name__)

_ENDED_SECONDS = 0.1
"""For the files of a process that has ended, whoever's."""
_MOST_ENDED = 1000
"""Processes that have ended, of which some mapped files that nobody has looked at."""


class _Ended(NamedTuple):
    """A process, the user that it counts for, and what it had mapped. is_known: whether it is known whose it was."""

    pid: int
    user: int
    records: Sequence[Mapped]
    is_known: bool = True


class Looker:
    """Called from one thread.

    latency: of a look at a process, parsing included; any thread may read it.
    """

    def __init__(self, queue: LookQueue, maps: ProcessMaps) -> None:
        self._queue = queue
        self._maps = maps
        self._cpu = CpuBudget()
        self._ended: deque[_Ended] = deque(maxlen=_MOST_ENDED)
        self._ended_later: deque[_Ended] = deque(maxlen=_MOST_ENDED)
        self.latency = Latency()

    def charge(self, user: int, seconds: float) -> None:
        """Charge a user for time that another thread spent on its processes."""
        self._cpu.charge(user, seconds)

    def ended(self, pid: int, records: Sequence[Mapped]) -> None:
        """Look at the files of a process that has ended, in a turn to come."""
        if records:
            # it may be a zombie still
            user = user_or_nobody(pid)
            self._ended.append(_Ended(pid, user, records, is_known=user != NOBODY))

    def resume(self) -> None:
        """Have those looked at whose users had no time left."""
        self._ended.extend(self._ended_later)
        self._ended_later.clear()

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or self._queue.first() is not None

    def look_until(self, deadline: float | None) -> None:
        """Look at processes until none is due, or the deadline has passed."""
        while True:
            if self._ended:
                self._look_at_ended(self._ended.popleft())
            elif (pid := self._queue.first()) is not None:
                self.look_at(pid)
            else:
                break
            if deadline is not None and time.monotonic() > deadline:
                break

    def look_at_those_of(self, users: Container[int], pids: Container[int], deadline: float) -> bool:
        """Look at processes that are due and of some users, or among pids, until the deadline has passed.

        Return whether that was all of them.
        """
        for pid in self._queue.due():
            if pid in pids or user_or_nobody(pid) in users:
                self.look_at(pid)
                if time.monotonic() > deadline:
                    return False
        return True

    def _look_at_ended(self, ended: _Ended) -> None:
        if not ended.is_known:
            # but whose files it mapped may be
            with self._cpu.taken(NOBODY):
                self._ended.extend(_Ended(ended.pid, *each) for each in self._maps.by_owners(ended.records).items())
            return
        if self._cpu.left(ended.user) <= 0:
            self._ended_later.append(ended)
            self._queue.on_later()
            return
        with self._cpu.taken(ended.user):
            seconds = min(self._cpu.slice(ended.user), _ENDED_SECONDS)
            self._maps.register_ended(ended.pid, ended.user, ended.records, seconds)

    def look_at(self, pid: int) -> None:
        """Look at a process, or later if its user has no time left or it cannot be read now."""
        user = user_or_nobody(pid)
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
