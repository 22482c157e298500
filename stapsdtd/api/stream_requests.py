"""What calls ask of a subscription, most of all Stream."""

from __future__ import annotations

from stapsdtd.api.event_reader import EventReader
from stapsdtd.api.snapshot_reader import Collect, SnapshotReader
from stapsdtd.api.stream import ClauseReader, StreamTurns, SubscriptionStream
from stapsdtd.config.request_limits import MAX_CLAUSES, check_count
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


def check_id(request: pb.StreamRequest | pb.UnsubscribeRequest) -> None:
    """Raises InvalidArgumentError if the request names no subscription."""
    if not request.subscription_id:
        raise InvalidArgumentError("subscription_id", "it is missing: Subscribe returns it")


def check_stream(request: pb.StreamRequest) -> None:
    """Raises InvalidArgumentError."""
    check_id(request)
    if request.encoding not in {pb.StreamRequest.ENCODING_ROWS, pb.StreamRequest.ENCODING_COLUMNS}:
        raise InvalidArgumentError("encoding", "choose ENCODING_ROWS or ENCODING_COLUMNS")
    if request.HasField("from_seq") and request.from_seq == 0:
        raise InvalidArgumentError("from_seq", "events and snapshots are numbered from 1")
    check_count("positions", len(request.positions), MAX_CLAUSES)
    if zero := [tag for tag, position in request.positions.items() if position == 0]:
        raise InvalidArgumentError("positions", "events and snapshots are numbered from 1", value=zero[0])


def stream_of(
    subscription: Subscription, request: pb.StreamRequest, collect: Collect, turns: StreamTurns
) -> SubscriptionStream:
    """Return a stream of what the subscription delivers: events or snapshots. collect: see `SnapshotReader`.

    Raises InvalidArgumentError.
    """
    positions = dict(request.positions)
    tags = [clause.spec.tag for clause in subscription.clauses]
    if request.HasField("from_seq"):
        if len(tags) > 1:
            raise InvalidArgumentError("from_seq", "the subscription has several clauses; name them in positions")
        positions.setdefault(tags[0], request.from_seq)
    if unknown := positions.keys() - set(tags):
        raise InvalidArgumentError("positions", f"the subscription has no clause {min(unknown)!r}", value=min(unknown))

    def reader_of(clause: Clause) -> ClauseReader:
        first, aggregation = positions.get(clause.spec.tag), clause.spec.aggregation
        if aggregation is None or clause.table is None:
            return EventReader(clause, request.encoding, first, turns, wall_clock=subscription.wall_clock)
        return SnapshotReader(
            clause,
            clause.table,
            aggregation,
            collect,
            turns,
            from_number=first,
            wall_clock=subscription.wall_clock,
        )

    return SubscriptionStream(subscription, [reader_of(clause) for clause in subscription.clauses], turns)
