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
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.errors import KernelFeatureError, ObjectGoneError, ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessConnector, ProcessEvent
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.perf import Lost, Mapped, MappingRing, online_cpus
from stapsdtd.model import Mapping, Object, ObjectKey, ProcessKey
from stapsdtd.procs.budgets import CpuBudget, MemoryBudget, user_of
from stapsdtd.procs.copies import FileCopies
from stapsdtd.procs.objects import ObjectStore, Parse
from stapsdtd.procs.threads import Threads
from stapsdtd.runtime.latency import Latency

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.002
_TURN_SECONDS = 0.005
_RESCAN_SECONDS = 1.0
_DOUBT_SECONDS = 0.1
_DEAD = frozenset("ZX")
_HELD_BY_A_TRACER = "t"


class Watcher:
    """Runs on one event loop, all methods but `catch_up` and `parsed` in its thread.

    looking: how long it takes to look at a process, with what is parsed and armed therefore. rescans: how often all of
    /proc was read. Both may be read anywhere.
    """

    def __init__(self, registry: Registry, threads: Threads, parse: Parse, filesystems: Filesystems) -> None:
        self._registry = registry
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._copies = FileCopies(self.parsed)
        self._calls = filesystems.calls
        self._calls.on_free = self.parsed
        self._store = ObjectStore(parse, filesystems, self._copies)
        self._rings: list[MappingRing] = []
        self._connector: ProcessConnector | None = None
        self._connector_lock = threading.Lock()
        self._events: deque[ProcessEvent] = deque()
        self._anything = select.epoll()
        self._turn: asyncio.TimerHandle | None = None
        self.looking = Latency()
        self.rescans = 0
        self._lost = False
        self._seen: dict[int, tuple[ProcessKey, dict[Mapping, Object | None]]] = {}
        self._pending: dict[int, list[Mapped]] = {}
        self._forked: dict[int, None] = {}
        self._threaded: set[int] = set()
        self._leaderless: set[int] = set()
        self._doubtful: set[int] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._time = CpuBudget()
        self._holdings = MemoryBudget()
        self._deferred: dict[int, list[Mapped]] = {}
        self._excessive: set[int] = set()
        self._stop_listening = registry.listen(self._on_change)

    def start(self) -> None:
        """Listen first and scan then, so that nothing falls between."""
        try:
            self._rings = [MappingRing(cpu) for cpu in online_cpus()]
        except KernelFeatureError as error:
            self._fall_back(error)
        try:
            self._connector = ProcessConnector()
        except KernelFeatureError as error:
            self._fall_back(error)
        self.rescan()
        for ring in self._rings:
            self._anything.register(ring.fileno(), select.EPOLLIN)
        if self._connector is not None:
            self._threads.follow(self.catch_up)
            self._anything.register(self._connector.fileno(), select.EPOLLIN)
        self._wait()

    def _on_change(self, change: Change) -> None:
        if change.vanished:
            self._holdings.release(change.object.key)

    def stop(self) -> None:
        self._stop_listening()
        for timer in self._timers.values():
            timer.cancel()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._loop.remove_reader(self._anything.fileno())
        self._anything.close()
        for ring in self._rings:
            ring.close()
        self._copies.close()
        self._threads.unfollow()
        if self._connector is not None:
            with self._connector_lock:
                self._connector.close()
                self._connector = None

    def _fall_back(self, error: KernelFeatureError) -> None:
        _log.warning("%s; /proc is read every %g s instead", error, _RESCAN_SECONDS)
        if "rescan" not in self._timers:
            self._again("rescan", _RESCAN_SECONDS)

    def _again(self, what: str, seconds: float) -> None:
        self._timers[what] = self._loop.call_later(seconds, self._on_timer, what)

    def _on_timer(self, what: str) -> None:
        del self._timers[what]
        if what == "rescan":
            self._again("rescan", _RESCAN_SECONDS)
            self._doubt_everything()
        elif what == "deferred":
            deferred, self._deferred = self._deferred, {}
            for pid, records in deferred.items():
                self._pending.setdefault(pid, []).extend(records)
        else:
            doubtful, self._doubtful = self._doubtful, set()
            self._doubt(doubtful & self._leaderless)
            for pid in doubtful:
                self._pending.setdefault(pid, [])
        self._wake()

    def _doubt(self, pids: Iterable[int]) -> None:
        """Look again soon: a process whose leader ended, and of which it is not clear whether others live."""
        self._doubtful.update(pids)
        if self._doubtful and "doubt" not in self._timers:
            self._again("doubt", _DOUBT_SECONDS)

    def refresh(self) -> None:
        """Take in what the kernel reported until now: a client that knows of a mapping must find its probes."""
        with self._telling():
            self._collect()
            self._settle_forks(list(self._forked))
            self._look_until(None)

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
        self._loop.add_reader(self._anything.fileno(), self._wake)
        # perf tells of a record once, to whoever polls first, which adding a reader does
        if self._collect():
            self._loop.remove_reader(self._anything.fileno())
            self._go_on()

    def _wake(self) -> None:
        if self._turn is None and not self._anything.closed:
            self._loop.remove_reader(self._anything.fileno())
            self._take_turn()

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
        """Read what the kernel tells, and note whom to look at; answer whether there was anything.

        The connector comes last, so that what a process mapped is known when its end is.
        """
        records = [record for ring in self._rings for record in ring.read()]
        for record in records:
            if isinstance(record, Lost):
                self._lost = True
            else:
                self._note(record)
        self._read_connector()
        anything = bool(records or self._events or self._lost)
        while self._events:
            match self._events.popleft():
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
                case Overflowed():
                    self._lost = True
        if self._lost:
            _log.info("records of mappings or processes were lost; reading all of /proc")
            self._doubt_everything()
        return anything

    def _note(self, record: Mapped) -> None:
        """A file that is known to have no probes is no reason to look."""
        try:
            found = self._store.recall(record.dev, record.inode, record.path)
        except KeyError:
            self._pending.setdefault(record.pid, []).append(record)
            return
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
        for pid in self._seen.keys() - set(living):
            self._forget(pid)
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
        if self._time.left(user) <= 0:
            self._defer(pid, records)
            return
        try:
            with self.looking.measured(), self._time.taken(user):
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
        if "deferred" not in self._timers:
            self._again("deferred", _DOUBT_SECONDS)

    def _tell_of_excess(self, user: int) -> None:
        if user not in self._excessive:
            self._excessive.add(user)
            _log.warning("user %d has more probes than are known of one user; the others of them are not found", user)

    def _look_at(self, pid: int, user: int, records: list[Mapped]) -> None:
        mappings = self._calls.call(pid, lambda: procfs.executable_mappings(pid))
        stat = procfs.stat(pid)
        if stat is None or (stat.state in _DEAD and stat.threads <= 1):
            self._forget(pid)
            self._take_in_the_ended(pid, user, records)
            return
        if stat.threads > 1:
            self._threaded.add(pid)
        if not mappings and pid not in self._seen:
            # it may be about to end, and that have been told already
            self._doubt([pid])
        if mappings or stat.state not in _DEAD:
            self._update(stat.key, user, mappings)

    def _update(self, process: ProcessKey, user: int, mappings: list[Mapping]) -> None:
        known, before = self._seen.get(process.pid, (process, {}))
        if known != process:
            before = {}
        now: dict[Mapping, Object | None] = {}
        files: dict[tuple[int, int], Object | None] = {}
        mapped: dict[ObjectKey, tuple[Object, Mapping]] = {}
        deadline = time.monotonic() + self._time.slice(user)
        for mapping in mappings:
            file = mapping.dev, mapping.inode
            try:
                if mapping in before:
                    found = before[mapping]
                elif file in files:
                    found = files[file]
                elif time.monotonic() > deadline:
                    # the rest when others had their turn
                    self._defer(process.pid, [])
                    continue
                else:
                    found = self._store.resolve(process.pid, mapping)
            except ObjectGoneError as error:
                _log.debug("pid %d: %s", process.pid, error)
                continue
            except ObjectPendingError:
                # `parsed` has this process looked at again
                continue
            if found is not None and not self._holdings.admit(user, found):
                self._tell_of_excess(user)
                found = None
            now[mapping] = files[file] = found
            if found is not None:
                mapped.setdefault(found.key, (found, mapping))
        self._seen[process.pid] = process, now
        self._registry.update(process, mapped)

    def _take_in_the_ended(self, pid: int, user: int, records: list[Mapped]) -> None:
        """A process that ended before anybody looked may have been the first of many that map an object."""
        mapped: dict[ObjectKey, tuple[Object, Mapping]] = {}
        for record in records:
            mapping = record.mapping
            try:
                found = self._store.resolve(pid, mapping)
            except (ObjectGoneError, ObjectPendingError, OSError) as error:
                _log.debug("pid %d, which ended: %s", pid, error)
                continue
            if found is not None and self._holdings.admit(user, found):
                mapped.setdefault(found.key, (found, mapping))
        if mapped:
            # its start time cannot be known any more, and nobody asks for it
            self._registry.update(ProcessKey(pid, 0), mapped)
            self._registry.gone(pid)

    def _forget(self, pid: int) -> None:
        self._seen.pop(pid, None)
        self._threaded.discard(pid)
        self._leaderless.discard(pid)
        self._registry.gone(pid)

    def catch_up(self) -> None:
        """Read the connector from any thread: threads are known at once, and processes are looked at when it is
        their turn.
        """
        self._read_connector()
        if self._events and self._turn is None:
            self._loop.call_soon_threadsafe(self._wake)

    def _read_connector(self) -> None:
        with self._connector_lock:
            if self._connector is None:
                return
            for event in self._connector.read():
                match event:
                    case Forked(tid, pid):
                        self._threads.forked(tid, pid)
                    case Exited(tid, pid):
                        self._threads.exited(tid, pid)
                    case Overflowed():
                        self._threads.missed()
                    case _:
                        pass
                self._events.append(event)

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
        self._forget(pid)
        self._take_in_the_ended(pid, user_of(pid), self._pending.pop(pid, []))
