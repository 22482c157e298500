"""Answers that nobody reads are bounded for each client."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from pathlib import Path
from typing import cast

import grpc
import pytest

from stapsdtd.api import unread
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api import http2
from tests.api.served import PATIENCE_SECONDS, Served, served
from tests.support import wait_for
from tests.unit.samples import site

NO_WINDOW = http2.PREFACE + http2.frame(http2.SETTINGS, struct.pack(">HI", 4, 0))


def listed(server: Served) -> int | str:
    """Return how many probes are listed, or why none are."""
    try:
        return len(server.stub.ListProbes(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS).probes)
    except grpc.RpcError as error:
        return cast("grpc.Call", error).details() or ""


def unsubscribed(server: Served) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        server.unsubscribe("nobody")
    return cast("grpc.Call", raised.value).details() or ""


def is_refused(server: Served) -> bool:
    return "wait for uid 0 to read them" in str(listed(server))


def test_who_reads_no_answers_may_not_ask_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as server:
        server.map(os.getpid(), server.file_object(*(site(f"n{number}", number) for number in range(1000))))
        answer = server.stub.ListProbes(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS)
        monkeypatch.setattr(unread, "MOST_BYTES", 3 * answer.ByteSize() - 1)
        # those that are read do not add up
        assert [listed(server) for _ in range(10)] == [1000] * 10
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(server.socket))
            connection.sendall(NO_WINDOW)
            streams = itertools.count(1, 2)

            def ask_once_more() -> bool:
                connection.sendall(http2.request("ListProbes", stream=next(streams)))
                return is_refused(server)

            wait_for(ask_once_more, "the limit")
            assert next(streams) >= 7
            # who has too much may still take away
            assert "nobody" in unsubscribed(server)
            # two are given up
            for stream in (1, 3):
                connection.sendall(http2.frame(http2.RST_STREAM, struct.pack(">I", 8), stream=stream))
            wait_for(lambda: listed(server) == 1000, "room for others")
            wait_for(ask_once_more, "the limit again")
        wait_for(lambda: listed(server) == 1000, "the others to be given up")
