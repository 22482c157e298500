"""What a Stream call asks for."""

from __future__ import annotations

from stapsdtd.api.event_stream import EventStream
from stapsdtd.api.snapshot_stream import Collect, SnapshotStream
from stapsdtd.api.stream import SubscriptionStream
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


def check_stream(request: pb.StreamRequest) -> None:
    """Raises InvalidArgumentError."""
    if request.encoding not in {pb.StreamRequest.ENCODING_ROWS, pb.StreamRequest.ENCODING_COLUMNS}:
        raise InvalidArgumentError("encoding", "choose ENCODING_ROWS or ENCODING_COLUMNS")
    if request.HasField("from_seq") and request.from_seq == 0:
        raise InvalidArgumentError("from_seq", "events and snapshots are numbered from 1")


def stream_of(subscription: Subscription, request: pb.StreamRequest, collect: Collect) -> SubscriptionStream:
    """Return a stream of what the subscription delivers: events or snapshots. collect: see `Engine.collect`."""
    first = request.from_seq if request.HasField("from_seq") else None
    aggregation, table = subscription.spec.aggregation, subscription.table
    if aggregation is None or table is None:
        return EventStream(subscription, request.encoding, first)
    return SnapshotStream(subscription, table, aggregation, first, collect)
