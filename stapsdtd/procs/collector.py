"""Collects the processes that changed, from the kernel's events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from stapsdtd.catalog.registry import Registry
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessEvent
from stapsdtd.kernel.perf import Lost, Mapped
from stapsdtd.model import Object
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.look_queue import LookQueue
from stapsdtd.procs.objects import ObjectStore
from stapsdtd.procs.process_maps import Proc, ProcessMaps

_log = logging.getLogger(__name__)

_RESCAN_SECONDS = 1.0
_RESCAN_SHARE = 0.1
"""Of time, where processes fork, or map files, faster than the daemon can read of it."""

_Recalled = dict[tuple[int, int, str], Object | None]
"""Files by device, inode and path."""


class Collector:
    """Queues processes to look at, and forgets those that ended.

    has_lost: events were lost, and /proc could not be read since. rescans: how often all of /proc was read.
    on_main_thread: called with a process whose main thread ended before others, or may be another one now.
    """

    def __init__(
        self,
        kernel: KernelEvents,
        queue: LookQueue,
        registry: Registry,
        store: ObjectStore,
        maps: ProcessMaps,
        *,
        proc: Proc,
        ended: Callable[[int, list[Mapped]], None],
    ) -> None:
        """ended: called with each process that has ended, and what it had mapped before anybody looked."""
        self._kernel = kernel
        self._queue = queue
        self._registry = registry
        self._store = store
        self._maps = maps
        self._proc = proc
        self._ended = ended
        self._rescan_not_before = time.monotonic()
        self.on_main_thread: Callable[[int], None] = lambda _pid: None
        self.has_lost = False
        self.rescans = 0

    def collect(self) -> bool:
        """Read the kernel's events. Report whether there were any. Raises OSError."""
        any_events = self.has_lost
        events = list(self._kernel.read())
        # look at each file once for all of these events
        recalled: _Recalled = {}
        for event in events:
            any_events = True
            self._handle(event, recalled)
        if self.has_lost and time.monotonic() >= self._rescan_not_before:
            _log.info("the kernel dropped records of mappings or processes; reading all of /proc")
            self.rescan()
        return any_events

    def rescan(self) -> None:
        """Queue every process. Raises OSError."""
        self.rescans += 1
        begin = time.monotonic()
        live = self._proc.pids()
        self.has_lost = False
        for pid in self._maps.pids() - set(live):
            self._queue.forget_threads(pid)
            self._maps.forget(pid)
        for pid in live:
            self._queue.add(pid)
        end = time.monotonic()
        self._rescan_not_before = end + max((end - begin) / _RESCAN_SHARE, _RESCAN_SECONDS)

    def _handle(self, event: Mapped | Lost | ProcessEvent, recalled: _Recalled) -> None:
        match event:
            case Mapped():
                self._on_mapped(event, recalled)
            case Forked(tid, pid, _):
                self._queue.forked(tid, pid)
            case Executed(pid):
                self._queue.executed(pid)
                # a thread that executes a program becomes the main one
                self.on_main_thread(pid)
            case Exited(tid, pid):
                if self._queue.exited(tid, pid):
                    self._maps.forget(pid)
                    self._ended(pid, self._queue.take(pid))
                elif tid == pid:
                    self.on_main_thread(pid)
            case Lost() | Overflowed():
                self.has_lost = True

    def _on_mapped(self, record: Mapped, recalled: _Recalled) -> None:
        """Queue a process that mapped a file, unless the file is known to have no probes."""
        if self._queue.is_due(record.pid):
            self._queue.add(record.pid, record)
            return
        file = record.dev, record.inode, record.path
        if file not in recalled:
            try:
                recalled[file] = self._store.recall(*file)
            except KeyError:
                self._queue.add(record.pid, record)
                return
        obj = recalled[file]
        if obj is not None:
            self._queue.add(record.pid, *([] if self._registry.has(obj.key) else [record]))
