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

import numpy as np

from stapsdtd.capture.batch import U64, Block
from stapsdtd.capture.bpf.decode import ActivePlan, Batch, Channel
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.rings import Records, Ring
from stapsdtd.capture.bpf.tables import PlanId, Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.capture.jobs import Jobs, Pulse, ThreadEndedError

_log = logging.getLogger(__name__)

_ROWS_PER_SWEEP = 16384
_BYTES_PER_SWEEP = 16 << 20
_PAUSE_MS = 4
_SHORT_PAUSE_MS = 1
_IDLE_MS = 200
_ACCOUNT_NS = 200_000_000
_SETTLE_NS = 5_000_000_000
"""On a busy host a process may be held up for long in the middle of a hit."""
_RETIRED_NS = 2_000_000_000


class Reader:
    """All methods but the thread's own are called by one other thread, and return when it is done."""

    def __init__(self, tables: Tables, set_waiting: Callable[[bool], None]) -> None:
        """set_waiting: tells the program whether the next hit is to wake this thread."""
        self._tables = tables
        self._set_waiting = set_waiting
        self._jobs = Jobs()
        self._pulse = Pulse("the thread that reads events", self._jobs.ask)
        self._rings: list[Ring] = []
        self._retired: list[tuple[int, Ring]] = []
        self._plans: dict[PlanId, ActivePlan] = {}
        self._told: dict[int, _Told] = {}
        self._accounts_told_ns = 0
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
        """Close a ring that another has taken the place of when the hits are through that may still write to it."""

        def job() -> None:
            self._retired.append((time.monotonic_ns() + _RETIRED_NS, ring))

        self._jobs.call(job)

    def silence(self, channel: Channel) -> None:
        """Tell it nothing any more, whatever plans still name it."""

        def job() -> None:
            channel.is_open = False

        self._jobs.call(job)

    def begin(self, plans: Iterable[ActivePlan]) -> None:
        """Learn plans before a slot names them, so that no record of an unknown plan is met."""

        def job() -> None:
            for plan in plans:
                self._plans[plan.entry.id] = plan
                self._told |= _told_cells(plan)

        self._jobs.call(job)

    def end(self, plans: Sequence[ActivePlan]) -> None:
        """Deliver what is left of plans that no slot names any more, tell their last figures, and forget them."""

        def job() -> None:
            deadline = time.monotonic_ns() + _SETTLE_NS
            while True:
                read = self._sweep()
                totals = self._tables.totals()
                if all(self._settled(plan, totals) for plan in plans) or time.monotonic_ns() > deadline:
                    break
                if not read:
                    # a hit that was being written when its plan was taken away
                    time.sleep(0.001)
            for plan in plans:
                cells = _told_cells(plan).keys()
                self._tell(totals, cells)
                self._write_off(plan, totals)
                del self._plans[plan.entry.id]
                for cell in cells:
                    del self._told[cell]

        self._jobs.call(job)

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
        """Answer why it reads nothing any more, in any thread; None where it does."""
        return self._pulse.problem()

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._jobs.abandon()

    def _read_on(self) -> None:
        while not self._stopping:
            try:
                read = self._sweep()
                self._tell_accounts()
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
        now = time.monotonic_ns()
        for due in [due for due in self._retired if due[0] < now and not due[1].filled]:
            self._retired.remove(due)
            self._rings.remove(due[1])
            self._idle.unregister(due[1])
            due[1].close()

    def _sweep(self) -> int:
        """Read each ring once, deliver in the order of time, and answer how many bytes were read."""
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
            blocks, unknown = Batch(records, ring.raw(), ring.stride).blocks(self._plans)
        except Exception:  # noqa: BLE001 - they are written off when their plans end; others' go on
            _log.exception("%d records could not be decoded", len(records))
            return []
        if unknown:
            _log.error("%d records name plans that are not known", unknown)
        return blocks

    def _tell_accounts(self) -> None:
        now = time.monotonic_ns()
        if now - self._accounts_told_ns > _ACCOUNT_NS:
            self._accounts_told_ns = now
            self._tell(self._tables.totals(), self._told)

    def _tell(self, totals: U64, cells: Iterable[int]) -> None:
        """Tell each subscription what was filtered and lost since the last time."""
        for cell in cells:
            told = self._told[cell]
            count = int(totals[cell])
            if count > told.count:
                told.tell(count - told.count)
                told.count = count

    def _settled(self, plan: ActivePlan, totals: U64) -> bool:
        return not any(_missing(plan, bit, totals) for bit in plan.entry.bits)

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
    """A counter of the kernel's, and how much of it the subscriptions concerned were told."""

    def __init__(self, plan: ActivePlan, bit: int, counter: Counter) -> None:
        self._channels = [reading.channel for reading in plan.readings if reading.bit == bit]
        self._counter = counter
        self.count = 0

    def tell(self, count: int) -> None:
        for channel in self._channels:
            if self._counter is Counter.FILTERED:
                channel.filtered(count)
            else:
                channel.lost(LossStage.KERNEL_BUFFER, count)


def _told_cells(plan: ActivePlan) -> dict[int, _Told]:
    return {
        plan.entry.cell(counter, bit): _Told(plan, bit, counter)
        for bit in plan.entry.bits
        for counter in (Counter.FILTERED, Counter.LOST)
    }


def _missing(plan: ActivePlan, bit: int, totals: U64) -> int:
    """Count a filter's hits of which nobody has said yet what became of them."""
    others = sum(
        int(totals[plan.entry.cell(counter, bit)]) for counter in (Counter.FILTERED, Counter.EXCLUDED, Counter.LOST)
    )
    return int(totals[plan.entry.cell(Counter.HITS)]) - others - plan.received.get(bit, 0)
