"""Takes rows out of the kernel while hits go on.

    flip the epoch ──► wait for hits that use the old bank ──► take its rows ──► the reader thread ──► sinks
                       (one grace period for all tables)

A table is drained each second, sooner when it is half full, and whenever somebody asks for what there is. Nobody
decodes rows here: there are as many as a client likes. Those of a client whose sink has not added up the last ones yet
stay in the kernel, where its hits find less room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.capture.bpf.endings import Ends
from stapsdtd.capture.bpf.hit_tables import HitTable, HitTables
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.recipes import Recipe
from stapsdtd.capture.bpf.row_decoder import RowDecoder, TakenRows
from stapsdtd.capture.bpf.span_watch import SpanWatch
from stapsdtd.capture.engine import TargetSite
from stapsdtd.kernel.cgroup_ids import CgroupIds
from stapsdtd.query.actions import Aggregate, EndSpan
from stapsdtd.runtime.futures import followed_by, pass_on, unfinished

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_HALF = 0.5


Post = Callable[[Callable[[], None]], None]


class Epoch(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def flip(self) -> int: ...

    def wait_for_hits(self) -> None: ...

    @property
    def parity(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Collecting:
    """A call of `Drainer.collect`. until_ns: when hits stopped going to the rows that were taken, 0 without rows."""

    channel: Channel | None
    done: Future[None] = field(default_factory=unfinished)
    until_ns: int = 0


class Drainer:
    """Owns the thread that drains tables."""

    def __init__(self, kernel: Epoch, tables: HitTables, spans: SpanWatch, post: Post, settle: Ends) -> None:
        """spans: looked at in the same thread. post, settle: as `Reader.post` and `Reader.end`."""
        self._kernel = kernel
        self._tables = tables
        self._spans = spans
        self._post = post
        self._settle = settle
        self._cgroup_ids = CgroupIds()
        self._decoder = RowDecoder(CgroupNames(self._cgroup_ids.path_of))
        self._drained_at = time.monotonic()
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._collecting: list[_Collecting] = []
        self._thread = threading.Thread(target=self._run, name="stapsdtd-draining", daemon=True)
        self._thread.start()

    def table_for(self, channel: Channel, owner: str, wanted: TargetSite, architecture: str) -> HitTable | None:
        """Return the table that a site's hits are to be added up in, if they need one.

        Raises TableFullError, ValueError and OSError.
        """
        match wanted.action:
            case Aggregate(aggregation) | EndSpan(action=Aggregate(aggregation)):
                recipe = Recipe.of(aggregation, wanted.site, wanted.site_id, architecture)
                # pairs are counted before it is known which are wanted
                has_counter = not isinstance(wanted.action, EndSpan) or not wanted.action.is_filtered
                if recipe.is_counted and has_counter:
                    return None
                table = self._tables.open(channel, owner, aggregation)
                self.wake()
                return table
            case _:
                return None

    def wake(self) -> None:
        """Look at tables from now on: there is a new one."""
        self._requests.put(lambda: None)

    def collect(self, channel: Channel | None) -> Future[int]:
        """As `Engine.collect`, of a channel. For any thread."""
        collecting = _Collecting(channel)
        self._requests.put(lambda: self._collecting.append(collecting))
        return followed_by(collecting.done, lambda: collecting.until_ns or time.monotonic_ns())

    def drain_last(self, channels: Collection[Channel]) -> None:
        """Take what is left of subscriptions whose last hit is over. For any thread."""
        for table in self._tables.of(channels):
            self._drain(table, (0, 1))
        self._spans.look_last(channels)

    def finish(self) -> None:
        self._requests.put(None)
        self._thread.join()
        self._tables.remove_all()
        self._spans.finish()
        self._cgroup_ids.close()

    def _run(self) -> None:
        while True:
            if self._handle_requests():
                return
            self._spans.look()
            if self._collecting or self._is_due():
                self._drain_all()
            for table in self._tables.unused():
                self._drain(table, (0, 1))
                self._tables.remove(table)

    def _handle_requests(self) -> bool:
        """Wait for requests as long as there is nothing else to do, and return whether to stop."""
        try:
            request = self._requests.get(timeout=_LOOK_SECONDS if self._tables.all() or self._spans.is_needed else None)
            while request is not None:
                request()
                request = self._requests.get_nowait()
        except Empty:
            return False
        return True

    def _is_due(self) -> bool:
        parity = self._kernel.parity
        levels = [self._tables.fill_level(table, parity) for table in self._tables.all() if not table.is_behind]
        if not any(levels):
            return False
        return max(levels) > _HALF or time.monotonic() - self._drained_at > _DRAIN_SECONDS

    def _drain_all(self) -> None:
        self._drained_at = time.monotonic()
        collecting, self._collecting = self._collecting, []
        channels = {each.channel for each in collecting}
        asked = [table for table in self._tables.all() if table.channel in channels]
        others = [table for table in self._tables.all() if table.channel not in channels and not table.is_behind]
        for table in (*asked, *others):
            # what was left there while its sink was behind
            self._drain(table, (1 - self._kernel.parity,))
        parity = self._kernel.flip()
        flipped_ns = time.monotonic_ns()
        self._wait()
        for table in asked:
            self._drain(table, (parity,))
        if collecting:
            # behind the rows, and the records of hits that only now are over
            in_tables = {table.channel for table in asked}
            for each in collecting:
                # what is in no table is there until it is delivered
                each.until_ns = flipped_ns if each.channel in in_tables else 0
            self._settle((), ()).add_done_callback(partial(_tell, [each.done for each in collecting]))
        for table in others:
            self._drain(table, (parity,))

    def _wait(self) -> None:
        while True:
            try:
                self._kernel.wait_for_hits()
            except OSError as error:
                _log.warning("cannot wait until hits have left a table, trying again: %s", error)
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def _drain(self, table: HitTable, parities: Sequence[int]) -> None:
        # until they are posted, so that nobody takes what comes after them and closes the subscription first
        with table.lock:
            try:
                taken = self._tables.take(table, parities)
            except OSError:
                _log.exception("the rows of a table could not be read, which is tried again")
                return
            for keys, rows in taken:
                table.taken = TakenRows(self._decoder, table.aggregation, table.layouts, keys, rows)
                self._post(partial(table.channel.aggregated_many, table.taken))


def _tell(waiting: Sequence[Future[None]], settled: Future[None]) -> None:
    """Pass what became of one future on to others."""
    for each in waiting:
        pass_on(settled, each)
