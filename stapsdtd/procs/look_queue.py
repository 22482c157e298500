"""Decides which processes to look at, by what the kernel reported of them.

fork ────────────► forked, for a turn ──────────────────┐   most have executed another program or ended by then
exec, mapping ──────────────────────────────────────────┴──► due ──► a look
no time left, not readable, leader ended ──► later, for 0.1 s ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stapsdtd.kernel.perf import Mapped
from stapsdtd.kernel.procfs import ProcessStat
from stapsdtd.procs.process_maps import Look

_MAX_HELD_UP = 1000
"""Of processes that hold the lock of their maps, this many are remembered with their mappings, ..."""
_MAX_RECORDS = 100
"""... and of each the latest: some 30 MB at most."""
_MAX_FILES = 1000
"""Of one process that is due: it may map files without end before it is looked at. One record of each is enough."""
_TRACING_STOP = "t"

_Records = dict[tuple[int, int, str], Mapped]
"""By file."""


class LookQueue:
    """Processes are due with the mappings that the kernel reported, which tell what they mapped if they end first."""

    def __init__(self, stat: Callable[[int], ProcessStat | None], on_later: Callable[[], None]) -> None:
        """on_later: called when processes are to be looked at later, which they are once `resume` is called."""
        self._stat = stat
        self.on_later = on_later
        self._due: dict[int, _Records] = {}
        self._later: dict[int, _Records] = {}
        self._held_up: dict[int, list[Mapped]] = {}
        self._forked: dict[int, None] = {}
        self._threaded: set[int] = set()
        self._leaderless: set[int] = set()

    def first(self) -> int | None:
        """Return the process that is due first, or None if none is."""
        return next(iter(self._due), None)

    def due(self) -> list[int]:
        return list(self._due)

    def is_due(self, pid: int) -> bool:
        return pid in self._due

    def forked_lately(self) -> list[int]:
        """Return the processes that were forked and are not due yet."""
        return list(self._forked)

    def add(self, pid: int, *records: Mapped) -> None:
        """Have a process looked at."""
        _gather(self._due.setdefault(pid, {}), records)

    def add_later(self, pid: int, *records: Mapped) -> None:
        """Have a process looked at later, also if it is looked at before."""
        _gather(self._later.setdefault(pid, {}), records)
        self.on_later()

    def resume(self) -> None:
        """Have those looked at that are to be looked at later."""
        later, self._later = self._later, {}
        for pid, records in later.items():
            _merge(self._due, pid, records)
            if pid in self._leaderless:
                self.add_later(pid)

    def defer(self, pid: int) -> None:
        """Have a process that is due looked at later instead."""
        _merge(self._later, pid, self._due.pop(pid, {}))
        self.on_later()

    def take(self, pid: int) -> list[Mapped]:
        """Remove a process that is looked at now. Return its mappings that the kernel reported."""
        return [*self._held_up.pop(pid, []), *self._due.pop(pid, {}).values()]

    def hold_up(self, pid: int, records: list[Mapped]) -> None:
        """Remember the mappings of a process that cannot be looked at until something makes it due again."""
        if records and len(self._held_up) < _MAX_HELD_UP:
            self._held_up[pid] = records[-_MAX_RECORDS:]

    def forked(self, tid: int, pid: int) -> None:
        if tid == pid:
            self._forked[pid] = None
        else:
            self._threaded.add(pid)

    def settle_forks(self, pids: Iterable[int]) -> None:
        """Have processes looked at that were forked a turn ago, unless they have executed a program or ended since.

        Nothing is missed meanwhile: a child maps what its parent does until the kernel reports that it maps more.
        """
        for pid in pids:
            if pid in self._forked:
                del self._forked[pid]
                self.add(pid)

    def executed(self, pid: int) -> None:
        self._forked.pop(pid, None)
        self._leaderless.discard(pid)
        self.add(pid)

    def exited(self, tid: int, pid: int) -> bool:
        """Report whether the process has ended: a leader's exit is reported before it is a zombie, and other threads
        may outlive it.
        """
        if tid != pid:
            if pid in self._leaderless:
                self.add(pid)
            return False
        self._forked.pop(pid, None)
        if pid in self._threaded:
            stat = self._stat(pid)
            if stat is not None and stat.threads > 1:
                self._leaderless.add(pid)
                self.add_later(pid)
                return False
            if stat is not None and stat.state == _TRACING_STOP:
                # another thread executed a program and is the leader now; exec is reported once the tracer resumes it
                self.add(pid)
                return False
        self.forget_threads(pid)
        return True

    def looked(self, pid: int, look: Look) -> None:
        """Learn from a look at a process, and have it looked at again if that is necessary."""
        if not look.threads:
            self.forget_threads(pid)
        elif look.threads > 1:
            self._threaded.add(pid)
        # its exit may have been reported already; or the rest comes after other users' turns
        if look.is_unsettled or look.is_partial:
            self.add_later(pid)

    def forget_threads(self, pid: int) -> None:
        """Forget what is known of a process's threads, since it has ended."""
        self._threaded.discard(pid)
        self._leaderless.discard(pid)


def _merge(waiting: dict[int, _Records], pid: int, records: _Records) -> None:
    """Add a process. Those of a user who has no time left go back and forth, and may have many records."""
    if pid in waiting:
        _gather(waiting[pid], records.values())
    else:
        waiting[pid] = records


def _gather(known: _Records, records: Iterable[Mapped]) -> None:
    for record in records:
        file = record.dev, record.inode, record.path
        if file not in known and len(known) >= _MAX_FILES:
            del known[next(iter(known))]
        known[file] = record
