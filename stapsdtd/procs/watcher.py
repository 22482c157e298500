"""Keeps the registry up to date with /proc.

    rings, connector ──► collect: which processes changed ──► look at each once ──► Registry
          ▲                                                        │
          └── 2 ms later, while there is anything to collect ◄─────┘  otherwise wait to be woken

On a quiet host a process is looked at as soon as something happens. On a busy one that is done every 2 ms, so that a
process that forks, executes and maps its libraries costs one look, and one that has ended by then costs none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from stapsdtd.catalog.registry import Registry
from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessEvent
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.perf import Lost, Mapped
from stapsdtd.model import Object
from stapsdtd.procs.budgets import CpuBudget, user_of
from stapsdtd.procs.copies import FileCopies
from stapsdtd.procs.file_keys import may_lead_to
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.objects import ObjectStore, Parse
from stapsdtd.procs.parsed_files import ParsedFiles
from stapsdtd.procs.process_maps import ProcessMaps
from stapsdtd.procs.threads import Threads
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.timer import Timer

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.002
_TURN_SECONDS = 0.005
_RESCAN_SECONDS = 1.0
_RECHECK_SECONDS = 0.1
_MAX_HELD_UP = 1000
"""Of processes that hold the lock of their maps, this many are remembered with their mappings, ..."""
_MAX_RECORDS = 100
"""... and of each the latest: some 30 MB at most."""
_TRACING_STOP = "t"


class Watcher:
    """Runs on one event loop; all methods but `parsed` are called in its thread.

    looking: how long it takes to look at a process, parsing included. rescans: how often all of /proc was read.
    Any thread may read both.
    """

    def __init__(
        self,
        registry: Registry,
        threads: Threads,
        parse: Parse,
        filesystems: Filesystems,
        root_parsed: Callable[[], Future[None]] = finished,
    ) -> None:
        """root_parsed: as `QueueingParser.root_parsed`."""
        self._root_parsed = root_parsed
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._copies = FileCopies(self.parsed)
        filesystems.calls.on_free = self.parsed
        files = ParsedFiles(partial(may_lead_to, filesystems=filesystems))
        self._store = ObjectStore(parse, filesystems, self._copies, files)
        self._maps = ProcessMaps(registry, self._store, filesystems.calls, self._recheck_soon)
        self._kernel = KernelEvents(threads, self._wake_from_any_thread)
        self._cpu = CpuBudget()
        self._turn: asyncio.TimerHandle | None = None
        self.looking = Latency()
        self.rescans = 0
        self._lost = False
        self._pending: dict[int, list[Mapped]] = {}
        self._forked: dict[int, None] = {}
        self._threaded: set[int] = set()
        self._leaderless: set[int] = set()
        self._to_recheck: set[int] = set()
        self._deferred: dict[int, list[Mapped]] = {}
        self._held_up: dict[int, list[Mapped]] = {}
        self._rescan_timer = Timer(_RESCAN_SECONDS, self._on_rescan)
        self._recheck_timer = Timer(_RECHECK_SECONDS, self._on_recheck)
        self._defer_timer = Timer(_RECHECK_SECONDS, self._on_deferred)

    def start(self) -> None:
        """Listen, then scan, so that nothing is missed in between."""
        for error in self._kernel.open():
            _log.warning("%s; /proc is read every %g s instead", error, _RESCAN_SECONDS)
            self._rescan_timer.set()
        self.rescan()
        self._kernel.follow()
        self._wait_for_events()

    def stop(self) -> None:
        for timer in (self._rescan_timer, self._recheck_timer, self._defer_timer):
            timer.cancel()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._loop.remove_reader(self._kernel.fileno())
        self._maps.close()
        self._copies.close()
        self._kernel.close()

    def _on_rescan(self) -> None:
        self._rescan_timer.set()
        self._recheck_all()
        self._wake()

    def _on_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for pid, records in deferred.items():
            self._pending.setdefault(pid, []).extend(records)
        self._wake()

    def _on_recheck(self) -> None:
        pids, self._to_recheck = self._to_recheck, set()
        self._recheck_soon(pids & self._leaderless)
        for pid in pids:
            self._pending.setdefault(pid, [])
        self._wake()

    def _recheck_soon(self, pids: Iterable[int]) -> None:
        """Look again soon at processes whose state is not clear, such as those whose leader ended."""
        self._to_recheck.update(pids)
        if self._to_recheck:
            self._recheck_timer.set()

    def refresh(self) -> Future[None]:
        """Process what the kernel reported until now: a client that knows of a mapping must find its probes.

        The future is done when root's files that take long to parse are known, too; other users' may come later.
        """
        self._look_at_all()
        parsed = self._root_parsed()
        if parsed.done():
            return parsed
        refreshed = unfinished()

        def look_again() -> None:
            try:
                self._look_at_all()
            finally:
                refreshed.set_result(None)

        parsed.add_done_callback(lambda _: self._loop.call_soon_threadsafe(look_again))
        return refreshed

    def _look_at_all(self) -> None:
        with self._gathering():
            self._collect()
            self._settle_forks(list(self._forked))
            self._look_until(None)

    def charge(self, user: int, seconds: float) -> None:
        """Charge a user for time that another thread spent on its processes."""
        self._cpu.charge(user, seconds)

    def rescan(self) -> None:
        """Look at every process."""
        with self._gathering():
            self._recheck_all()
            self._look_until(None)

    def look_at(self, pids: Iterable[int]) -> None:
        """Update the registry with what these processes map now."""
        for pid in pids:
            self._try_to_look_at(pid, self._pending.pop(pid, []))

    def _wait_for_events(self) -> None:
        """Wait for the kernel to report something."""
        self._turn = None
        self._loop.add_reader(self._kernel.fileno(), self._wake)
        # perf reports a record only to the first poll after it, and adding a reader is one
        if self._collect():
            self._loop.remove_reader(self._kernel.fileno())
            self._schedule_turn()

    def _wake(self) -> None:
        if self._turn is None and not self._kernel.is_closed:
            self._loop.remove_reader(self._kernel.fileno())
            self._take_turn()

    def _wake_from_any_thread(self) -> None:
        if self._turn is None:
            self._loop.call_soon_threadsafe(self._wake)

    def _take_turn(self) -> None:
        """Look at processes, for a bounded time: others use this event loop too."""
        # so that the next turn comes if this one fails
        self._turn = after_failure = self._loop.call_later(_RECHECK_SECONDS, self._take_turn)
        forked_before = list(self._forked)
        any_events = True
        with self._gathering():
            any_events = self._collect()
            self._settle_forks(forked_before)
            self._look_until(time.monotonic() + _TURN_SECONDS)
        if any_events or self._forked or self._pending:
            self._schedule_turn()
        else:
            self._wait_for_events()
        after_failure.cancel()

    def _schedule_turn(self) -> None:
        pause = 0 if self._pending else _RECHECK_SECONDS if self._lost else _PAUSE_SECONDS
        self._turn = self._loop.call_later(pause, self._take_turn)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Report changes of the registry to its listeners once, at the end of the block."""
        try:
            with self._registry.gathering():
                yield
        except OSError as error:
            _log.warning("some changed processes could not be looked at: %s", error)

    def _collect(self) -> bool:
        """Read the kernel's events, and note which processes to look at. Report whether there were any."""
        any_events = self._lost
        events = list(self._kernel.read())
        # look at each file once for all of these events
        recalled: dict[tuple[int, int, str], Object | None] = {}
        for event in events:
            any_events = True
            self._handle(event, recalled)
        if self._lost:
            _log.info("the kernel dropped records of mappings or processes; reading all of /proc")
            self._recheck_all()
        return any_events

    def _handle(self, event: Mapped | Lost | ProcessEvent, recalled: dict[tuple[int, int, str], Object | None]) -> None:
        match event:
            case Mapped():
                self._note(event, recalled)
            case Forked(tid, pid):
                if tid == pid:
                    self._forked[pid] = None
                else:
                    self._threaded.add(pid)
            case Executed(pid):
                self._forked.pop(pid, None)
                self._leaderless.discard(pid)
                self._pending.setdefault(pid, [])
            case Exited(tid, pid):
                if tid == pid:
                    self._ended(pid)
                elif pid in self._leaderless:
                    self._pending.setdefault(pid, [])
            case Lost() | Overflowed():
                self._lost = True

    def _note(self, record: Mapped, recalled: dict[tuple[int, int, str], Object | None]) -> None:
        """Note to look at a process that mapped a file, unless the file is known to have no probes."""
        file = record.dev, record.inode, record.path
        if file not in recalled:
            try:
                recalled[file] = self._store.recall(*file)
            except KeyError:
                self._pending.setdefault(record.pid, []).append(record)
                return
        obj = recalled[file]
        if obj is not None:
            records = self._pending.setdefault(record.pid, [])
            if not self._registry.has(obj.key):
                records.append(record)

    def _settle_forks(self, pids: Iterable[int]) -> None:
        """Look at processes that were forked a turn ago: most have executed another program or ended by now.

        Nothing is missed meanwhile: a child maps what its parent does until the kernel reports that it maps more.
        """
        for pid in pids:
            if pid in self._forked:
                del self._forked[pid]
                self._pending.setdefault(pid, [])

    def _recheck_all(self) -> None:
        self.rescans += 1
        live = procfs.pids()
        self._lost = False
        for pid in self._maps.pids() - set(live):
            self._forget_threads(pid)
            self._maps.forget(pid)
        for pid in live:
            self._pending.setdefault(pid, [])

    def _look_until(self, deadline: float | None) -> None:
        while self._pending:
            pid = next(iter(self._pending))
            self._try_to_look_at(pid, self._pending.pop(pid))
            if deadline is not None and time.monotonic() > deadline:
                break

    def parsed(self, pids: Iterable[int]) -> None:
        """Look again at processes whose files were pending and are known now. Safe to call from any thread."""

        def look_again() -> None:
            for pid in pids:
                self._pending.setdefault(pid, [])
            self._wake()

        self._loop.call_soon_threadsafe(look_again)

    def _try_to_look_at(self, pid: int, records: list[Mapped]) -> None:
        user = user_of(pid)
        if self._cpu.left(user) <= 0:
            self._defer(pid, records)
            return
        records = self._held_up.pop(pid, []) + records
        try:
            with self.looking.measured(), self._cpu.taken(user):
                self._look_at(pid, user, records)
        except ObjectPendingError:
            # `parsed` is called when it is worth another look
            if records and len(self._held_up) < _MAX_HELD_UP:
                self._held_up[pid] = records[-_MAX_RECORDS:]
        except OSError as error:
            _log.warning("pid %d: cannot read its mappings, trying again: %s", pid, error)
            self._defer(pid, records)

    def _defer(self, pid: int, records: list[Mapped]) -> None:
        """Look at a process later: its user's processes have taken their share of time, or it cannot be read now."""
        self._deferred.setdefault(pid, []).extend(records)
        self._defer_timer.set()

    def _look_at(self, pid: int, user: int, records: list[Mapped]) -> None:
        look = self._maps.look_at(pid, user, records, self._cpu.slice(user))
        if not look.threads:
            self._forget_threads(pid)
        elif look.threads > 1:
            self._threaded.add(pid)
        if look.is_unsettled:
            # its exit may have been reported already
            self._recheck_soon([pid])
        if look.is_partial:
            # the rest comes after other users' turns
            self._defer(pid, [])

    def _forget_threads(self, pid: int) -> None:
        self._threaded.discard(pid)
        self._leaderless.discard(pid)

    def _ended(self, pid: int) -> None:
        """Handle a leader's exit, which is reported before it is a zombie; its other threads may live on."""
        self._forked.pop(pid, None)
        if pid in self._threaded:
            stat = procfs.stat(pid)
            if stat is not None and stat.threads > 1:
                self._leaderless.add(pid)
                self._recheck_soon([pid])
                return
            if stat is not None and stat.state == _TRACING_STOP:
                # another thread executed a program and is the leader now; exec is reported once the tracer resumes it
                self._pending.setdefault(pid, [])
                return
        self._forget_threads(pid)
        records = self._held_up.pop(pid, []) + self._pending.pop(pid, [])
        self._maps.ended(pid, user_of(pid), records)
