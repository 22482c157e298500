"""The examples of ksnoop's own documentation, beside ksnoop: the same values."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from stapsdtd.client import Client
from tests.kernel.test_function_tracing import all_are_armed, with_kprobes
from tests.support import Daemon, require, stapsdt, stapsdt_command, wait_for

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.parametrize("engine", ["bpf"], indirect=True),
    pytest.mark.vm,
    with_kprobes,
]

SEND = """
import socket
receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
receiver.bind(("127.0.0.1", 0))
for size in (10, 100, 1000):
    sender.sendto(bytes(size), receiver.getsockname())
    receiver.recv(size)
"""
PATIENCE_SECONDS = 120
_VALUE = re.compile(r"([\w>-]+) =\s+\([^)]*\)(-?\w+)")


@pytest.fixture(scope="module")
def loopback() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def send() -> None:
    """In a process of its own: those that are connected to the daemon are left out."""
    subprocess.run([sys.executable, "-c", SEND], check=True)


def read_until(output: IO[str], word: str) -> None:
    for line in output:
        if word in line:
            return
    pytest.fail(f"no line has {word}")


@contextmanager
def ksnoop(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["stdbuf", "-oL", "ksnoop", "trace", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        read_until(process.stdout, "FUNCTION/ARGS")
        yield process
        process.kill()


@pytest.mark.parametrize("what", ["ip_send_skb(skb->len, return)", "ip_send_skb(skb->len > 128)"])
@pytest.mark.usefixtures("loopback")
def test_same_values(daemon: Daemon, what: str) -> None:
    require(shutil.which("ksnoop") is not None, "ksnoop (apt-get install libbpf-tools)")
    with (
        ksnoop(what) as other,
        subprocess.Popen(
            stapsdt_command(daemon.target, "kernel", "trace", "--json", what), stdout=subprocess.PIPE, text=True
        ) as own,
        Client(daemon.target) as client,
    ):
        wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the trace to run")
        all_are_armed(client)
        send()
        own.send_signal(signal.SIGINT)
        output, _ = own.communicate(timeout=PATIENCE_SECONDS)
        other.send_signal(signal.SIGINT)
        found, _ = other.communicate(timeout=PATIENCE_SECONDS)
    values = [pair for line in output.splitlines() for pair in json.loads(line)["values"].items()]
    assert values
    if not found.strip():
        pytest.skip("ksnoop sees no call on this kernel")
    assert [(name, int(number, 0)) for name, number in _VALUE.findall(found)] == values


def test_same_prototype(daemon: Daemon) -> None:
    require(shutil.which("ksnoop") is not None, "ksnoop (apt-get install libbpf-tools)")
    other = subprocess.run(["ksnoop", "info", "ip_send_skb"], capture_output=True, text=True, check=True).stdout
    own = stapsdt(daemon.target, "kernel", "info", "ip_send_skb").stdout.splitlines()[0]
    assert other.strip().removesuffix(";") == own
