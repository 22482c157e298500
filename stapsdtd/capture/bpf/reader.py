"""The reader thread: from the rings to the sinks.

A hit wakes the thread only if the thread announced that it waits, as it does when it has found nothing. While events
come, it polls every few milliseconds. So a single event is read at once, and a flood costs the traced program no
wake-ups.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.capture.bpf.decode import RecordDecoder
from stapsdtd.capture.bpf.known_plans import KnownPlans
from stapsdtd.capture.bpf.progress import Progress
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.rings import Records, Ring
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel.cgroup_ids import CgroupIds
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.mailbox import Mailbox, ThreadEndedError
from stapsdtd.runtime.shares import Toll
from stapsdtd.runtime.slices import slices

_log = logging.getLogger(__name__)

_ROWS_PER_SWEEP = 16384
_SWEEP_SECONDS = 0.02
"""Of processor time that a sweep is to take. Shorter ones make smaller batches, of which queues that nobody reads hold
so many that garbage collections keep everybody waiting: with 5 ms for up to a second.
"""
_LEAST_BYTES_PER_SWEEP, _BYTES_PER_SWEEP = 1 << 16, 16 << 20
_TICK_SECONDS = 1e-4
_PRESSED_PART = 2
"""A ring of which half waits to be read fills up."""
_PAUSE_MS = 4
_SHORT_PAUSE_MS = 1
_IDLE_SECONDS = 0.2


class _Poller:
    """Waits until there is something to read, or a job to do."""

    def __init__(self, jobs: Mailbox, set_waiting: Callable[[bool], None]) -> None:
        self._set_waiting = set_waiting
        self._idle = select.epoll()
        self._idle.register(jobs, select.EPOLLIN)
        self._busy = select.poll()
        self._busy.register(jobs, select.POLLIN)

    def add(self, ring: Ring) -> None:
        self._idle.register(ring, select.EPOLLIN | select.EPOLLET)

    def remove(self, ring: Ring) -> None:
        self._idle.unregister(ring)

    def close(self) -> None:
        self._idle.close()

    def wait(self, rings: Sequence[Ring], read: int, idle_seconds: float | None) -> None:
        """read: how many bytes the last sweep read. idle_seconds: how long to wait if no records come."""
        if read:
            is_flood = any(ring.filled > ring.size // 8 for ring in rings)
            self._busy.poll(0 if is_flood else _SHORT_PAUSE_MS if read > _BYTES_PER_SWEEP // 64 else _PAUSE_MS)
            return
        if any(ring.filled for ring in rings):
            # a record is still being written
            self._busy.poll(_SHORT_PAUSE_MS)
            return
        self._set_waiting(True)
        # a record written before the flag was set woke nobody
        if not any(ring.filled for ring in rings):
            self._idle.poll(idle_seconds)
        self._set_waiting(False)


class _Charges:
    """Charges clients for the reading of their events: each for delivering its own, and for its part of decoding.

    While a ring fills up, those that are behind with their share of a processor lose their events before they are
    decoded, so that others' are read in time.
    """

    def __init__(self, toll: Toll | None) -> None:
        self._toll = toll
        self._is_pressed = False
        self._is_behind: dict[str, bool] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._marked = 0.0

    def begin(self, rings: Iterable[Ring]) -> None:
        """Begin a sweep."""
        self._is_pressed = any(ring.filled > ring.size // _PRESSED_PART for ring in rings)
        self._is_behind.clear()
        self._spent.clear()
        self._lap()

    def sheds(self, channel: Channel) -> bool:
        """Report whether a subscription's events are given up."""
        if self._toll is None or not self._is_pressed:
            return False
        client = channel.client
        if client not in self._is_behind:
            self._is_behind[client] = self._toll.seconds_to_wait(client) > 0
        return self._is_behind[client]

    @property
    def has_shed(self) -> bool:
        """Whether some events of this sweep were given up."""
        return any(self._is_behind.values())

    def decoded(self, events: Mapping[Channel, Sequence[EventBatch]]) -> None:
        """Note that events of this sweep were decoded."""
        sizes = {channel: sum(batch.nbytes for batch in batches) for channel, batches in events.items()}
        for_each = self._lap() / max(sum(sizes.values()), 1)
        for channel, size in sizes.items():
            self._spent[channel.client] += for_each * size

    def delivered(self, channel: Channel) -> None:
        self._spent[channel.client] += self._lap()

    def end(self) -> None:
        if self._toll is not None:
            for client, seconds in self._spent.items():
                self._toll.charge(client, seconds)

    def _lap(self) -> float:
        """Return the seconds of work since the last call."""
        before, self._marked = self._marked, time.thread_time()
        return self._marked - before


