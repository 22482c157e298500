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
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from stapsdtd.catalog.registry import Registry
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.model import Object, ObjectKey, ParsedObject
from stapsdtd.procs.budgets import MemoryBudget
from stapsdtd.procs.collector import Collector
from stapsdtd.procs.copies import FileCopies
from stapsdtd.procs.file_keys import may_lead_to
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.look_queue import LookQueue
from stapsdtd.procs.looking import Looker
from stapsdtd.procs.objects import ObjectStore, Parse
from stapsdtd.procs.parsed_files import ParsedFiles
from stapsdtd.procs.process_maps import Proc, ProcessMaps
from stapsdtd.runtime.futures import all_done, finished, unfinished
from stapsdtd.runtime.timer import Timer

_log = logging.getLogger(__name__)

_ROOT, _USERS = 0, 1 << 32
_MOMENT_SECONDS = 0.25
_LOOK_SECONDS = 10.0
"""For the processes that a call is about; more only become due if there is no end of them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """pause: between turns on a busy host. turn: how long one may take, except for its last look. later: until a
    process is looked at again. refresh: for what a client that may see everything waits for, beside root's processes.
    rescan: between scans of /proc if the kernel reports nothing.
    """

    pause_seconds: float = 0.002
    turn_seconds: float = 0.005
    later_seconds: float = 0.1
    refresh_seconds: float = 0.05
    rescan_seconds: float = 1.0


DEFAULT_PACE = Pace()


def watch_host(
    registry: Registry,
    kernel: KernelEvents,
    parse: Parse,
    filesystems: Filesystems,
    parsed: Callable[[Container[int]], Future[None]],
) -> Watcher:
    """Return a watcher of this host's processes, for the event loop that is running."""
    copies = FileCopies()
    files = ParsedFiles(partial(may_lead_to, filesystems=filesystems))
    store = ObjectStore(parse, filesystems, copies, files)
    maps = ProcessMaps(registry, store, filesystems.calls, MemoryBudget())
    watcher = Watcher(registry, kernel, store, maps, parsed)
    copies.on_done = filesystems.calls.on_free = watcher.parsed
    return watcher


