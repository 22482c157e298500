"""Bounds of frames and headers, at the limit and beyond, sent by hand; and gRPC's own clients, which stay below."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from stapsdtd.api.connections import ATTEMPTS_PER_SECOND, DISCONNECTED_ATTEMPTS
from stapsdtd.api.frame_budget import CONNECTION_FRAMES, REQUESTS_FACTOR
from stapsdtd.api.frames import MAX_CONTINUATIONS
from stapsdtd.api.header_blocks import MAX_BLOCK_BYTES
from stapsdtd.api.http2 import ErrorCode
from stapsdtd.client import Client
from stapsdtd.config import OPERATOR, Quotas, Role
from stapsdtd.subscribe_options import SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api import http2
from tests.api.served import PATIENCE_SECONDS, Served, served
from tests.support import wait_for
from tests.unit.samples import batch, site
from tests.unit.test_token_bucket import Clock

REQUESTS = 50
QUOTAS = Quotas(max_requests_per_second=REQUESTS, max_connections=60)
BOUNDED = Role("bounded", everybody=True, list=("all",), trace=("all",), quotas=QUOTAS)
ENDED = http2.END_HEADERS | http2.END_STREAM
PRIORITY = http2.frame(2, struct.pack(">IB", 3, 16), 0, 5)
"""What gRPC ignores."""
PING = http2.frame(http2.PING, b"the last")
GREETING = http2.greeting()
GREETING_FRAMES = 2
HEADERS = http2.headers("ListSubscriptions")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[Served]:
    with served(tmp_path, roles=[BOUNDED], clock=clock) as started:
        yield started


@contextmanager
def connected(server: Served, said: bytes = b"") -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(server.socket))
        with suppress(ConnectionError):
            connection.sendall(said)
        yield connection


def is_answered(connection: socket.socket) -> bool:
    """Whether the last frame sent, PING, is answered; False if the connection is closed before."""
    with suppress(ConnectionError):
        for kind, flags, payload in http2.frames(connection):
            if kind == http2.PING and flags & http2.ACK and payload == b"the last":
                return True
    return False


def goaway_of(connection: socket.socket) -> tuple[ErrorCode, str]:
    """The last frame before the connection is closed."""
    said: list[tuple[int, bytes]] = []
    with suppress(ConnectionError):
        said.extend((kind, payload) for kind, _, payload in http2.frames(connection))
    kind, payload = said[-1]
    assert kind == http2.GOAWAY
    return ErrorCode(int.from_bytes(payload[4:8], "big")), payload[8:].decode()


def refusals(server: Served) -> int:
    return server.gate.refusals["frames"]


def block(field_bytes: int) -> bytes:
    """Whose fields have so many bytes, each with HPACK's 32."""
    own = sum(32 + len(name) + len(value) for name, value in http2.fields("ListSubscriptions"))
    left = field_bytes - own - 33
    rest = left - 127
    return HEADERS + b"\0\1x\x7f" + bytes([0x80 | rest & 0x7F, rest >> 7]) + b"z" * left


def headers_of(block: bytes, stream: int = 1) -> bytes:
    return http2.frame(http2.HEADERS, block, ENDED, stream)


def continued(times: int) -> bytes:
    continuations = [http2.frame(http2.CONTINUATION, b"", 0, 1)] * (times - 1)
    continuations.append(http2.frame(http2.CONTINUATION, b"", http2.END_HEADERS, 1))
    return http2.frame(http2.HEADERS, HEADERS, http2.END_STREAM, 1) + b"".join(continuations)


def requests(count: int) -> bytes:
    return b"".join(headers_of(HEADERS, 2 * number + 1) for number in range(count))


BOUNDS = {
    "frames": (
        PRIORITY * (CONNECTION_FRAMES - GREETING_FRAMES - 1),
        PRIORITY,
        f"sends more than {CONNECTION_FRAMES} frames a second",
    ),
    "requests": (requests(REQUESTS_FACTOR * REQUESTS), headers_of(HEADERS, 1001), "requests a second"),
    "fields": (
        headers_of(block(MAX_BLOCK_BYTES)),
        headers_of(block(MAX_BLOCK_BYTES + 1), 3),
        f"a request's headers have more than {MAX_BLOCK_BYTES} bytes",
    ),
    "continuations": (
        continued(MAX_CONTINUATIONS),
        continued(MAX_CONTINUATIONS + 1).replace(struct.pack(">I", 1), struct.pack(">I", 3)),
        f"more than {MAX_CONTINUATIONS} continuations",
    ),
}


