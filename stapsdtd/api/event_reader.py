"""Reads a clause's events, each preceded by what it refers to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from stapsdtd.api import columns, rows, subscription_messages
from stapsdtd.api.stream import ClauseReader
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.log import Entry
from stapsdtd.v1 import stapsdt_pb2 as pb


class EventReader(ClauseReader):
    def __init__(self, clause: Clause, encoding: int, from_seq: int | None, *, realtime_offset_ns: int) -> None:
        """from_seq: of the first event that the client lacks; None for the first that was not sent."""
        super().__init__(clause)
        self._as_rows = encoding != pb.StreamRequest.ENCODING_COLUMNS
        self._seq = from_seq
        self._realtime_offset_ns = realtime_offset_ns
        self._described: set[int] = set()
        self._is_resumed = from_seq is None

    async def new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        del is_ended
        log = self._clause.log
        if not self._is_resumed and self._seq is not None:
            self._is_resumed = True
            log.resume(self._seq)
        for message in self._losses():
            yield message
        entry = log.read(self._seq)
        if entry is None:
            return
        for message, next_seq in self._events(entry):
            yield message
            # a stream that was stopped meanwhile does not come here
            log.handed_out(entry, next_seq)
        self._seq = entry.next_seq

    async def complete(self) -> None:
        """Return at once: events are never due."""

    def _events(self, entry: Entry) -> Iterator[tuple[bytes, int]]:
        """Yield messages, each with the seq of the next event that a client lacks once it has received it."""
        sites = self._clause.known_sites(entry.batch.site_ids())
        undescribed = {site_id: site for site_id, site in sites.items() if site_id not in self._described}
        if undescribed:
            self._described |= undescribed.keys()
            descriptions = pb.StreamResponse(descriptions=subscription_messages.descriptions(undescribed))
            yield descriptions.SerializeToString(), entry.first_seq
        if self._as_rows:
            yield from rows.messages(entry, self._realtime_offset_ns, sites)
        else:
            yield columns.message(entry, self._realtime_offset_ns), entry.next_seq