class Watcher:
    """Runs on one event loop; all methods but `parsed` are called in its thread.

    looking: how long it takes to look at a process, parsing included; any thread may read it.
    """

    def __init__(
        self,
        registry: Registry,
        kernel: KernelEvents,
        store: ObjectStore,
        maps: ProcessMaps,
        parsed: Callable[[Container[int]], Future[None]] = lambda _owners: finished(),
        *,
        proc: Proc = procfs,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        """parsed: as `QueueingParser.parsed`."""
        self._registry = registry
        self._kernel = kernel
        self._store = store
        self._maps = maps
        self._parsed = parsed
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._rescan_timer = Timer(pace.rescan_seconds, self._on_rescan)
        self._later_timer = Timer(pace.later_seconds, self._on_later)
        self._queue = LookQueue(proc.stat, self._later_timer.set)
        self._looker = Looker(self._queue, maps)
        self._collector = Collector(kernel, self._queue, registry, store, maps, proc=proc, ended=self._looker.ended)
        maps.on_room = self._look_later
        self.looking = self._looker.latency
        self._turn: asyncio.TimerHandle | None = None

    @property
    def rescans(self) -> int:
        """Return how often all of /proc was read. May be called from any thread."""
        return self._collector.rescans

    def start(self) -> None:
        """Listen, then scan, so that nothing is missed in between."""
        for error in self._kernel.open():
            _log.warning("%s; /proc is read every %g s instead", error, self._pace.rescan_seconds)
            self._rescan_timer.set()
        self.rescan()
        self._kernel.follow(self._wake_from_any_thread)
        self._wait_for_events()

    def on_main_thread(self, work: Callable[[int], None]) -> None:
        """Call work with each process whose main thread ended before others, or may be another one now."""
        self._collector.on_main_thread = work

    def stop(self) -> None:
        self._rescan_timer.cancel()
        self._later_timer.cancel()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._loop.remove_reader(self._kernel.fileno())
        self._maps.close()
        self._store.close()
        self._kernel.close()

    def _on_rescan(self) -> None:
        self._rescan_timer.set()
        self._collector.rescan()
        self._wake()

    def _on_later(self) -> None:
        self._queue.resume()
        self._looker.resume()
        self._wake()

    def _look_later(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._queue.add_later(pid)

    def refresh(self, users: frozenset[int] | None = frozenset(), pids: frozenset[int] = frozenset()) -> Future[None]:
        """Process what the kernel reported until now: a client that knows of a mapping must find its probes.

        users: those whose processes the client may see, None for all. pids: processes that it names. The future is done
        when the files that are still being parsed are known, too: root's, who can stop the daemon anyway, and within a
        moment these users'.
        """
        refreshed = unfinished()

        def wait_for_files() -> None:
            of_users = self._parsed(range(_USERS) if users is None else users)
            parsed = all_done([self._parsed({_ROOT}), self._within_a_moment(of_users)])
            if parsed.done():
                refreshed.set_result(None)
            else:
                look_again = partial(self._look_at_those_of, users, pids, partial(refreshed.set_result, None))
                parsed.add_done_callback(lambda _: self._loop.call_soon_threadsafe(look_again))

        self._look_at_those_of(users, pids, wait_for_files)
        return refreshed

    def looked(self, users: frozenset[int] | None) -> Future[None]:
        """As `refresh`, but wait for no file that is still being parsed."""
        looked = unfinished()
        self._look_at_those_of(users, frozenset(), partial(looked.set_result, None))
        return looked

    def _within_a_moment(self, done: Future[None]) -> Future[None]:
        """Return a future that is done as another one is, or a moment later."""
        if done.done():
            return done
        moment = unfinished()

        def end() -> None:
            if not moment.done():
                moment.set_result(None)

        done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(end))
        self._loop.call_later(_MOMENT_SECONDS, end)
        return moment

    def _look_at_those_of(
        self,
        users: frozenset[int] | None,
        pids: frozenset[int],
        then: Callable[[], None],
        begun: float | None = None,
    ) -> None:
        """Look at all processes that are due and of some users, of root, or named, in turns, and then at others: in
        what is left of the turn, or for a while if users is None, for all. then: called at last. begun: the first turn.
        """
        if self._kernel.is_closed:
            # files are known that a call waited for which nobody waits for any more
            then()
            return
        now = time.monotonic()
        begun, deadline = begun or now, now + self._pace.turn_seconds
        is_done = False
        try:
            with self._gathering():
                self._collector.collect()
                self._queue.settle_forks(self._queue.forked_lately())
                is_done = self._looker.look_at_those_of({_ROOT} | (users or frozenset()), pids, deadline)
                if is_done:
                    self._looker.look_until(deadline)
        except BaseException:
            then()
            raise
        seconds = time.monotonic() - begun
        if is_done and users is None and self._looker.has_work:
            is_done = seconds >= self._pace.refresh_seconds
        if is_done or seconds > _LOOK_SECONDS:
            then()
        else:
            self._loop.call_soon(self._look_at_those_of, users, pids, then, begun)

    def object_of(self, key: ObjectKey, path: str, parsed: ParsedObject) -> Object:
        """Return the object of a file with notes that a client named."""
        return self._store.object_of(key, path, parsed)

    def charge(self, user: int, seconds: float) -> None:
        """Charge a user for time that another thread spent on its processes."""
        self._looker.charge(user, seconds)

    def rescan(self) -> None:
        """Look at every process."""
        with self._gathering():
            self._collector.rescan()
            self._looker.look_until(None)

    def look_at(self, pids: Iterable[int]) -> None:
        """Update the registry with what these processes map now."""
        for pid in pids:
            self._looker.look_at(pid)

    def parsed(self, pids: Iterable[int]) -> None:
        """Look again at processes whose files were pending and are known now. Safe to call from any thread."""

        def look_again() -> None:
            for pid in pids:
                self._queue.add(pid)
            self._wake()

        self._loop.call_soon_threadsafe(look_again)

    def _wait_for_events(self) -> None:
        """Wait for the kernel to report something."""
        self._turn = None
        self._loop.add_reader(self._kernel.fileno(), self._wake)
        # perf reports a record only to the first poll after it, and adding a reader is one
        if self._collector.collect():
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
        self._turn = after_failure = self._loop.call_later(self._pace.later_seconds, self._take_turn)
        forked_before = self._queue.forked_lately()
        any_events = True
        with self._gathering():
            any_events = self._collector.collect()
            self._queue.settle_forks(forked_before)
            self._looker.look_until(time.monotonic() + self._pace.turn_seconds)
        if any_events or self._queue.forked_lately() or self._looker.has_work:
            self._schedule_turn()
        else:
            self._wait_for_events()
        after_failure.cancel()

    def _schedule_turn(self) -> None:
        pause = self._pace.later_seconds if self._collector.has_lost else self._pace.pause_seconds
        if self._looker.has_work:
            pause = 0
        self._turn = self._loop.call_later(pause, self._take_turn)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Report changes of the registry to its listeners once, at the end of the block."""
        try:
            with self._registry.gathering():
                yield
        except OSError as error:
            _log.warning("some changed processes could not be looked at: %s", error)
