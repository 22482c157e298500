"""Run a compiled D program: its beginning, the hits, its timers, and its end."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from stapsdtd.cli.following import messages
from stapsdtd.cli.render import discard_output, plural, print_stderr
from stapsdtd.cli.trace_output import print_notice
from stapsdtd.client import End, EventBatch, Loss, Snapshot, Status
from stapsdtd.client.messages import SiteState
from stapsdtd.query.d.aggregations import Row
from stapsdtd.query.d.conversion import converter
from stapsdtd.query.d.lower_expressions import PROBE_NAME
from stapsdtd.query.d.probes import Moment, Tick, meaning, probe_name
from stapsdtd.query.d.values import INT64_MAX, INT64_MIN, signed
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stapsdtd.cli.d_hits import Hits
    from stapsdtd.client import AsyncSubscription
    from stapsdtd.query.d.interpret import Program
    from stapsdtd.query.d.lower import Lowered
    from stapsdtd.query.d.machine import Hit
    from stapsdtd.query.d.nodes import Clause
    from stapsdtd.query.d.values import Type, Value


class Output:
    """Collects what a program prints until it is flushed. failure: why nothing can be written any more."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.failure: str | None = None
        self.is_closed = False

    def write(self, text: str) -> None:
        self._parts.append(text)

    def flush(self) -> None:
        text, self._parts = "".join(self._parts), []
        if not text or self.is_closed:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.is_closed = True
            discard_output()
        except OSError as error:
            self.is_closed = True
            discard_output()
            self.failure = f"cannot write: {error.strerror}"


def tell_fault(hit: Hit, reason: str) -> None:
    place = f"{hit.provider}:{hit.module}:{hit.function}:{hit.name}"
    print_stderr(escape(f"error on enabled probe ID {hit.probe_id} ({place}): {reason}"))


def _converter(kind: Type, by: str, string_bytes: int) -> Callable[[Value], Value]:
    """Return a function that makes a part of D's key of the server's, which was asked for by the expression `by`."""
    if by == PROBE_NAME:
        return lambda value: probe_name(str(value))
    return converter(kind, string_bytes)


