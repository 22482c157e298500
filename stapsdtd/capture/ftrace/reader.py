"""The reader thread: from the instances' ring buffers to the sinks.

A ring wakes the thread when it is a quarter full; a short timer does it otherwise, so that a single event is seen at
once and a flood is read in batches, and the traced program never pays for a wake-up by itself.

Order: a thread that moved to another CPU finished its earlier records before. So what fired up to the moment at which
a sweep over the CPUs began is complete when the sweep ends, and is delivered; what is newer waits for the next sweep.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from stapsdtd.capture.engine import LossStage, RingMetrics, Sink, SubscriptionKey
from stapsdtd.capture.ftrace.decode import Decoded, Decoder, PidsOf, decode_records
from stapsdtd.capture.ftrace.format import PageFormat
from stapsdtd.capture.ftrace.pages import Records, parse_pages
from stapsdtd.events.columns import merge
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.events import Instance
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.mailbox import Mailbox, ThreadEndedError

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.02
_LOSS_TICK_NS = 200_000_000
_CLOCK_SKEW_NS = 1_000_000  # trace_clock mono may run ahead of clock_gettime while the clock is adjusted
_PAGES_PER_SWEEP = 256
_STATS_BYTES = 4096
_FILLED = re.compile(r"^bytes: (\d+)$", re.MULTILINE)
_DROPPED = re.compile(r"^dropped events: (\d+)$|^overrun: (\d+)$|^commit overrun: (\d+)$", re.MULTILINE)


@dataclass(slots=True)
class _Ring:
    """One CPU's buffer of one instance; stats is open on the file of its figures, so that they can be had even where
    tracefs was unmounted since. held are records that wait for their turn.
    """

    instance: Instance
    cpu: int
    descriptor: int
    stats: int
    size_bytes: int
    page_format: PageFormat
    held: Records | None = None
    read: int = 0
    lost: int = 0
    filled_bytes: int = 0

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.stats)


@dataclass(slots=True)
class _Channel:
    """What one sink is fed from: the instances of one subscription, whose events have one order.

    excluded: processes whose events are not delivered.
    """

    sink: Sink
    excluded: frozenset[int] = frozenset()
    rings: list[_Ring] = field(default_factory=list)
    decoders: dict[Instance, dict[int, Decoder]] = field(default_factory=dict)
    losses_told_ns: int = 0


class Reader:
    """Owns the descriptors of all instances, in channels by subscription.

    Its methods may be called from any other thread; each waits for the thread.
    """

    def __init__(self, tracefs: Tracefs, pids_of: PidsOf) -> None:
        self._tracefs = tracefs
        self._pids_of = pids_of
        self._channels: dict[SubscriptionKey, _Channel] = {}
        self._jobs = Mailbox()
        self._pulse = Heartbeat("the thread that reads events", self._jobs.ask)
        self._epoll = select.epoll()
        self._epoll.register(self._jobs, select.EPOLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stapsdtd-reader", daemon=True)
        self._thread.start()

    def open(self, subscription_key: SubscriptionKey, sink: Sink) -> None:
        def job() -> None:
            self._channels[subscription_key] = _Channel(sink)

        self._jobs.call(job)

    def exclude(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> None:
        """Deliver no events of these processes from now on, nor of those that were named before."""

        def job() -> None:
            self._channels[subscription_key].excluded |= pids

        self._jobs.call(job)

    def add(self, subscription_key: SubscriptionKey, instance: Instance, cpus: list[int], buffer_kib: int) -> None:
        """Begin to read an instance that exists; buffer_kib: each CPU's."""
        rings: list[_Ring] = []
        page_format = PageFormat.parse(self._tracefs.read("events/header_page"))
        try:
            for cpu in cpus:
                base = f"instances/{instance}/per_cpu/cpu{cpu}"
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                stats = os.open(self._tracefs.path(f"{base}/stats"), flags)
                try:
                    descriptor = os.open(self._tracefs.path(f"{base}/trace_pipe_raw"), flags)
                except OSError:
                    os.close(stats)
                    raise
                rings.append(_Ring(instance, cpu, descriptor, stats, buffer_kib * 1024, page_format))
        except OSError:
            # while one is open, the instance cannot be removed
            for ring in rings:
                ring.close()
            raise

        def job() -> None:
            self._channels[subscription_key].decoders[instance] = {}
            self._channels[subscription_key].rings += rings
            for ring in rings:
                self._epoll.register(ring.descriptor, select.EPOLLIN)

        self._jobs.call(job)

    def decode_with(self, subscription_key: SubscriptionKey, instance: Instance, decoder: Decoder) -> None:
        """Tell how to read an event's records, before the event is enabled in an instance of the channel."""

        def job() -> None:
            self._channels[subscription_key].decoders[instance][decoder.format.id] = decoder

        self._jobs.call(job)

    def finish(self, subscription_key: SubscriptionKey, instance: Instance, hits: int | None) -> None:
        """Deliver what is left in an instance whose events are all disabled, tell its losses, and let go of it.

        hits: how often its events fired, None where that is not known. The kernel drops a record that is larger than a
        sub-buffer, as one with long strings can be, without a trace in the ring's figures.
        """

        def job() -> None:
            channel = self._channels[subscription_key]
            try:
                self._drain(channel)
                self._tell_losses(channel)
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

    def close(self, subscription_key: SubscriptionKey) -> None:
        """End a channel, all of whose instances are finished."""

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
        """Return why it reads nothing any more; None where it does."""
        return self._pulse.problem()

    def metrics(self) -> list[RingMetrics]:
        """Of each CPU's rings together, as they were some 200 ms ago at most."""
        found: dict[int, list[_Ring]] = {}
        for channel in list(self._channels.values()):
            for ring in list(channel.rings):
                found.setdefault(ring.cpu, []).append(ring)
        return [
            RingMetrics(f"cpu{cpu}", sum(ring.filled_bytes for ring in rings), sum(ring.size_bytes for ring in rings))
            for cpu, rings in sorted(found.items())
        ]

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._jobs.abandon()

    def _read_on(self) -> None:
        while not self._stopping:
            self._epoll.poll(_TICK_SECONDS if self._channels else None)
            self._jobs.run()
            for channel in self._channels.values():
                try:
                    self._sweep(channel)
                except Exception:  # noqa: BLE001 - one channel's trouble must not end the others' reading
                    _log.exception("reading events failed")

    def _drain(self, channel: _Channel) -> None:
        """Deliver everything that fired until now."""
        until = time.monotonic_ns() + _CLOCK_SKEW_NS
        while self._sweep(channel) < until:
            pass

    def _sweep(self, channel: _Channel) -> int:
        """Read each ring once, deliver what is complete, and return up to which moment that is."""
        complete_ns = time.monotonic_ns()
        found: list[tuple[_Ring, Records]] = []
        for ring in channel.rings:
            pages = self._read_pages(ring)
            if not pages:
                if ring.held is not None:
                    found.append((ring, ring.held))
                continue
            try:
                records = parse_pages(ring.cpu, pages, ring.page_format)
                all_records = records if ring.held is None else ring.held.followed_by(records)
            except Exception:  # noqa: BLE001 - what these held is found missing in the end; see finish()
                _log.exception("%d pages of %s could not be read", len(pages), ring.instance)
                if ring.held is not None:
                    found.append((ring, ring.held))
                continue
            ring.read += len(records)
            if len(pages) == _PAGES_PER_SWEEP and len(records):
                # this ring has more, so no other may go on beyond what was read of it
                complete_ns = min(complete_ns, int(records.time_ns[-1]))
            found.append((ring, all_records))
        blocks = []
        filtered = 0
        for ring, records in found:
            due, later = records.split(complete_ns)
            ring.held = later if len(later) else None
            try:
                decoded = decode_records(due, channel.decoders[ring.instance], self._pids_of, channel.excluded)
            except Exception:  # noqa: BLE001 - these records are lost, and what the other rings gave is not
                _log.exception("%d records of %s could not be decoded", len(due), ring.instance)
                decoded = Decoded([], 0, len(due))
            blocks += decoded.blocks
            filtered += decoded.filtered
            if decoded.unknown:
                channel.sink.lost(LossStage.DECODE, decoded.unknown)
        if filtered:
            channel.sink.filtered(filtered)
        if blocks:
            channel.sink.deliver(merge(blocks))
        if complete_ns - channel.losses_told_ns > _LOSS_TICK_NS:
            channel.losses_told_ns = complete_ns
            self._tell_losses(channel)
        return complete_ns

    def _read_pages(self, ring: _Ring) -> list[bytes]:
        pages: list[bytes] = []
        while len(pages) < _PAGES_PER_SWEEP:
            try:
                page = os.read(ring.descriptor, ring.page_format.bytes)
            except BlockingIOError:
                break
            if not page:
                break
            pages.append(page.ljust(ring.page_format.bytes, b"\0"))
        return pages

    def _tell_losses(self, channel: _Channel) -> None:
        """Each ring's stats: what found no room is `dropped events`; a ring that does not overwrite has no overruns."""
        for ring in channel.rings:
            stats = os.pread(ring.stats, _STATS_BYTES, 0).decode()
            filled = _FILLED.search(stats)
            ring.filled_bytes = int(filled[1]) if filled else 0
            figures = _DROPPED.findall(stats)
            lost = sum(int(number) for numbers in figures for number in numbers if number)
            if lost > ring.lost:
                channel.sink.lost(LossStage.KERNEL_BUFFER, lost - ring.lost)
                ring.lost = lost
