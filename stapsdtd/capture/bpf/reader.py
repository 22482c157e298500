"""The reader thread: from the rings to the sinks.

A hit wakes the thread only when it said that it waits, which it does when it found nothing; while events come it looks
every few milliseconds. So a single event is seen at once, and a flood costs the traced program no wake-ups.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.decode import Batch
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.rings import Records, Ring
from stapsdtd.capture.bpf.tables import Generation, Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.columns import U64, Block
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.mailbox import Mailbox, ThreadEndedError

_log = logging.getLogger(__name__)

_ROWS_PER_SWEEP = 16384
_BYTES_PER_SWEEP = 16 << 20
_PAUSE_MS = 4
_SHORT_PAUSE_MS = 1
_IDLE_MS = 200
_ACCOUNT_NS = 200_000_000


@dataclass(frozen=True, slots=True)
class _Ending:
    """Plans whose last records are in the rings, each of which was filled up to a position when that was so."""

    plans: tuple[ActivePlan, ...]
    closing: tuple[Channel, ...]
    filled_to: dict[Ring, int]
    done: Future[None] = field(default_factory=Future)


class Reader:
    """All methods but the thread's own are called by one other thread, and return when it is done.

    unknown: records that named plans that were not known. from_file, unavailable: as `Batch` has them, of all records.
    """

    def __init__(
        self, tables: Tables, set_waiting: Callable[[bool], None], bring_in: Callable[[int, int, int], None]
    ) -> None:
        """set_waiting: tells the program whether the next hit is to wake this thread. bring_in: has memory of a process
        there for later hits; takes its pid, the address and how many bytes, and does not wait.
        """
        self._tables = tables
        self._set_waiting = set_waiting
        self._bring_in = bring_in
        self._jobs = Mailbox()
        self._pulse = Heartbeat("the thread that reads events", self._jobs.ask)
        self._rings: list[Ring] = []
        self._retired: list[Ring] = []
        self._plans: dict[Generation, ActivePlan] = {}
        self._endings: list[_Ending] = []
        self._told: dict[int, list[_Told]] = {}
        self._totals: U64 = np.zeros(layout.MAX_COUNTERS, np.uint64)
        self._accounts_told_ns = 0
        self.unknown = self.from_file = self.unavailable = 0
        self._stopping = False
        self._idle = select.epoll()
        self._idle.register(self._jobs, select.EPOLLIN)
        self._busy = select.poll()
        self._busy.register(self._jobs, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="stapsdtd-reader", daemon=True)
        self._thread.start()

    def add_ring(self, ring: Ring) -> None:
        def job() -> None:
            self._rings.append(ring)
            self._idle.register(ring, select.EPOLLIN | select.EPOLLET)

        self._jobs.call(job)

    def retire_ring(self, ring: Ring) -> None:
        """Read a ring that no hit writes to any more to its end, and close it."""
        self._jobs.call(lambda: self._retired.append(ring))

    def begin(self, plans: Iterable[ActivePlan]) -> None:
        """Learn plans before a slot names them, so that no record of an unknown plan is met."""

        def job() -> None:
            for plan in plans:
                self._plans[plan.entry.generation] = plan
                for told in _told_of(plan):
                    for cell in told.cells:
                        self._told.setdefault(cell, []).append(told)
                        # the cell was another plan's before
                        self._totals[cell] = 0

        self._jobs.call(job)

    def end(self, plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]:
        """Deliver what is left of plans by which no hit goes any more, tell their last figures, and forget them.

        closing: channels that are told nothing after that. What is returned is done then; for any thread.
        """
        done: Future[None] = Future()

        def job() -> None:
            filled_to = {ring: ring.produced for ring in self._rings}
            self._endings.append(_Ending(tuple(plans), tuple(closing), filled_to, done))

        def tell_failure(posted: Future[None]) -> None:
            if error := posted.exception():
                done.set_exception(error)

        self._jobs.post(job).add_done_callback(tell_failure)
        return done

    def stop(self) -> None:
        def job() -> None:
            self._stopping = True

        with contextlib.suppress(ThreadEndedError):
            self._jobs.call(job)
        self._thread.join()
        for ring in self._rings:
            ring.close()
        self._rings.clear()
        self._idle.close()
        self._jobs.close()

    def ask(self) -> Future[None]:
        return self._jobs.ask()

    def problem(self) -> str | None:
        """Return why it reads nothing any more, in any thread; None where it does."""
        return self._pulse.problem()

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._jobs.abandon()
            for ending in self._endings:
                ending.done.set_exception(ThreadEndedError())

    def _read_on(self) -> None:
        while not self._stopping:
            try:
                read = self._sweep()
                self._tell_accounts()
                self._finish_endings()
                self._close_retired()
            except Exception:  # noqa: BLE001 - the next records may be better
                _log.exception("reading events failed")
                read = 0
            self._wait(read)
            self._jobs.run()

    def _wait(self, read: int) -> None:
        """read: bytes found by the last sweep."""
        if read:
            is_flood = any(ring.filled > ring.size // 8 for ring in self._rings)
            self._busy.poll(0 if is_flood else _SHORT_PAUSE_MS if read > _BYTES_PER_SWEEP // 64 else _PAUSE_MS)
            return
        if any(ring.filled for ring in self._rings):
            # a record that is being written
            self._busy.poll(_SHORT_PAUSE_MS)
            return
        self._set_waiting(True)
        # what came before the flag was seen would wake nobody
        if not any(ring.filled for ring in self._rings):
            self._idle.poll(_IDLE_MS / 1000 if self._plans or self._retired else None)
        self._set_waiting(False)

    def _close_retired(self) -> None:
        for ring in [ring for ring in self._retired if not ring.filled]:
            self._retired.remove(ring)
            self._rings.remove(ring)
            self._idle.unregister(ring)
            ring.close()

    def _finish_endings(self) -> None:
        while self._endings and all(ring.consumed >= to for ring, to in self._endings[0].filled_to.items()):
            ending = self._endings.pop(0)
            try:
                self._settle(ending)
            finally:
                # somebody waits for it, whatever came of the last figures
                ending.done.set_result(None)

    def _settle(self, ending: _Ending) -> None:
        try:
            totals = self._tables.totals()
            self._tell(totals)
            for plan in ending.plans:
                self._write_off(plan, totals)
        finally:
            for plan in ending.plans:
                self._forget(plan)
            for channel in ending.closing:
                channel.is_open = False

    def _forget(self, plan: ActivePlan) -> None:
        del self._plans[plan.entry.generation]
        for told in _told_of(plan):
            for cell in told.cells:
                self._told.pop(cell, None)

    def _sweep(self) -> int:
        """Read each ring once, deliver in the order of time, and return how many bytes were read."""
        complete_ns = time.monotonic_ns()
        found: list[tuple[Ring, Records]] = []
        for ring in self._rings:
            most = min(_ROWS_PER_SWEEP, _BYTES_PER_SWEEP // ring.stride)
            records = ring.peek(most)
            if len(records) == most:
                # this ring has more, so no other may go on beyond what was read of it
                complete_ns = min(complete_ns, int(records["time_ns"][-1]))
            if len(records):
                found.append((ring, records))
        if len(self._rings) > 1:
            found = [(ring, _until(records, complete_ns)) for ring, records in found]
        events: dict[Channel, list[Block]] = {}
        for ring, records in found:
            for channel, block in self._decoded(ring, records):
                events.setdefault(channel, []).append(block)
            ring.consume(len(records))
        for channel, blocks in events.items():
            try:
                channel.deliver(blocks)
            except Exception:  # noqa: BLE001 - these are lost, and what others are to get is not
                count = sum(map(len, blocks))
                _log.exception("%d events could not be delivered", count)
                channel.lost(LossStage.DECODE, count)
        return sum(len(records) * ring.stride for ring, records in found)

    def _decoded(self, ring: Ring, records: Records) -> list[tuple[Channel, Block]]:
        if not len(records):
            return []
        try:
            batch = Batch(records, ring.raw(), ring.stride)
            blocks, unknown = batch.blocks(self._plans)
            self.from_file += batch.from_file
            self.unavailable += batch.unavailable
        except Exception:  # noqa: BLE001 - they are written off when their plans end; others' go on
            _log.exception("%d records could not be decoded", len(records))
            return []
        if unknown:
            self.unknown += unknown
            _log.error("%d records name plans that are not known", unknown)
        try:
            for pid, address, byte_count in batch.unread():
                self._bring_in(pid, address, byte_count)
        except Exception:  # noqa: BLE001 - later hits do without, too
            _log.exception("memory that hits did not find cannot be brought in")
        return blocks

    def _tell_accounts(self) -> None:
        now = time.monotonic_ns()
        if now - self._accounts_told_ns > _ACCOUNT_NS:
            self._accounts_told_ns = now
            self._tell(self._tables.totals())

    def _tell(self, totals: U64) -> None:
        """Tell each subscription what fired, was filtered and was lost since the last time."""
        before = self._totals[: len(totals)]
        changed = np.flatnonzero(totals != before).tolist()
        before[:] = totals
        for told in {told for cell in changed for told in self._told.get(cell, ())}:
            told.tell(totals)

    def _write_off(self, plan: ActivePlan, totals: U64) -> None:
        for reading in plan.readings:
            missing = _missing(plan, reading.bit, totals)
            if missing > 0:
                _log.error("%d events of one site were counted and never came", missing)
                reading.channel.lost(LossStage.DECODE, missing)


def _until(records: Records, moment_ns: int) -> Records:
    """Keep what is not later; a ring is in the order of time but for hits at the same moment."""
    times = records["time_ns"]
    return records if times[-1] <= moment_ns else records[: int(np.searchsorted(times, moment_ns, "right"))]


class _Told:
    """Counters of a filter's in the kernel, and how much of them the subscriptions concerned were told."""

    def __init__(self, plan: ActivePlan, bit: int) -> None:
        self._entry = plan.entry
        self._bit = bit
        self._channels = [channel for filter_bit, channel in plan.channels if filter_bit == bit]
        self._fired = self._filtered = self._lost = 0

    @property
    def cells(self) -> list[int]:
        of_filter = Counter.FILTERED, Counter.EXCLUDED, Counter.LOST
        return [self._entry.cell(Counter.HITS), *(self._entry.cell(counter, self._bit) for counter in of_filter)]

    def tell(self, totals: U64) -> None:
        hits, filtered, excluded, lost = totals[self.cells].tolist()
        # a hit under way may be counted as excluded already, and not yet as a hit
        fired = hits - excluded
        for channel in self._channels:
            if fired > self._fired:
                channel.fired(fired - self._fired)
            if filtered > self._filtered:
                channel.filtered(filtered - self._filtered)
            if lost > self._lost:
                channel.lost(LossStage.KERNEL_BUFFER, lost - self._lost)
        self._fired, self._filtered, self._lost = max(fired, self._fired), filtered, lost


def _told_of(plan: ActivePlan) -> list[_Told]:
    return [_Told(plan, bit) for bit in plan.entry.bits]


def _missing(plan: ActivePlan, bit: int, totals: U64) -> int:
    """Count a filter's hits of which nobody has said yet what became of them."""
    others = sum(
        int(totals[plan.entry.cell(counter, bit)]) for counter in (Counter.FILTERED, Counter.EXCLUDED, Counter.LOST)
    )
    return int(totals[plan.entry.cell(Counter.HITS)]) - others - plan.received.get(bit, 0)
