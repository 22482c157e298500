"""The kernel's events: mappings by perf or a BPF program; forks, execs and exits by the process connector."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.connector import Exited, Forked, Overflowed, ProcessConnector, ProcessEvent
from stapsdtd.kernel.mapping_programs import MappingPrograms
from stapsdtd.kernel.perf import Lost, Mapped, MappingRing, online_cpus
from stapsdtd.procs.descendants import Descendants
from stapsdtd.procs.threads import Threads

_log = logging.getLogger(__name__)
_T_co = TypeVar("_T_co", covariant=True)


class Source(Protocol[_T_co]):
    """What the kernel reports through a descriptor."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once there is something new."""

    def read(self) -> Iterable[_T_co]:
        """Return what came since the last call, without waiting."""

    def close(self) -> None:
        """Listen no more."""


class KernelEvents:
    """fileno() is readable once there is something new. All methods but catch_up() are called from one thread."""

    def __init__(
        self,
        threads: Threads,
        descendants: Descendants,
        *,
        cpus: Callable[[], Sequence[int]] = online_cpus,
        open_ring: Callable[[int], Source[Mapped | Lost]] = MappingRing,
        open_programs: Callable[[], Source[Mapped | Lost]] = MappingPrograms,
        open_connector: Callable[[], Source[ProcessEvent]] = ProcessConnector,
    ) -> None:
        """threads, descendants: learn of forks and exits at once. open_ring: for a CPU. open_programs: in place of all
        rings. They and open_connector raise KernelFeatureError if this kernel has no such source.
        """
        self._threads = threads
        self._descendants = descendants
        self._cpus = cpus
        self._open_ring = open_ring
        self._open_programs = open_programs
        self._open_connector = open_connector
        self._wake: Callable[[], None] = lambda: None
        self._rings: list[Source[Mapped | Lost]] = []
        self._connector: Source[ProcessEvent] | None = None
        self._connector_lock = threading.Lock()
        self._processes: deque[ProcessEvent] = deque()
        self._epoll = select.epoll()

    def open(self) -> list[KernelFeatureError]:
        """Begin to listen. Return what this kernel lacks."""
        missing = []
        try:
            self._rings = self._open_rings()
        except KernelFeatureError as error:
            missing.append(error)
        try:
            self._connector = self._open_connector()
        except KernelFeatureError as error:
            missing.append(error)
        return missing

    def _open_rings(self) -> list[Source[Mapped | Lost]]:
        """Return a ring of each CPU, or the program's. Raises KernelFeatureError."""
        try:
            return self._open_perf_rings()
        except KernelFeatureError as refused:
            try:
                return [self._open_programs()]
            except KernelFeatureError as error:
                _log.info("%s", error)
                raise refused from error

    def _open_perf_rings(self) -> list[Source[Mapped | Lost]]:
        """Raises KernelFeatureError."""
        rings: list[Source[Mapped | Lost]] = []
        with contextlib.ExitStack() as undo:
            for cpu in self._cpus():
                rings.append(self._open_ring(cpu))
                undo.callback(rings[-1].close)
            undo.pop_all()
        return rings

    def follow(self, wake: Callable[[], None]) -> None:
        """Have fileno() and catch_up() report what comes from now on. wake: called from any thread if catch_up() read
        any event.
        """
        self._wake = wake
        for ring in self._rings:
            self._epoll.register(ring.fileno(), select.EPOLLIN)
        if self._connector is not None:
            self._threads.follow(self.catch_up)
            self._descendants.connect(self.catch_up)
            self._epoll.register(self._connector.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def is_closed(self) -> bool:
        return self._epoll.closed

    def close(self) -> None:
        self._epoll.close()
        for ring in self._rings:
            ring.close()
        self._threads.unfollow()
        self._descendants.disconnect()
        if self._connector is not None:
            with self._connector_lock:
                self._connector.close()
                self._connector = None

    def read(self) -> Iterator[Mapped | Lost | ProcessEvent]:
        """Yield what came since the last call. Mappings come first, so that they are known when their process ends."""
        for ring in self._rings:
            yield from ring.read()
        self._read_connector()
        while self._processes:
            yield self._processes.popleft()

    def catch_up(self) -> None:
        """Read the connector, from any thread. Threads are known at once; processes are looked at in their turn."""
        self._read_connector()
        if self._processes:
            self._wake()

    def _read_connector(self) -> None:
        with self._connector_lock:
            if self._connector is None:
                return
            for event in self._connector.read():
                match event:
                    case Forked(tid, pid, parent):
                        self._threads.forked(tid, pid)
                        self._descendants.forked(tid, pid, parent)
                    case Exited(tid, pid):
                        self._threads.exited(tid, pid)
                        self._descendants.exited(tid, pid)
                    case Overflowed():
                        self._threads.missed()
                        self._descendants.missed()
                    case _:
                        pass
                self._processes.append(event)
