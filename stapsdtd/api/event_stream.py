"""A stream of events, losses and statuses, each preceded by what it refers to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from stapsdtd.api import columns, convert, rows
from stapsdtd.api.stream import SubscriptionStream
from stapsdtd.sessions.log import Entry
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


class EventStream(SubscriptionStream):
    def __init__(self, subscription: Subscription, encoding: int, from_seq: int | None) -> None:
        super().__init__(subscription)
        self._as_rows = encoding != pb.StreamRequest.ENCODING_COLUMNS
        self._seq = from_seq
        self._described: set[int] = set()
        self._is_resumed = from_seq is None

    async def _new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        del is_ended
        log = self._subscription.log
        if not self._is_resumed and self._seq is not None:
            self._is_resumed = True
            log.resume(self._seq)
        while True:
            for message in self._statuses_and_losses():
                yield message
            entry = log.read(self._seq)
            if entry is None:
                return
            for message, next_seq in self._events(entry):
                yield message
                if not self.is_stopped:
                    log.handed_out(entry, next_seq)
            self._seq = entry.next_seq

    def _events(self, entry: Entry) -> Iterator[tuple[bytes, int]]:
        """Yield messages, each with the seq of the next event that a client lacks once it has received it."""
        sites = self._subscription.known_sites(entry.batch.site_ids())
        undescribed = {site_id: site for site_id, site in sites.items() if site_id not in self._described}
        if undescribed:
            self._described |= undescribed.keys()
            descriptions = pb.StreamResponse(descriptions=convert.descriptions(undescribed))
            yield descriptions.SerializeToString(), entry.first_seq
        offset_ns = self._subscription.realtime_offset_ns
        if self._as_rows:
            yield from rows.messages(entry, offset_ns, sites)
        else:
            yield columns.message(entry, offset_ns), entry.next_seq