class Runner:
    """done: set when the program has exited, or nobody reads what it prints."""

    def __init__(self, program: Program, output: Output, lowered: Mapping[str, Lowered], *, retries: bool) -> None:
        """lowered: what the server adds up, by tag. retries: whether to go on after a restart of the server."""
        self._retries = retries
        self._dropped: dict[str, int] = {}
        self._rounded: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._program = program
        self._output = output
        self._lowered = lowered
        # by this host's CLOCK_MONOTONIC; what fired later is over
        self._last_ns: float = math.inf
        # of the monotonic clock, in seconds
        self._deadline: float = math.inf
        self._unseen = 0
        self.done = asyncio.Event()

    def hurry(self, seconds: float) -> None:
        """Look at hits for so long at most, and count those that are left."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    @property
    def _clauses(self) -> Sequence[Clause]:
        return self._program.checked.program.clauses

    def own(self, moment: Moment | Tick, hit: Hit) -> None:
        """Run the clauses of BEGIN, END or a timer."""
        clauses = [clause for clause in self._clauses if moment in map(meaning, clause.descriptions)]
        if self._program.run(clauses, hit, is_end=moment is Moment.END):
            # hits before a timer may be on their way, and there are none before BEGIN
            self._last_ns = min(self._last_ns, hit.timestamp if isinstance(moment, Tick) else 0)
        self._show()

    def _show(self) -> None:
        self._output.flush()
        if self._output.is_closed:
            self._last_ns = 0
        if self._program.exit_status is not None or self._output.is_closed:
            self.done.set()

    def ticks(self) -> list[Tick]:
        found = (meaning(each) for clause in self._clauses for each in clause.descriptions)
        return list(dict.fromkeys(each for each in found if isinstance(each, Tick)))

    async def tick(self, tick: Tick, hits: Hits) -> None:
        """Run a timer's clauses, until it is cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self.done.is_set():
            due = max(due + tick.period_ns / 1e9, loop.time())
            await asyncio.sleep(due - loop.time())
            if not self.done.is_set():
                self.own(tick, hits.own("profile", tick.name))

    async def read(self, subscription: AsyncSubscription, hits: Hits) -> None:
        """Run the clauses of each event, and add what was added up, until the End."""
        async for message in messages(subscription, print_notice, retries=self._retries):
            match message:
                case Snapshot():
                    self._merge(message)
                case EventBatch():
                    self._run(message, hits)
                    self._show()
                case Loss(count=count):
                    print_stderr(f"{count} drops")
                case Status(sites):
                    for site in sites:
                        if site.state is SiteState.REFUSED:
                            print_stderr(escape(f"{site.provider}:{site.name} in {site.path}: refused: {site.reason}"))
                case End():
                    return
                case _:
                    pass

    def _run(self, batch: EventBatch, hits: Hits) -> None:
        """Run the clauses of events, in the order of time, until one of them calls exit()."""
        if time.monotonic() > self._deadline:
            # without making events of them, which takes as long as running clauses
            self._unseen += sum(len(block.seq) for block in batch.blocks)
            return
        for position, event in enumerate(batch.events):
            if hits.timestamp(event) > self._last_ns:
                return
            if time.monotonic() > self._deadline:
                self._unseen += len(batch.events) - position
                return
            if (clauses := hits.matching(event)) and self._program.run(clauses, hits.hit(event)):
                self._last_ns = 0
                return

    def _merge(self, snapshot: Snapshot) -> None:
        """Add what the server added up to an aggregation, unless the program had exited before."""
        if not self._last_ns:
            return
        lowered = self._lowered[snapshot.tag]
        aggregation = self._program.aggregations[lowered.aggregation]
        string_bytes = self._program.checked.string_bytes
        converters = [
            _converter(kind, text, string_bytes) for kind, text in zip(aggregation.key, lowered.by, strict=True)
        ]
        for row in snapshot.rows:
            self._rounded[lowered.aggregation] += isinstance(row.values.get("sum"), float)
            values = {name: int(value) for name, value in row.values.items() if value is not None}
            count = values.get("values", values.get("count", 0))
            if None in row.key or not count:
                self._unread[lowered.aggregation] += 0 if lowered.squares else count
                continue
            key = tuple(convert(part) for part, convert in zip(row.key, converters, strict=True)
                        if isinstance(part, int | str))  # fmt: skip
            bins = aggregation.bins_of((bucket.low, bucket.high, bucket.count) for bucket in row.buckets)
            extremes = values.get("min", INT64_MAX), values.get("max", INT64_MIN)
            total = values.get("sum", 0)
            if lowered.squares:
                aggregation.merge(key, Row(squares=total * lowered.squares))
            else:
                aggregation.merge(key, Row(count, signed(total), 0, *extremes, bins))
        self._dropped[snapshot.tag] = snapshot.account.spans.table_full

    def _tell_incomplete(self) -> None:
        """Say what of the added up is missing or not exact."""
        for dropped in filter(None, self._dropped.values()):
            print_stderr(plural(dropped, "dynamic variable drop"))
        for name, rounded in self._rounded.items():
            if rounded:
                print_stderr(f"{plural(rounded, 'sum')} of @{name} rounded, since it takes more than 64 bits")
        for name, unread in self._unread.items():
            if unread:
                print_stderr(f"{unread} errors on enabled probes of @{name}: invalid address")

    async def until_done(self, stop: asyncio.Event) -> None:
        """Have stop set when the program is done."""
        with suppress(asyncio.CancelledError):
            await self.done.wait()
            stop.set()

    def finish(self, hit: Hit) -> None:
        """Run END, and print what is left."""
        self._tell_incomplete()
        self.own(Moment.END, hit)
        self._program.finish()
        if self._unseen and self._last_ns:
            print_stderr(f"{plural(self._unseen, 'hit')} not shown: interrupted before the program had looked at them")
        if dropped := self._program.variables.dropped:
            print_stderr(f"{dropped} dynamic variable drops")
        for aggregation in self._program.aggregations.values():
            if aggregation.dropped:
                print_stderr(f"{aggregation.dropped} aggregation drops on @{aggregation.name}")
        self._output.flush()
