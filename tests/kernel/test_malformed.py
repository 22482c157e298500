"""A user who sends the real daemon what is no request costs it some lines, and nobody else anything."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stapsdtd.client import Client
from tests.support import Daemon, running_daemon
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

REQUESTS = 60
"""Of a kind: together fewer than those for which a client is disconnected."""
SENDER = """
import collections, json, socket, sys
import grpc
from tests.api import http2

target, count = sys.argv[1], int(sys.argv[2])
codes = collections.Counter()
with grpc.insecure_channel(target) as channel:
    for method in ("Subscribe", "ListProbes", "NoSuchMethod"):
        call = channel.unary_unary(f"/stapsdtd.v1.StapsdtService/{method}")
        # fewer than the server takes at a time
        sent = [call.future(b"\\xff\\xff\\xff", timeout=60) for _ in range(count)]
        codes.update(each.code().name for each in sent)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(target.removeprefix("unix:"))
    path = b"\\0\\x05:path\\x05/\\xff\\xff/x"
    connection.sendall(http2.greeting() + http2.frame(http2.HEADERS, path, http2.END_HEADERS, 1))
    while connection.recv(1 << 16):
        pass
print(json.dumps(codes))
"""


def sent_by_anne(daemon: Daemon) -> dict[str, int]:
    command = [sys.executable, "-c", SENDER, daemon.target, str(REQUESTS)]
    told = subprocess.run(
        command, user=ANNE.uid, group=ANNE.uid, extra_groups=[], capture_output=True, text=True, check=True
    )
    codes: dict[str, int] = json.loads(told.stdout)
    return codes


def test_what_is_no_request_costs_some_lines() -> None:
    with public_folder() as folder:
        with running_daemon(folder) as daemon, Client(daemon.target) as client:
            before = daemon.log().count("\n")
            codes = sent_by_anne(daemon)
            assert set(codes) <= {"INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}
            assert sum(codes.values()) == 3 * REQUESTS
            assert codes["INVALID_ARGUMENT"] > 0
            assert client.info().version
            assert daemon.log().count("\n") - before <= 5
        # what was left out is told as the daemon stops: a line for each kind
        lines = daemon.log().split("\n")
        told = [line for line in lines if " times=" in line]
        assert 1 <= len(told) <= 4
        assert all(f'client="uid {ANNE.uid}" pid=' in line for line in told)
        first = [line for line in lines if f"uid {ANNE.uid}" in line and " times=" not in line]
        counted = sum(int(line.rpartition("times=")[2]) for line in told)
        # the path ended its connection
        assert counted + len(first) == 3 * REQUESTS + 1
