"""Requests at each of their limits, and one beyond, over the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from stapsdtd.config import OPERATOR
from stapsdtd.config.request_limits import (
    MAX_CAPTURES,
    MAX_CLAUSES,
    MAX_FIELDS,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    MAX_PATH_BYTES,
    MAX_PIDS,
    MAX_SCOPE_VALUES,
    MAX_TAG_BYTES,
)
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, served
from tests.largest_requests import LARGEST, SELECTORS

COUNT = pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_COUNT)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with served(tmp_path, roles=[OPERATOR]) as started:
        yield started


def subscribe(**wanted: Any) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(**({} if "clauses" in wanted else {"selectors": ["a:b"]}) | wanted)


def clauses(count: int) -> pb.SubscribeRequest:
    return subscribe(clauses=[pb.Clause(tag=str(number), selectors=["a:b"]) for number in range(count)])


def by(count: int) -> pb.SubscribeRequest:
    return subscribe(aggregation=pb.Aggregation(functions=[COUNT], by=["pid"] * count))


@pytest.mark.parametrize(
    ("make", "most", "field", "reason"),
    [
        (clauses, MAX_CLAUSES, "clauses", "there are 33; the limit is 32"),
        (lambda n: clauses_with(tag="x" * n), MAX_TAG_BYTES, "clauses[0].tag", "it is limited to 256 bytes"),
        (lambda n: subscribe(fields=[f"arg{i}" for i in range(n)]), MAX_FIELDS, "fields", "33; the limit is 32"),
        (by, MAX_KEYS, "aggregation.by", "there are 9 keys; the limit is 8"),
        (lambda n: subscribe(selectors=["a:b"] * n), SELECTORS, "selectors", "257, more than the 256 allowed"),
        (lambda n: subscribe(selectors=["x" * n]), 1024, "selectors", "quotes; this one has 1025"),
        (lambda n: subscribe(where="pid".ljust(n)), 4096, "where", "limited to 4096 characters; this one has 4097"),
        (
            lambda n: subscribe(aggregation=of("arg0:int".ljust(n))),
            4096,
            "aggregation.by",
            "limited to 4096 characters",
        ),
        # two parts are the name and the end
        (lambda n: subscribe(where="!" * (n - 2) + "pid"), MAX_PARTS, "where", "limited to 1536 in all"),
        (
            lambda n: subscribe(scope=pb.Scope(exclude_pids=range(1, n + 1))),
            MAX_PIDS,
            "scope.exclude_pids",
            "4097, more",
        ),
        (lambda n: subscribe(scope=pb.Scope(uids=[0] * n)), MAX_SCOPE_VALUES, "scope.uids", "257, more than the 256"),
        (lambda n: subscribe(scope=pb.Scope(execnames=["a"] * n)), MAX_SCOPE_VALUES, "scope.execnames", "257, more"),
        (lambda n: pb.ListProbesRequest(selectors=["a:b"] * n), SELECTORS, "selectors", "257, more"),
        (lambda n: pb.ListProbesRequest(pids=range(1, n + 1)), MAX_PIDS, "pids", "4097, more"),
        (
            lambda n: pb.ListProbesRequest(selectors=[f"a:b{i}({','.join(['arg0'] * 128)})" for i in range(n)]),
            MAX_CAPTURES // 128,
            "selectors",
            "limited to 3072 in all",
        ),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_its_name(
    server: Served, make: Any, most: int, field: str, reason: str
) -> None:
    called(server, make(most))
    with pytest.raises(grpc.RpcError) as raised:
        called(server, make(most + 1))
    details = raised.value.details() or ""
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{field}: ")
    assert reason in details


def clauses_with(**wanted: Any) -> pb.SubscribeRequest:
    return subscribe(clauses=[pb.Clause(selectors=["a:b"], **wanted)])


def of(key: str) -> pb.Aggregation:
    return pb.Aggregation(functions=[COUNT], by=[key])


def called(server: Served, request: Any) -> None:
    if isinstance(request, pb.ListProbesRequest):
        server.stub.ListProbes(request, timeout=PATIENCE_SECONDS)
    else:
        ident = server.stub.Subscribe(request, timeout=PATIENCE_SECONDS).subscription_id
        server.stub.Unsubscribe(pb.UnsubscribeRequest(subscription_id=ident), timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("kind", sorted(LARGEST.keys() - {"scope", "everything"}))
def test_the_largest_requests_are_accepted(server: Served, kind: str) -> None:
    called(server, LARGEST[kind]())


def test_a_message_has_a_limit(server: Served) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        called(server, subscribe(where="x" * MAX_MESSAGE_BYTES))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"vs. {MAX_MESSAGE_BYTES}" in (raised.value.details() or "")


def test_positions_are_of_clauses(server: Served) -> None:
    ident = server.subscribe().subscription_id
    request = pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_ROWS)
    request.positions.update({str(number): 1 for number in range(MAX_CLAUSES + 1)})
    with pytest.raises(grpc.RpcError) as raised:
        next(server.stub.Stream(request, timeout=PATIENCE_SECONDS))
    assert raised.value.details() == "positions: there are 33, more than the 32 allowed"


@pytest.mark.parametrize("path", ["x" * 100_000, "/" + "x" * MAX_PATH_BYTES])
def test_an_error_shows_the_beginning_of_what_is_long(server: Served, path: str) -> None:
    for request in (subscribe(files=[path]), pb.ListProbesRequest(files=[path])):
        with pytest.raises(grpc.RpcError) as raised:
            called(server, request)
        assert (raised.value.details() or "").startswith(f"files: '{path[:80]}'")
    with pytest.raises(grpc.RpcError) as raised:
        server.stub.Unsubscribe(pb.UnsubscribeRequest(subscription_id=path), timeout=PATIENCE_SECONDS)
    assert (raised.value.details() or "").startswith(f"no subscription '{path[:80]}': ")
