"""Events: more than anybody can read, costly to filter or to add up, and readers that stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena, tell

_STRING_BYTES = 4000
_SUBSCRIPTIONS = 12
_Function = pb.AggregateFunction.Function


@contextmanager
def _subscribed(arena: Arena, stub: StapsdtServiceStub, requests: Sequence[pb.SubscribeRequest]) -> Iterator[list[str]]:
    """Ids of those that were accepted."""
    answers = [arena.call("subscribed", partial(stub.Subscribe, request, timeout=10)) for request in requests]
    ids = [answer.subscription_id for answer in answers if answer]
    try:
        yield ids
    finally:
        # at once, since each may wait for the kernel
        calls = [stub.Unsubscribe.future(pb.UnsubscribeRequest(subscription_id=each), timeout=10) for each in ids]
        for call in calls:
            arena.call("unsubscribed", call.result)


def _read(arena: Arena, stub: StapsdtServiceStub, ident: str, pause_seconds: float = 0.0) -> None:
    """Read a stream until the end of the attack, with a pause after each message."""
    stream = stub.Stream(
        pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_COLUMNS),
        timeout=arena.seconds_left + 0.1,
    )

    def read() -> None:
        for _ in stream:
            arena.done["messages"] += 1
            time.sleep(min(pause_seconds, arena.seconds_left))
            if not arena.goes_on:
                stream.cancel()
                return

    arena.call("read", read)


def _flood(arena: Arena) -> None:
    """Numbers and strings, from two processes, all of which are read."""
    arena.raid(_STRING_BYTES)
    arena.raid(60)
    request = pb.SubscribeRequest(selectors=["raid:text(arg0:str[255],arg1)", "raid:number"])
    with arena.stub() as stub, _subscribed(arena, stub, [request]) as ids:
        for ident in ids:
            _read(arena, stub, ident)


def _late_filters(count: int) -> pb.SubscribeRequest:
    clauses = [
        pb.Clause(
            tag=str(number),
            selectors=["raid:text(arg1)"],
            where=f'str(arg0) ~ "*{"?" * 245}{chr(ord("b") + number % 20)}"',
        )
        for number in range(count)
    ]
    return pb.SubscribeRequest(clauses=clauses)


def _late_filter(arena: Arena) -> None:
    """Bursts of long strings that 32 globs are tried on; then the subscription is gone."""
    process = arena.start(arena.raiding, "4090")
    with arena.stub() as stub:
        while arena.goes_on:
            with _subscribed(arena, stub, [_late_filters(32)]) as ids:
                if not ids:
                    continue
                tell(process, "fire 2000 0")
                assert process.stdout is not None
                arena.done[process.stdout.readline().split()[0]] += 1


def _late_filter_flood(arena: Arena) -> None:
    """The same without an end."""
    arena.raid(4090)
    with arena.stub() as stub, _subscribed(arena, stub, [_late_filters(32)]) as ids:
        for ident in ids:
            _read(arena, stub, ident)


def _aggregations() -> list[pb.SubscribeRequest]:
    """Each with as many keys as there may be, all of which are sent every 10 ms."""
    aggregation = pb.Aggregation(
        functions=[
            pb.AggregateFunction(function=_Function.FUNCTION_COUNT),
            pb.AggregateFunction(function=_Function.FUNCTION_QUANTIZE),
        ],
        value="arg1",
        by=["arg1 % 10000", "str(arg0, 64)"],
        interval_ms=10,
        cumulative=True,
    )
    return [pb.SubscribeRequest(selectors=["raid:text"], aggregation=aggregation)] * _SUBSCRIPTIONS


def _read_all(arena: Arena, requests: Sequence[pb.SubscribeRequest], pause_seconds: float) -> None:
    with arena.stub() as stub, _subscribed(arena, stub, requests) as ids:
        arena.together(*[partial(_read, arena, stub, ident, pause_seconds) for ident in ids])


def _large_aggregations(arena: Arena) -> None:
    arena.raid(64)
    _read_all(arena, _aggregations(), 0.0)


def _slow_readers_of_counts(arena: Arena) -> None:
    arena.raid(64)
    _read_all(arena, _aggregations(), 1.0)


def _stalled_readers(arena: Arena) -> None:
    """Streams that are opened and never read, of subscriptions with all the queue that the role has."""
    arena.raid(200)
    request = pb.SubscribeRequest(selectors=["raid:text(arg0:str,arg1)", "raid:number"], queue_bytes=16 << 20)
    with ExitStack() as stack:
        stub = stack.enter_context(arena.stub())
        for ident in stack.enter_context(_subscribed(arena, stub, [request] * _SUBSCRIPTIONS)):
            stream = stub.Stream(pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_COLUMNS))
            stack.callback(stream.cancel)
            arena.done["unread"] += 1
        arena.rest()


def _spans(arena: Arena) -> None:
    """Starts that no end comes for, of ever new keys, in as many tables as there may be."""
    arena.raid(10)
    span = pb.Span(start_selectors=["raid:number"], key=["arg0"], timeout_ms=1000)
    request = pb.SubscribeRequest(selectors=["raid:text(arg1)"], span=span)
    _read_all(arena, [request] * _SUBSCRIPTIONS, 0.0)


def _shared_file(arena: Arena) -> None:
    """20,000 hits a second of the very site that the bystander traces, in a process of the attacker's."""
    process = arena.start(arena.shared)
    request = pb.SubscribeRequest(selectors=[f"{arena.provider}:tick"])
    with arena.stub() as stub, _subscribed(arena, stub, [request] * 2):
        while arena.goes_on:
            tell(process, "fire 200")
            assert process.stdout is not None
            process.stdout.readline()
            arena.done["bursts"] += 1
            time.sleep(0.01)


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "flood": _flood,
    "late_filter": _late_filter,
    "late_filter_flood": _late_filter_flood,
    "large_aggregations": _large_aggregations,
    "slow_readers_of_counts": _slow_readers_of_counts,
    "stalled_readers": _stalled_readers,
    "spans": _spans,
    "shared_file": _shared_file,
}