@pytest.mark.parametrize(("within", "more", "reason"), BOUNDS.values(), ids=BOUNDS)
def test_bounds(server: Served, caplog: pytest.LogCaptureFixture, within: bytes, more: bytes, reason: str) -> None:
    with connected(server, GREETING + within + PING) as connection:
        assert is_answered(connection)
        assert refusals(server) == 0
        connection.sendall(more)
        code, told = goaway_of(connection)
    assert code is ErrorCode.ENHANCE_YOUR_CALM
    assert reason in told
    assert refusals(server) == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == "frames refused"
    assert str(vars(record)["fields"]["reason"]) == told


def test_who_waits_may_send_more(server: Served, clock: Clock) -> None:
    with connected(server, GREETING + PRIORITY * (CONNECTION_FRAMES - GREETING_FRAMES - 1) + PING) as connection:
        assert is_answered(connection)
        clock.now += 1
        connection.sendall(PRIORITY * (CONNECTION_FRAMES - 1) + PING)
        assert is_answered(connection)


def test_connections_of_a_client_share_its_budget(server: Served) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            said = GREETING + PRIORITY * (CONNECTION_FRAMES - GREETING_FRAMES - 1) + PING
            assert is_answered(stack.enter_context(connected(server, said)))
        third = stack.enter_context(connected(server, GREETING))
        assert goaway_of(third) == (
            ErrorCode.ENHANCE_YOUR_CALM,
            f"uid {os.getuid()} sends more than 10000 frames a second",
        )


def test_who_connects_too_often_waits(server: Served, clock: Clock) -> None:
    with ExitStack() as stack:
        first = [stack.enter_context(connected(server, GREETING + PING)) for _ in range(ATTEMPTS_PER_SECOND)]
        assert all(map(is_answered, first))
        assert not is_answered(stack.enter_context(connected(server, GREETING + PING)))
        assert server.gate.refusals["connection"] == 1
        clock.now += 0.5
        assert is_answered(stack.enter_context(connected(server, GREETING + PING)))


def test_who_is_disconnected_comes_back_less_often(server: Served) -> None:
    for _ in range(ATTEMPTS_PER_SECOND // (DISCONNECTED_ATTEMPTS + 1)):
        with connected(server, GREETING + headers_of(b"\xbe")) as connection:
            assert goaway_of(connection)[0] is ErrorCode.COMPRESSION_ERROR
    with ExitStack() as stack:
        left = ATTEMPTS_PER_SECOND % (DISCONNECTED_ATTEMPTS + 1)
        assert all(is_answered(stack.enter_context(connected(server, GREETING + PING))) for _ in range(left))
        assert not is_answered(stack.enter_context(connected(server, GREETING + PING)))


def test_many_refused_connections_are_closed_at_once(server: Served) -> None:
    """Only some are held, and none is left when the server stops."""
    with ExitStack() as stack:
        for _ in range(4 * ATTEMPTS_PER_SECOND):
            stack.enter_context(connected(server))
        wait_for(lambda: server.gate.refusals["connection"] == 3 * ATTEMPTS_PER_SECOND, "the refusals")
        assert len(server.relay._held._clients) <= 32
    wait_for(lambda: not server.relay._held._clients, "them to be closed")


def test_bounds_of_a_block_hold_for_everybody(tmp_path: Path) -> None:
    """Who may send as many frames as one likes still sends none that expand beyond."""
    bomb = headers_of(HEADERS + b"\x40\1x\x7f\xf9\x1d" + b"z" * 3960) + headers_of(HEADERS + b"\xbe" * 15_000, 3)
    with served(tmp_path, roles=[OPERATOR]) as server:
        with connected(server, GREETING + PRIORITY * 3 * CONNECTION_FRAMES + PING) as connection:
            assert is_answered(connection)
            connection.sendall(bomb)
            assert goaway_of(connection)[0] is ErrorCode.ENHANCE_YOUR_CALM
        assert server.held() == []


def test_a_client_that_streams_all_that_it_can_take_is_never_closed(tmp_path: Path) -> None:
    events, batches = batch(range(10_000)), 300
    with served(tmp_path, roles=[BOUNDED]) as server, Client(f"unix:{server.socket}") as client:
        server.map(1, server.file_object(site("hit")))
        subscription = client.subscribe("app:*", SubscribeOptions(queue_bytes=64 << 20))
        for _ in range(20):
            server.fire(events)
        fired, received = 20, 0
        for columns in subscription.columns():
            received += len(columns.seq)
            if fired < batches:
                server.fire(events)
                fired += 1
            if received == 10_000 * batches:
                break
        assert client.info().engine
        assert refusals(server) == 0


def test_compressed_requests_are_bounded_by_what_they_expand_to(server: Served) -> None:
    request = pb.SubscribeRequest(selectors=["x" * (2 << 20)])
    with pytest.raises(grpc.RpcError, match="larger than max"):
        server.stub.Subscribe(request, timeout=PATIENCE_SECONDS, compression=grpc.Compression.Gzip)
    assert server.held() == []