class Reader:
    """Owns the rings and the thread that reads them.

    Its methods are called by one other thread, and return when the reader thread has carried them out.

    unknown: how many records named a plan that was not known. from_file, unavailable: as `RecordDecoder` has them, of
    all records. slices: see `runtime.slices`.
    """

    def __init__(
        self,
        tables: Tables,
        set_waiting: Callable[[bool], None],
        bring_in: Callable[[int, int, int], None],
        toll: Toll | None = None,
        *,
        rows_per_sweep: int = _ROWS_PER_SWEEP,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        """set_waiting: tells the program whether the next hit is to wake this thread. bring_in: asks for a process's
        memory to be paged in for later hits; takes a pid, an address and a size in bytes, and does not wait. toll: for
        reading clients' events; None if nobody pays.
        rows_per_sweep: how many records are read at once, at most. idle_seconds: how often counters are reported while
        no records come.
        """
        self._rows_per_sweep = rows_per_sweep
        self._bytes_per_sweep = _BYTES_PER_SWEEP
        self._idle_seconds = idle_seconds
        self._bring_in = bring_in
        self._cgroup_ids = CgroupIds()
        self._cgroups = CgroupNames(self._cgroup_ids.path_of)
        self._jobs = Mailbox()
        self._heartbeat = Heartbeat("the thread that reads events", self._jobs.ask)
        self._rings: list[Ring] = []
        self._retired: list[Ring] = []
        self._progress: dict[Ring, Progress] = {}
        self._charges = _Charges(toll)
        self._plans = KnownPlans(tables)
        self.slices = slices()
        self.unknown = self.from_file = self.unavailable = 0
        self._stopping = False
        self._poller = _Poller(self._jobs, set_waiting)
        self._thread = threading.Thread(target=self._run, name="stapsdtd-reader", daemon=True)
        self._thread.start()

    def add_ring(self, ring: Ring) -> None:
        def job() -> None:
            self._rings.append(ring)
            self._progress[ring] = Progress(time.monotonic_ns())
            self._poller.add(ring)

        self._jobs.call(job)

    def retire_ring(self, ring: Ring) -> None:
        """Read a ring that no hit writes to any more to its end, then close it."""
        self._jobs.call(lambda: self._retired.append(ring))

    def begin(self, plans: Iterable[ActivePlan]) -> None:
        """Learn plans. Must be called before a slot names them, so that no record is of an unknown plan."""

        def job() -> None:
            self._plans.begin(plans)

        self._jobs.call(job)

    def end(self, plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]:
        """Deliver the rest of plans that no hit uses any more, report their last counters, and forget them.

        Return a future that any thread may wait for. closing: channels that receive nothing once it is done.
        """
        done: Future[None] = Future()

        def job() -> None:
            self._plans.end(plans, closing, self._rings, done)

        def tell_failure(posted: Future[None]) -> None:
            if error := posted.exception():
                done.set_exception(error)

        self._jobs.post(job).add_done_callback(tell_failure)
        return done

    def post(self, work: Callable[[], None]) -> None:
        """Have the reader thread do some work, such as to hand rows to a sink; any thread may call this."""
        self._jobs.post(work)

    def post_behind_counters(self, work: Callable[[], None]) -> None:
        """The same, once the sinks know what hits had been counted until then."""

        def job() -> None:
            self._plans.report()
            work()

        self._jobs.post(job)

    def stop(self) -> None:
        def job() -> None:
            self._stopping = True

        with contextlib.suppress(ThreadEndedError):
            self._jobs.call(job)
        self._thread.join()
        for ring in self._rings:
            ring.close()
        self._rings.clear()
        self._poller.close()
        self._jobs.close()
        self._cgroup_ids.close()

    def ask(self) -> Future[None]:
        return self._jobs.ask()

    def problem(self) -> str | None:
        """Return why no events are being read, or None if they are. May be called from any thread."""
        return self._heartbeat.problem()

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._jobs.abandon()
            self._plans.abandon()

    def _read_on(self) -> None:
        while not self._stopping:
            try:
                with self.slices.measured():
                    read = self._sweep()
                    self._plans.settle()
                    self._close_retired()
            except Exception:  # noqa: BLE001 - later records may be readable
                _log.exception("reading events failed")
                read = 0
            is_counting = self._plans.by_generation or self._retired
            self._poller.wait(self._rings, read, self._idle_seconds if is_counting else None)
            with self.slices.measured():
                self._jobs.run()

    def _close_retired(self) -> None:
        for ring in [ring for ring in self._retired if not ring.filled]:
            self._retired.remove(ring)
            self._rings.remove(ring)
            del self._progress[ring]
            self._poller.remove(ring)
            ring.close()

    def _sweep(self) -> int:
        """Read each ring once, deliver events in the order of time, and return how many bytes were read."""
        now_ns = complete_ns = time.monotonic_ns()
        began = time.thread_time()
        peeked: list[tuple[Ring, Records]] = []
        most_bytes = self._bytes_per_sweep // max(sum(bool(ring.filled) for ring in self._rings), 1)
        for ring in self._rings:
            limit = min(self._rows_per_sweep, max(most_bytes // ring.stride, 1))
            records = ring.peek(limit)
            has_more = len(records) == limit
            # no other ring may be read beyond what this one has been
            progress = self._progress[ring]
            until_ns = progress.until(records, has_more=has_more, is_held_up=ring.is_held_up, now_ns=now_ns)
            complete_ns = min(complete_ns, until_ns)
            if len(records):
                peeked.append((ring, records))
        if len(self._rings) > 1:
            peeked = [(ring, _until(records, complete_ns)) for ring, records in peeked]
        events: dict[Channel, list[EventBatch]] = {}
        self._charges.begin(self._rings)
        for ring, records in peeked:
            for channel, batch in self._decode(ring, records):
                events.setdefault(channel, []).append(batch)
            ring.consume(len(records))
        self._charges.decoded(events)
        for channel, batches in events.items():
            try:
                channel.deliver(batches)
            except Exception:  # noqa: BLE001 - other subscriptions still get their events
                count = sum(map(len, batches))
                _log.exception("%d events could not be delivered", count)
                channel.lost(LossStage.DECODE, count)
            self._charges.delivered(channel)
        self._charges.end()
        read = sum(len(records) * ring.stride for ring, records in peeked)
        if read and not self._charges.has_shed:
            # some virtual machines' clock of a thread goes in ticks
            fits = int(read * _SWEEP_SECONDS / max(time.thread_time() - began, _TICK_SECONDS))
            self._bytes_per_sweep = min(max(fits, _LEAST_BYTES_PER_SWEEP), _BYTES_PER_SWEEP)
        return read

    def _decode(self, ring: Ring, records: Records) -> list[tuple[Channel, EventBatch]]:
        if not len(records):
            return []
        try:
            decoder = RecordDecoder(records, ring.raw(), ring.stride, self._cgroups)
            batches, unknown = decoder.events(self._plans.by_generation, self._charges.sheds)
            self.from_file += decoder.from_file
            self.unavailable += decoder.unavailable
        except Exception:  # noqa: BLE001 - these records are written off when their plans end
            _log.exception("%d records could not be decoded", len(records))
            return []
        if unknown:
            self.unknown += unknown
            _log.error("%d records name plans that are not known", unknown)
        try:
            for pid, address, byte_count in decoder.unread():
                self._bring_in(pid, address, byte_count)
        except Exception:  # noqa: BLE001 - later hits do without
            _log.exception("memory that hits could not read cannot be paged in")
        return batches


def _until(records: Records, moment_ns: int) -> Records:
    """Return the records that are not later; a ring is in the order of time but for hits at the same moment."""
    times = records["time_ns"]
    return records if times[-1] <= moment_ns else records[: int(np.searchsorted(times, moment_ns, "right"))]
