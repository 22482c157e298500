"""The reader thread: from the instances' ring buffers to the sinks.

A ring that is a quarter full wakes the thread; otherwise it polls on a short timer. So a single event is read soon, a
flood is read in batches, and no hit pays for a wake-up of its own.

Order: a thread that moves to another CPU has completed its earlier records by then. So everything that fired before a
sweep over the CPUs began is readable in that sweep, and is delivered; later records are held for the next sweep.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from stapsdtd.capture.engine import LossStage, RingMetrics, Sink, SubscriptionKey
from stapsdtd.capture.ftrace.decode import Decoded, Decoder, PidsOf, decode_records
from stapsdtd.capture.ftrace.pages import Records, parse_pages
from stapsdtd.capture.ftrace.rings import PAGES_PER_READ, Ring, open_rings
from stapsdtd.events.batch import EventBatch, merge
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.events import Instance
from stapsdtd.runtime.futures import followed_by
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.mailbox import Mailbox, ThreadEndedError
from stapsdtd.runtime.slices import slices

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.02
_LOSS_TICK_NS = 200_000_000
_CLOCK_SKEW_NS = 1_000_000  # trace_clock mono may run ahead of clock_gettime while the clock is adjusted


@dataclass(slots=True)
class _Channel:
    """The instances of one subscription, whose events are delivered in one order.

    excluded: processes whose events are left out.
    """

    sink: Sink
    excluded: frozenset[int] = frozenset()
    rings: list[Ring] = field(default_factory=list)
    decoders: dict[Instance, dict[int, Decoder]] = field(default_factory=dict)
    losses_reported_ns: int = 0


class Reader:
    """Owns the descriptors of all instances, and the thread that reads them.

    Its methods may be called from any other thread, and wait until the reader thread has carried them out.
    """

    def __init__(self, tracefs: Tracefs, pids_of: PidsOf) -> None:
        self._tracefs = tracefs
        self._pids_of = pids_of
        self._channels: dict[SubscriptionKey, _Channel] = {}
        self._jobs = Mailbox()
        self._heartbeat = Heartbeat("the thread that reads events", self._jobs.ask)
        self._epoll = select.epoll()
        self._epoll.register(self._jobs, select.EPOLLIN)
        self.slices = slices()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stapsdtd-reader", daemon=True)
        self._thread.start()

    def open(self, subscription_key: SubscriptionKey, sink: Sink) -> None:
        def job() -> None:
            self._channels[subscription_key] = _Channel(sink)

        self._jobs.call(job)

    def exclude(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> None:
        """Leave out events of these processes from now on, in addition to those named before."""

        def job() -> None:
            self._channels[subscription_key].excluded |= pids

        self._jobs.call(job)

    def add(self, subscription_key: SubscriptionKey, instance: Instance, cpus: list[int], buffer_kib: int) -> None:
        """Begin to read an existing instance. buffer_kib: of each CPU. Raises OSError."""
        rings = open_rings(self._tracefs, instance, cpus, buffer_kib)

        def job() -> None:
            self._channels[subscription_key].decoders[instance] = {}
            self._channels[subscription_key].rings += rings
            for ring in rings:
                self._epoll.register(ring.descriptor, select.EPOLLIN)

        self._jobs.call(job)

    def decode_with(self, subscription_key: SubscriptionKey, instance: Instance, decoder: Decoder) -> None:
        """Set the decoder of an event. Must be called before the event is enabled."""

        def job() -> None:
            self._channels[subscription_key].decoders[instance][decoder.format.id] = decoder

        self._jobs.call(job)

    def finish(self, subscription_key: SubscriptionKey, instance: Instance, hits: int | None) -> None:
        """Deliver the rest of an instance whose events are all disabled, report its losses, and close it.

        hits: how often its events fired, None if unknown. The kernel drops records that are larger than a sub-buffer,
        as with long strings, without counting them in the ring's statistics.
        """

        def job() -> None:
            channel = self._channels[subscription_key]
            try:
                self._drain(channel)
                self._report_losses(channel)
                rings = [ring for ring in channel.rings if ring.instance == instance]
                accounted = sum(ring.read + ring.lost for ring in rings)
                if hits is not None and hits > accounted:
                    channel.sink.lost(LossStage.KERNEL_BUFFER, hits - accounted)
            finally:
                for ring in [ring for ring in channel.rings if ring.instance == instance]:
                    self._epoll.unregister(ring.descriptor)
                    ring.close()
                    channel.rings.remove(ring)
                del channel.decoders[instance]

        self._jobs.call(job)

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:
        """As `Engine.collect`. Any thread may call this."""
        begun_ns = 0

        def job() -> None:
            nonlocal begun_ns
            begun_ns = time.monotonic_ns()
            channel = self._channels.get(subscription_key)
            if channel is not None:
                self._drain(channel)
                self._report_losses(channel)

        return followed_by(self._jobs.post(job), lambda: begun_ns)

    def close(self, subscription_key: SubscriptionKey) -> None:
        """Forget a subscription, all of whose instances are finished."""

        def job() -> None:
            del self._channels[subscription_key]

        self._jobs.call(job)

    def stop(self) -> None:
        def job() -> None:
            self._stopping = True

        with contextlib.suppress(ThreadEndedError):
            self._jobs.call(job)
        self._thread.join()
        self._epoll.close()
        self._jobs.close()

    def ask(self) -> Future[None]:
        return self._jobs.ask()

    def problem(self) -> str | None:
        """Return why no events are being read, or None if they are."""
        return self._heartbeat.problem()

    def metrics(self) -> list[RingMetrics]:
        """Return the sums of each CPU's rings, at most 200 ms old."""
        by_cpu: dict[int, list[Ring]] = {}
        for channel in list(self._channels.values()):
            for ring in list(channel.rings):
                by_cpu.setdefault(ring.cpu, []).append(ring)
        return [
            RingMetrics(f"cpu{cpu}", sum(ring.filled_bytes for ring in rings), sum(ring.size_bytes for ring in rings))
            for cpu, rings in sorted(by_cpu.items())
        ]

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._jobs.abandon()

    def _read_on(self) -> None:
        while not self._stopping:
            self._epoll.poll(_TICK_SECONDS if self._channels else None)
            with self.slices.measured():
                self._jobs.run()
                self._sweep_all()

    def _sweep_all(self) -> None:
        # on its own, so that no variable keeps a closed subscription's sink while the thread waits
        for channel in self._channels.values():
            try:
                self._sweep(channel)
            except Exception:  # noqa: BLE001 - one subscription's failure must not affect others
                _log.exception("reading events failed")

    def _drain(self, channel: _Channel) -> None:
        """Deliver everything that has fired until now."""
        until = time.monotonic_ns() + _CLOCK_SKEW_NS
        while self._sweep(channel) < until:
            pass

    def _sweep(self, channel: _Channel) -> int:
        """Read each ring once, deliver what is complete, and return the time up to which that is."""
        complete_ns = time.monotonic_ns()
        readable: list[tuple[Ring, Records]] = []
        for ring in channel.rings:
            pages = ring.read_pages()
            if not pages:
                if ring.held is not None:
                    readable.append((ring, ring.held))
                continue
            try:
                records = parse_pages(ring.cpu, pages, ring.page_format)
                all_records = records if ring.held is None else ring.held.followed_by(records)
            except Exception:  # noqa: BLE001 - finish() counts what these pages held as lost
                _log.exception("%d pages of %s could not be read", len(pages), ring.instance)
                if ring.held is not None:
                    readable.append((ring, ring.held))
                continue
            ring.read += len(records)
            if len(pages) == PAGES_PER_READ and len(records):
                # this ring has more, so no other ring may be read beyond this one's last record
                complete_ns = min(complete_ns, int(records.time_ns[-1]))
            readable.append((ring, all_records))
        batches: list[EventBatch] = []
        filtered = undecided = 0
        for ring, records in readable:
            due, later = records.split(complete_ns)
            ring.held = later if len(later) else None
            try:
                decoded = decode_records(due, channel.decoders[ring.instance], self._pids_of, channel.excluded)
            except Exception:  # noqa: BLE001 - these records are lost, those of other rings are not
                _log.exception("%d records of %s could not be decoded", len(due), ring.instance)
                decoded = Decoded([], 0, len(due))
            batches += decoded.batches
            filtered += decoded.filtered
            undecided += decoded.undecided
            if decoded.unknown:
                channel.sink.lost(LossStage.DECODE, decoded.unknown)
        if filtered:
            channel.sink.filtered(filtered, undecided)
        if batches:
            channel.sink.deliver(merge(batches))
        if complete_ns - channel.losses_reported_ns > _LOSS_TICK_NS:
            channel.losses_reported_ns = complete_ns
            self._report_losses(channel)
        return complete_ns

    def _report_losses(self, channel: _Channel) -> None:
        for ring in channel.rings:
            if lost := ring.newly_lost():
                channel.sink.lost(LossStage.KERNEL_BUFFER, lost)
