"""The watcher keeps the registry in step with /proc.

    rings, connector ──► collect: which processes changed ──► look at each once ──► Registry
          ▲                                                        │
          └── 2 ms later, while there is anything to collect ◄─────┘  otherwise wait to be woken

A host that is quiet is looked at as soon as something happens. One that is busy is looked at every 2 ms, so that a
process that forks, executes and maps its libraries costs one look, and one that ended meanwhile costs none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from stapsdtd.catalog.registry import Registry
from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessEvent
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.perf import Lost, Mapped
from stapsdtd.model import Object
from stapsdtd.procs.budgets import CpuBudget, user_of
from stapsdtd.procs.copies import FileCopies
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.objects import ObjectStore, Parse
from stapsdtd.procs.process_maps import ProcessMaps
from stapsdtd.procs.threads import Threads
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.timer import Timer

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.002
_TURN_SECONDS = 0.005
_RESCAN_SECONDS = 1.0
_DOUBT_SECONDS = 0.1
_HELD_BY_A_TRACER = "t"


class Watcher:
    """Runs on one event loop, all methods but `parsed` in its thread.

    looking: how long it takes to look at a process, with what is parsed therefore. rescans: how often all of
    /proc was read. Both may be read anywhere.
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
        self._store = ObjectStore(parse, filesystems, self._copies)
        self._maps = ProcessMaps(registry, self._store, filesystems.calls)
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
        self._doubtful: set[int] = set()
        self._deferred: dict[int, list[Mapped]] = {}
        self._rescan_timer = Timer(_RESCAN_SECONDS, self._on_rescan)
        self._doubt_timer = Timer(_DOUBT_SECONDS, self._on_doubt)
        self._defer_timer = Timer(_DOUBT_SECONDS, self._on_deferred)

    def start(self) -> None:
        """Listen first and scan then, so that nothing falls between."""
        for error in self._kernel.open():
            _log.warning("%s; /proc is read every %g s instead", error, _RESCAN_SECONDS)
            self._rescan_timer.set()
        self.rescan()
        self._kernel.follow()
        self._wait()

    def stop(self) -> None:
        for timer in (self._rescan_timer, self._doubt_timer, self._defer_timer):
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
        self._doubt_everything()
        self._wake()

    def _on_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for pid, records in deferred.items():
            self._pending.setdefault(pid, []).extend(records)
        self._wake()

    def _on_doubt(self) -> None:
        doubtful, self._doubtful = self._doubtful, set()
        self._doubt(doubtful & self._leaderless)
        for pid in doubtful:
            self._pending.setdefault(pid, [])
        self._wake()

    def _doubt(self, pids: Iterable[int]) -> None:
        """Look again soon: a process whose leader ended, and of which it is not clear whether others live."""
        self._doubtful.update(pids)
        if self._doubtful:
            self._doubt_timer.set()

    def refresh(self) -> Future[None]:
        """Take in what the kernel reported until now: a client that knows of a mapping must find its probes.

        What is returned is done when root's files, too, are known that take long to parse. Others' are known later.
        """
        self._look_at_all()
        parsed = self._root_parsed()
        if parsed.done():
            return parsed
        refreshed = unfinished()

        def look_again() -> None:
            self._look_at_all()
            refreshed.set_result(None)

        parsed.add_done_callback(lambda _: self._loop.call_soon_threadsafe(look_again))
        return refreshed

    def _look_at_all(self) -> None:
        with self._telling():
            self._collect()
            self._settle_forks(list(self._forked))
            self._look_until(None)

    def charge(self, user: int, seconds: float) -> None:
        """Count time that another thread spent because of a user's processes."""
        self._cpu.charge(user, seconds)

    def rescan(self) -> None:
        """Read every process."""
        with self._telling():
            self._doubt_everything()
            self._look_until(None)

    def look_at(self, pids: Iterable[int]) -> None:
        """Bring the registry in step with these processes' maps."""
        for pid in pids:
            self._try_to_look_at(pid, self._pending.pop(pid, []))

    def _wait(self) -> None:
        """For the kernel to tell of anything."""
        self._turn = None
        self._loop.add_reader(self._kernel.fileno(), self._wake)
        # perf tells of a record once, to whoever polls first, which adding a reader does
        if self._collect():
            self._loop.remove_reader(self._kernel.fileno())
            self._go_on()

    def _wake(self) -> None:
        if self._turn is None and not self._kernel.is_closed:
            self._loop.remove_reader(self._kernel.fileno())
            self._take_turn()

    def _wake_from_any_thread(self) -> None:
        if self._turn is None:
            self._loop.call_soon_threadsafe(self._wake)

    def _take_turn(self) -> None:
        """Others use this event loop too, so one turn is bounded."""
        # should this one fail, the next one looks again
        self._turn = after_failure = self._loop.call_later(_DOUBT_SECONDS, self._take_turn)
        forked_before = list(self._forked)
        anything = True
        with self._telling():
            anything = self._collect()
            self._settle_forks(forked_before)
            self._look_until(time.monotonic() + _TURN_SECONDS)
        if anything or self._forked or self._pending:
            self._go_on()
        else:
            self._wait()
        after_failure.cancel()

    def _go_on(self) -> None:
        pause = 0 if self._pending else _DOUBT_SECONDS if self._lost else _PAUSE_SECONDS
        self._turn = self._loop.call_later(pause, self._take_turn)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """The registry's listeners are told once of what many processes do within."""
        try:
            with self._registry.gathering():
                yield
        except OSError as error:
            _log.warning("not all that changed could be looked at or armed: %s", error)

    def _collect(self) -> bool:
        """Read what the kernel tells, and note which processes to look at; report whether there was anything."""
        anything = self._lost
        events = list(self._kernel.read())
        # one look at a file will do for all that was reported before that
        recalled: dict[tuple[int, int, str], Object | None] = {}
        for event in events:
            anything = True
            self._take_in(event, recalled)
        if self._lost:
            _log.info("records of mappings or processes were lost; reading all of /proc")
            self._doubt_everything()
        return anything

    def _take_in(
        self, event: Mapped | Lost | ProcessEvent, recalled: dict[tuple[int, int, str], Object | None]
    ) -> None:
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
        """A file that is known to have no probes is no reason to look."""
        file = record.dev, record.inode, record.path
        if file not in recalled:
            try:
                recalled[file] = self._store.recall(*file)
            except KeyError:
                self._pending.setdefault(record.pid, []).append(record)
                return
        found = recalled[file]
        if found is not None:
            records = self._pending.setdefault(record.pid, [])
            if not self._registry.has(found.key):
                records.append(record)

    def _settle_forks(self, pids: Iterable[int]) -> None:
        """A new process is looked at a turn later, since most of them execute another program or end by then.

        Nothing is missed meanwhile: it maps what its parent does until it is reported to map more.
        """
        for pid in pids:
            if pid in self._forked:
                del self._forked[pid]
                self._pending.setdefault(pid, [])

    def _doubt_everything(self) -> None:
        self.rescans += 1
        living = procfs.pids()
        self._lost = False
        for pid in self._maps.pids() - set(living):
            self._forget_threads(pid)
            self._maps.forget(pid)
        for pid in living:
            self._pending.setdefault(pid, [])

    def _look_until(self, deadline: float | None) -> None:
        while self._pending:
            pid = next(iter(self._pending))
            self._try_to_look_at(pid, self._pending.pop(pid))
            if deadline is not None and time.monotonic() > deadline:
                break

    def parsed(self, pids: Iterable[int]) -> None:
        """What these processes map, and was pending, is known now. For any thread."""

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
        try:
            with self.looking.measured(), self._cpu.taken(user):
                self._look_at(pid, user, records)
        except ObjectPendingError:
            # `parsed` is told when there is something to be seen
            pass
        except OSError as error:
            _log.warning("pid %d cannot be looked at now, and will be again: %s", pid, error)
            self._doubt([pid])

    def _defer(self, pid: int, records: list[Mapped]) -> None:
        """Its user's processes take too much time, so that others' come first."""
        self._deferred.setdefault(pid, []).extend(records)
        self._defer_timer.set()

    def _look_at(self, pid: int, user: int, records: list[Mapped]) -> None:
        look = self._maps.look_at(pid, user, records, self._cpu.slice(user))
        if not look.threads:
            self._forget_threads(pid)
        elif look.threads > 1:
            self._threaded.add(pid)
        if look.is_unsettled:
            # it may be about to end, and that have been told already
            self._doubt([pid])
        if look.is_partial:
            # the rest when others had their turn
            self._defer(pid, [])

    def _forget_threads(self, pid: int) -> None:
        self._threaded.discard(pid)
        self._leaderless.discard(pid)

    def _ended(self, pid: int) -> None:
        """A leader's exit is reported before it is a zombie, and its other threads may live on."""
        self._forked.pop(pid, None)
        if pid in self._threaded:
            stat = procfs.stat(pid)
            if stat is not None and stat.threads > 1:
                self._leaderless.add(pid)
                self._doubt([pid])
                return
            if stat is not None and stat.state == _HELD_BY_A_TRACER:
                # another thread executed a program and is the leader now; exec is told only when it goes on
                self._pending.setdefault(pid, [])
                return
        self._forget_threads(pid)
        self._maps.ended(pid, user_of(pid), self._pending.pop(pid, []))
