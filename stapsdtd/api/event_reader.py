"""Reads a clause's events, each preceded by what it refers to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

from stapsdtd.api import columns, rows, subscription_messages, wire
from stapsdtd.api.parts import one_of_many
from stapsdtd.api.stream import ClauseReader, StreamTurns
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.log import Entry
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.spans.span import OpenSpan
from stapsdtd.v1 import stapsdt_pb2 as pb

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 1.0
"""Between looks at which starts wait."""


class EventReader(ClauseReader):
    def __init__(
        self, clause: Clause, encoding: int, from_seq: int | None, turns: StreamTurns, *, wall_clock: WallClock
    ) -> None:
        """from_seq: of the first event that the client lacks; None for the first that was not sent."""
        super().__init__(clause)
        self._as_rows = encoding != pb.StreamRequest.ENCODING_COLUMNS
        self._seq = from_seq
        self._turns = turns
        self._wall_clock = wall_clock
        self._described: set[int] = set()
        self._is_resumed = from_seq is None
        report_ns = clause.spec.span.report_open_ns if clause.spec.span else 0
        self._open = _OpenReporter(clause, report_ns, wall_clock) if report_ns else None
        self._tell_open_at(time.monotonic())

    def _tell_open_at(self, now: float) -> None:
        self.due = now + self._open.pause if self._open else None

    async def new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        log = self._clause.log
        if self._open is not None and self.due is not None and (now := time.monotonic()) >= self.due and not is_ended:
            self._tell_open_at(now)
            if (new := await asyncio.to_thread(self._open.new)) is not None:
                yield pb.StreamResponse(open=new).SerializeToString()
        if not self._is_resumed and self._seq is not None:
            self._is_resumed = True
            log.resume(self._seq)
        for message in self._losses():
            yield message
        entry = log.read(self._seq)
        if entry is None:
            return
        sites = self._clause.known_sites(entry.batch.site_ids())
        undescribed = iter([(site_id, site) for site_id, site in sites.items() if site_id not in self._described])
        self._described |= sites.keys()
        while described := await self._turns.soon(
            one_of_many(pb.Descriptions.PROBES_FIELD_NUMBER, undescribed, _description)
        ):
            yield wire.delimited(pb.StreamResponse.DESCRIPTIONS_FIELD_NUMBER, described)
        for message, next_seq in self._events(entry, sites):
            yield message
            # a stream that was stopped meanwhile does not come here
            log.handed_out(entry, next_seq)
        self._seq = entry.next_seq

    async def complete(self) -> None:
        """Return at once: what is due is looked up then."""

    def _events(self, entry: Entry, sites: dict[int, KnownSite]) -> Iterator[tuple[bytes, int]]:
        """Yield messages, each with the seq of the next event that a client lacks once it has received it."""
        for begin, end, offset_ns in self._wall_clock.spans(entry.batch.time_ns):
            part = entry.part(begin, end)
            if self._as_rows:
                yield from rows.messages(part, offset_ns, sites)
            else:
                yield columns.message(part, offset_ns), part.next_seq


def _description(site: tuple[int, KnownSite]) -> pb.Description:
    return subscription_messages.description(*site)


class _OpenReporter:
    """Tells once of each start that has waited for so long."""

    def __init__(self, clause: Clause, report_ns: int, wall_clock: WallClock) -> None:
        self._clause = clause
        self._report_ns = report_ns
        self._wall_clock = wall_clock
        self._told: set[OpenSpan] = set()
        self.pause = min(max(report_ns / 4e9, _LEAST_PAUSE_SECONDS), _MOST_PAUSE_SECONDS)

    def new(self) -> pb.OpenSpans | None:
        """Return those that have not been told of; None if there are none."""
        spans = finish(self._clause.open_spans())
        begun_by = time.monotonic_ns() - self._report_ns
        late = {span for span in spans.oldest if span.begin_ns <= begun_by}
        new = sorted(late - self._told, key=lambda span: span.begin_ns)
        self._told = late
        told = replace(spans, oldest=tuple(new))
        return subscription_messages.encoded_spans(self._clause, told, self._wall_clock) if new else None
