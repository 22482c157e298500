"""tracefs instances: each has its own events and rings, and can be drained and removed without the others."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from stapsdtd.capture.names import Owner
from stapsdtd.errors import LimitReachedError, TracefsRejectedError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.events import Instance

_log = logging.getLogger(__name__)

_WAKE_PERCENT = 25


class Instances:
    """Makes instances with their rings set up, bounds the rings of all together, and removes instances again."""

    def __init__(
        self, tracefs: Tracefs, owner: Owner, max_buffer_bytes: int, on_gone: Callable[[Instance], None]
    ) -> None:
        """max_buffer_bytes: of all instances' rings together. on_gone: called when an instance was removed."""
        self._tracefs = tracefs
        self._owner = owner
        self._max_buffer_bytes = max_buffer_bytes
        self._on_gone = on_gone
        self._serials = itertools.count(1)
        self._buffer_bytes: dict[Instance, int] = {}
        self._discarded: list[Instance] = []

    def make(self, buffer_kib: int) -> Instance:
        """buffer_kib: of each CPU. Raises LimitReachedError and TracefsRejectedError."""
        buffer_bytes = buffer_kib * 1024 * len(online_cpus())
        if sum(self._buffer_bytes.values()) + buffer_bytes > self._max_buffer_bytes:
            raise LimitReachedError(
                f"{buffer_kib} KiB for each CPU are more than is left of the {self._max_buffer_bytes >> 20} MiB "
                "that this server allows for all kernel buffers",
                "kernel_buffer_bytes",
                "kernel_buffer_kib",
            )
        instance = self._owner.instance(next(self._serials))
        self._tracefs.make_instance(instance)
        self._buffer_bytes[instance] = buffer_bytes
        base = f"instances/{instance}"
        try:
            self._tracefs.write(f"{base}/trace_clock", "mono")
            # a full ring drops new events and counts each; one that overwrites may miscount the old ones
            self._tracefs.write(f"{base}/options/overwrite", "0")
            self._tracefs.write(f"{base}/buffer_size_kb", str(buffer_kib))
            self._tracefs.write(f"{base}/buffer_percent", str(_WAKE_PERCENT))
        except BaseException:
            self.discard(instance)
            raise
        return instance

    def exclude(self, instance: Instance, pids: Iterable[int]) -> None:
        """Keep the threads that processes have now from leaving events. Raises TracefsRejectedError."""
        threads = sorted({thread for pid in pids for thread in procfs.thread_ids(pid)})
        if threads:
            self._tracefs.append(f"instances/{instance}/set_event_notrace_pid", " ".join(map(str, threads)))

    def discard(self, instance: Instance) -> None:
        """Remove an instance that nothing reads, now or, if somebody has it open, when remove_discarded() can."""
        self._discarded.append(instance)
        self.remove_discarded()

    def remove_discarded(self, log_level: int = logging.WARNING) -> None:
        for instance in list(self._discarded):
            try:
                self._tracefs.remove_instance(instance)
            except TracefsRejectedError as error:
                _log.log(log_level, "%s; trying again later", error)
            else:
                self._discarded.remove(instance)
                del self._buffer_bytes[instance]
                self._on_gone(instance)
