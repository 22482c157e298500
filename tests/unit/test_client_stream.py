"""What the client does without a server: when it tries a broken stream again, and what it reads."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from stapsdtd.client import (
    Encoding,
    NotFoundError,
    ProtocolError,
    RequestFailedError,
    ServerUnavailableError,
    StillSubscribedError,
    StringColumn,
)
from stapsdtd.client.errors import Call, from_rpc_error
from stapsdtd.client.retries import StreamRetry, UnsubscribeRetry
from stapsdtd.client.stream import SubscriptionState
from stapsdtd.v1 import stapsdt_pb2 as pb

CALL = Call("unsubscribe sub-1", "unix:/s", 60)


class Broken(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, details: str = "Socket closed") -> None:
        super().__init__()
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_pauses_grow_to_a_second_and_begin_anew_after_a_success() -> None:
    retry = StreamRetry(CALL, 30, Time().monotonic)
    pauses = [retry.after(Broken())[0] for _ in range(7)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    retry.succeeded()
    assert retry.after(Broken())[0] == 0.05


def test_a_break_is_news_once() -> None:
    retry = StreamRetry(CALL, 30, Time().monotonic)
    _, news = retry.after(Broken())
    assert isinstance(news, ServerUnavailableError)
    assert retry.after(Broken())[1] is None


def test_it_gives_up_with_the_lease() -> None:
    clock = Time()
    retry = StreamRetry(CALL, 30, clock.monotonic)
    retry.after(Broken())
    clock.now += 29
    retry.after(Broken())
    clock.now += 1
    with pytest.raises(ServerUnavailableError, match="unix:/s"):
        retry.after(Broken())


def test_only_unavailability_is_tried_again() -> None:
    with pytest.raises(RequestFailedError, match="Socket closed"):
        StreamRetry(CALL, seconds=30).after(Broken(grpc.StatusCode.INTERNAL))


TOO_OFTEN = Broken(grpc.StatusCode.RESOURCE_EXHAUSTED, "uid 1 makes more than 5 requests a second; try again later")


def test_unsubscribe_that_is_refused_by_rate_is_tried_again_for_ten_seconds() -> None:
    clock = Time()
    refused = UnsubscribeRetry(CALL, 30, clock.monotonic)
    pauses: list[float] = []
    while sum(pauses) < 9:
        pauses.append(refused.after(TOO_OFTEN))
        clock.now += pauses[-1]
    assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    with pytest.raises(StillSubscribedError) as caught:
        refused.after(TOO_OFTEN)
    assert str(caught.value) == (
        "unsubscribe sub-1: uid 1 makes more than 5 requests a second; try again later; "
        "it stays armed until its lease expires, 30 s after its stream closed"
    )


def test_unsubscribe_that_fails_otherwise_is_not_tried_again() -> None:
    with pytest.raises(NotFoundError):
        UnsubscribeRetry(CALL, 30).after(Broken(grpc.StatusCode.NOT_FOUND, "no subscription"))


def test_calls_without_a_limit_say_that_time_is_up_too() -> None:
    error = from_rpc_error(Broken(grpc.StatusCode.DEADLINE_EXCEEDED), Call("watch probes", "unix:/s"))
    assert str(error) == "watch probes: unix:/s did not answer in time: it may be busy; try again, or see its log"


class Subscription(SubscriptionState):
    """Reads what it is given, as the client's subscriptions read what their streams yield."""

    def read(self, response: pb.StreamResponse) -> None:
        self._read(response, Encoding.ROWS)


def test_messages_of_unknown_kinds_are_errors() -> None:
    subscription = Subscription(pb.SubscribeRequest(), pb.SubscribeResponse(subscription_id="a"), "unix:/a", {"": None})
    with pytest.raises(ProtocolError):
        subscription.read(pb.StreamResponse())
    with pytest.raises(ProtocolError, match="loss stage 0"):
        subscription.read(pb.StreamResponse(loss=pb.Loss(count=1)))


def test_a_string_column_is_cut_at_its_ends() -> None:
    column = StringColumn(b"onetwo", np.array([3, 3, 6], np.uint32), None)
    assert list(column) == [b"one", b"", b"two"]
    with pytest.raises(IndexError):
        column[3]
