"""Calls are admitted before their bytes are parsed, and whatever bytes come, others are served."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from stapsdtd.config import OPERATOR, Quotas
from stapsdtd.runtime.logs import LogHandler
from stapsdtd.sessions.token_bucket import TokenBuckets
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api import http2
from tests.api.served import PATIENCE_SECONDS, Served, refused, served
from tests.support import wait_for

REQUESTS_A_SECOND = 20
FILES: tuple[Any, ...] = (pb, health_pb2, reflection_pb2)
METHODS: dict[str, Any] = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
MALFORMED = {
    "no message": b"\xff\xff\xff",
    "a string that is not UTF-8": b"\x0a\x02\xff\xfe",
    "a length beyond the end": b"\x0a\x7f",
    "too deep": b"\x0b" * 10_000,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as serving:
        yield serving


@pytest.fixture
def bounded(tmp_path: Path) -> Iterator[Served]:
    """The user who connects has a role that bounds requests."""
    role = replace(OPERATOR, quotas=Quotas(max_requests_per_second=REQUESTS_A_SECOND))
    with served(tmp_path, roles=[role]) as serving:
        serving.gate._requests = TokenBuckets(lambda: 0.0)
        yield serving


def say(server: Served, path: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """Send bytes as the only request, and return what is said of it."""
    kinds = METHODS.get(path)
    streams = bool(kinds and kinds.client_streaming), bool(kinds and kinds.server_streaming)
    make: Any = {
        (False, False): server.channel.unary_unary,
        (False, True): server.channel.unary_stream,
        (True, True): server.channel.stream_stream,
    }[streams]
    call = make(path, request_serializer=None, response_deserializer=None)
    sent: Any = iter([message]) if streams[0] else message
    return refused(lambda: list(call(sent, timeout=PATIENCE_SECONDS)))


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_what_cannot_be_parsed_is_an_invalid_argument(
    server: Served, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    starts_a_string = message.startswith(b"\x0a")
    paths = [path for path, method in METHODS.items() if not starts_a_string or _begins_with_text(method)]
    assert len(paths) > 4
    for path in paths:
        caplog.clear()
        code, text = say(server, path, message)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"request: {len(message)} bytes cannot be parsed: Error parsing message with type ")
        assert METHODS[path].input_type.full_name in text
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.exc_info is None
        told = vars(record)["fields"]
        assert (told["client"], told["pid"], str(told["reason"])) == (f"uid {os.getuid()}", os.getpid(), text)
    assert server.gate.refusals == {"call": len(paths)}


def _begins_with_text(method: Any) -> bool:
    first = method.input_type.fields_by_number.get(1)
    return first is not None and first.type == first.TYPE_STRING


def test_malformed_requests_are_within_the_rate_and_a_line_of_the_log(
    bounded: Served, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/stapsdtd.v1.StapsdtService/Subscribe"
    codes = [say(bounded, path, MALFORMED["no message"])[0] for _ in range(3 * REQUESTS_A_SECOND)]
    assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) == REQUESTS_A_SECOND
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 2 * REQUESTS_A_SECOND
    assert say(bounded, "/grpc.health.v1.Health/Check", b"")[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert say(bounded, "/no.such/Method", b"")[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    written = io.StringIO()
    handler = LogHandler(written)
    for record in caplog.records:
        if record.getMessage() == "subscribe refused":
            handler.handle(record)
    assert written.getvalue().count("subscribe refused") == 1
    handler.close()
    assert written.getvalue().count("\n") == 2


def test_each_message_of_a_stream_counts_as_a_request(bounded: Served) -> None:
    call: Any = bounded.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")] * 100
    answers = call(iter(asked), timeout=PATIENCE_SECONDS)
    # the call itself is the first
    for _ in range(REQUESTS_A_SECOND - 1):
        assert len(next(answers).list_services_response.service) == 3
    assert refused(lambda: next(answers))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_method_that_is_not_known_is_refused_by_name(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    code, text = say(server, "/stapsdtd.v1.StapsdtService/Explode", b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert text == "method not found: '/stapsdtd.v1.StapsdtService/Explode'; the server may be older than this client"
    (record,) = caplog.records
    assert record.getMessage() == "unknown method refused"


def _headers(*fields: tuple[bytes, bytes]) -> bytes:
    """HPACK, each field a literal that is not indexed."""
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)


def _request(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    usual = (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")
    kind = (b"te", b"trailers"), (b"content-type", b"application/grpc")
    head = http2.frame(http2.HEADERS, _headers(*usual, *kind, *more), http2.END_HEADERS, 1)
    return http2.greeting() + head + http2.frame(http2.DATA, struct.pack(">BI", 0, 0), http2.END_STREAM, 1)


INFO = b"/stapsdtd.v1.StapsdtService/GetServerInfo"


@pytest.mark.parametrize(
    "request_bytes",
    [
        _request(b"/stapsdtd.v1.\xff\xfe/GetServerInfo"),
        _request(b"/\xed\xa0\x80"),
        _request(b"/\x1b[2J"),
        _request(INFO, (b"x-\xff", b"y")),
        _request(INFO, (b"foo", b"\xff\xfe")),
        _request(INFO, (b"foo-bin", b"!!!")),
        _request(INFO, (b"grpc-timeout", b"soon")),
        _request(INFO, (b"grpc-encoding", b"\xff")),
        _request(INFO, (b":path", b"\xff")),
        _request(b""),
    ],
)
def test_whatever_the_headers_are_others_are_served(
    server: Served, request_bytes: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    ident = server.subscribe().subscription_id
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(server.folder / "served.sock"))
        connection.sendall(request_bytes)
        try:
            for kind, flags, _ in http2.frames(connection):
                if kind == http2.RST_STREAM or (kind == http2.HEADERS and flags & http2.END_STREAM):
                    break
        except ConnectionResetError:
            pass
    wait_for(lambda: server.relay.connections == 1, "the connection to end")
    assert [each.subscription_id for each in server.held()] == [ident]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info is None]
    assert "Traceback" not in capfd.readouterr().err


def test_a_path_that_is_no_text_is_the_clients_refusal(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(server.folder / "served.sock"))
        connection.sendall(_request(b"/\xff"))
        wait_for(lambda: bool(caplog.records), "it to be refused")
    (record,) = caplog.records
    assert record.getMessage() == "frames refused"
    told = vars(record)["fields"]
    assert (told["client"], str(told["reason"])) == (f"uid {os.getuid()}", r"a request's path is no method's: b'/\xff'")


def test_messages_that_are_too_large_are_refused_without_a_line(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    code, text = say(server, "/stapsdtd.v1.StapsdtService/Subscribe", bytes(300 << 10))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in text
    assert not caplog.records


def test_calls_that_are_cancelled_leave_no_line(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    stub: Any = server.stub
    calls = [stub.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS) for _ in range(5)]
    calls += [stub.Subscribe.future(pb.SubscribeRequest(selectors=["app:*"])) for _ in range(5)]
    for call in calls:
        call.cancel()
    wait_for(lambda: not server.held(), "what was subscribed to be abandoned")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


CLIENT = f"uid {os.getuid()}"


def test_whoever_took_more_than_its_share_waits_while_others_want_the_daemon(server: Served) -> None:
    ident = server.subscribe().subscription_id
    server.shares.charge(CLIENT, "matching", 1.2)
    # nobody else does
    server.held()
    assert server.shares.taken([CLIENT])[CLIENT].waited == 0
    server.shares.began("another")
    server.held()
    assert server.shares.taken([CLIENT])[CLIENT].waited > 0
    server.shares.charge(CLIENT, "matching", 1000.0)
    status, text = refused(server.held)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert re.match(rf"{CLIENT} takes more than 100 % of a processor, .*; try again in \d+ s", text), text
    # which makes less work
    server.unsubscribe(ident)
    server.shares.ended("another")
    server.held()


def test_what_a_call_takes_of_the_loop_is_charged_but_not_while_it_waits(server: Served) -> None:
    ident = server.subscribe().subscription_id
    begin = time.monotonic()
    call = server.stream(ident)
    wait_for(lambda: server.held()[0].streaming, "the stream to begin")
    before = server.shares.taken([CLIENT])[CLIENT].seconds["requests"]
    server.shares.began("another")
    with pytest.raises(grpc.RpcError):
        list(server.stub.WatchProbes(pb.WatchProbesRequest(), timeout=1.0))
    taken = server.shares.taken([CLIENT])[CLIENT].seconds["requests"] - before
    assert 0 < taken < 0.5 < time.monotonic() - begin
    call.cancel()
