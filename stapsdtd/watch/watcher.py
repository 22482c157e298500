"""The watcher keeps the registry in step with /proc."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable

from stapsdtd.errors import KernelFeatureError, ObjectGoneError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.connector import Executed, Exited, Forked, Happening, Overflowed, ProcessConnector
from stapsdtd.kernel.perf import Lost, MappingRing, online_cpus
from stapsdtd.model import Mapping, Object, ObjectKey, ProcessKey
from stapsdtd.probes.registry import Registry
from stapsdtd.watch.objects import ObjectStore
from stapsdtd.watch.threads import Threads

_log = logging.getLogger(__name__)

_RESCAN_SECONDS = 1.0
_DOUBT_SECONDS = 0.1
_DEAD = frozenset("ZX")


class Watcher:
    """Runs on one event loop, all methods but `catch_up` in its thread."""

    def __init__(self, registry: Registry, threads: Threads) -> None:
        self._registry = registry
        self._threads = threads
        self._store = ObjectStore()
        self._loop = asyncio.get_running_loop()
        self._rings: list[MappingRing] = []
        self._connector: ProcessConnector | None = None
        self._connector_lock = threading.Lock()
        self._happenings: deque[Happening] = deque()
        self._seen: dict[int, tuple[ProcessKey, dict[Mapping, Object | None]]] = {}
        self._doubtful: set[int] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

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
            self._loop.add_reader(ring.fileno(), self._read_ring, ring)
        if self._connector is not None:
            self._threads.follow(self.catch_up)
            self._loop.add_reader(self._connector.fileno(), self._read_connector)

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for ring in self._rings:
            self._loop.remove_reader(ring.fileno())
            ring.close()
        self._threads.unfollow()
        if self._connector is not None:
            self._loop.remove_reader(self._connector.fileno())
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
            self.rescan()
        else:
            doubtful, self._doubtful = self._doubtful, set()
            self.look_at(doubtful)
            self._doubt(doubtful & self._seen.keys())

    def _doubt(self, pids: Iterable[int]) -> None:
        """Look again soon: a process whose leader ended, and of which it is not clear whether others live."""
        self._doubtful.update(pids)
        if self._doubtful and "doubt" not in self._timers:
            self._again("doubt", _DOUBT_SECONDS)

    def refresh(self) -> None:
        """Take in what the kernel reported until now: a client that knows of a mapping must find its probes."""
        for ring in self._rings:
            self._read_ring(ring)
        if self._connector is not None:
            self._read_connector()

    def rescan(self) -> None:
        """Read every process."""
        living = procfs.pids()
        for pid in self._seen.keys() - set(living):
            self._forget(pid)
        self.look_at(living)

    def look_at(self, pids: Iterable[int]) -> None:
        """Bring the registry in step with these processes' maps."""
        for pid in pids:
            try:
                self._look_at(pid)
            except OSError as error:
                _log.warning("pid %d cannot be looked at now, and will be again: %s", pid, error)
                self._doubt([pid])

    def _look_at(self, pid: int) -> None:
        mappings = procfs.executable_mappings(pid)
        stat = procfs.stat(pid)
        if stat is None or (stat.state in _DEAD and stat.threads <= 1):
            self._forget(pid)
        elif mappings or stat.state not in _DEAD:
            self._update(stat.key, mappings)

    def _update(self, process: ProcessKey, mappings: list[Mapping]) -> None:
        known, before = self._seen.get(process.pid, (process, {}))
        if known != process:
            before = {}
        now: dict[Mapping, Object | None] = {}
        files: dict[tuple[int, int], Object | None] = {}
        mapped: dict[ObjectKey, tuple[Object, Mapping]] = {}
        for mapping in mappings:
            file = mapping.dev, mapping.inode
            try:
                if mapping in before:
                    found = before[mapping]
                elif file in files:
                    found = files[file]
                else:
                    found = self._store.resolve(process.pid, mapping)
            except ObjectGoneError as error:
                _log.debug("pid %d: %s", process.pid, error)
                continue
            now[mapping] = files[file] = found
            if found is not None:
                mapped.setdefault(found.key, (found, mapping))
        self._seen[process.pid] = process, now
        self._registry.update(process, mapped)

    def _forget(self, pid: int) -> None:
        self._seen.pop(pid, None)
        self._registry.gone(pid)

    def _read_ring(self, ring: MappingRing) -> None:
        records = list(ring.read())
        if any(isinstance(record, Lost) for record in records):
            _log.info("mapping records were lost; reading all of /proc")
            self.rescan()
        else:
            self.look_at({record.pid for record in records if not isinstance(record, Lost)})

    def catch_up(self) -> None:
        """Read the connector from any thread: threads are known at once, and processes are looked at when it is
        their turn.
        """
        with self._connector_lock:
            if self._connector is None:
                return
            for happening in self._connector.read():
                match happening:
                    case Forked(tid, pid):
                        self._threads.forked(tid, pid)
                    case Exited(tid, pid):
                        self._threads.exited(tid, pid)
                    case Overflowed():
                        self._threads.missed()
                    case _:
                        pass
                self._happenings.append(happening)
        self._loop.call_soon_threadsafe(self._take_happenings)

    def _read_connector(self) -> None:
        self.catch_up()
        self._take_happenings()

    def _take_happenings(self) -> None:
        touched: dict[int, None] = {}
        overflowed = False
        while self._happenings:
            match self._happenings.popleft():
                case Forked(tid, pid) if tid == pid:
                    touched[pid] = None
                case Executed(pid):
                    touched[pid] = None
                case Exited(tid, pid) if tid == pid:
                    touched.pop(pid, None)
                    self._ended(pid)
                case Overflowed():
                    overflowed = True
                case _:
                    pass
        if overflowed:
            _log.info("process events were lost; reading all of /proc")
            self.rescan()
        else:
            self.look_at(touched)

    def _ended(self, pid: int) -> None:
        """A leader's exit is reported before it is a zombie, and its other threads may live on."""
        stat = procfs.stat(pid)
        if stat is None or stat.threads <= 1:
            self._forget(pid)
        else:
            self._doubt([pid])
