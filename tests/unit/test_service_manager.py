from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.runtime.mailbox import ThreadEndedError
from stapsdtd.runtime.service_manager import notify, notify_reloading, watched

_OFTEN = "2000"
"""Microseconds."""


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A service manager that keeps no watchdog."""
    address = str(tmp_path / "notify") if request.param == "file" else f"@stapsdtd-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0"))
        listening.setblocking(False)
        yield listening


def test_assignments_are_lines_of_one_message(manager: socket.socket) -> None:
    notify("READY=1", "STATUS=fine")
    assert manager.recv(100) == b"READY=1\nSTATUS=fine"


def test_reloading_says_when(manager: socket.socket) -> None:
    notify_reloading()
    first, _, time_us = manager.recv(100).partition(b"\nMONOTONIC_USEC=")
    assert first == b"RELOADING=1"
    assert int(time_us) > 0


def test_nobody_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")


def test_a_manager_that_is_gone_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
    assert "cannot send READY=1 to the service manager" in caplog.text


class Life:
    """Proves to be there as often as it is let."""

    def __init__(self, times: int) -> None:
        self._left = times
        self.hangs = asyncio.Event()

    async def prove(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.hangs.set()
            await asyncio.Event().wait()


def received(manager: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(manager.recv(100))
        except BlockingIOError:
            return found


def test_the_watchdog_hears_of_each_proof_of_life_and_nothing_else(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", _OFTEN)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))

    async def serve() -> None:
        life = Life(3)
        async with watched(life.prove):
            await asyncio.wait_for(life.hangs.wait(), 20)

    asyncio.run(serve())
    assert received(manager) == [b"WATCHDOG=1"] * 3


def test_what_proves_the_contrary_is_logged_and_the_watchdog_not_told(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", _OFTEN)

    async def serve() -> None:
        asked = asyncio.Event()

        async def prove() -> None:
            asked.set()
            raise ThreadEndedError

        async with watched(prove):
            await asyncio.wait_for(asked.wait(), 20)

    asyncio.run(serve())
    assert [record.getMessage() for record in caplog.records] == [
        "stopping watchdog notifications: the thread that reads events ended; restart the daemon"
    ]
    assert received(manager) == []


@pytest.mark.parametrize(("microseconds", "pid"), [(None, None), ("0", None), ("often", None), (_OFTEN, "1")], ids=str)
def test_without_a_watchdog_nobody_proves_anything(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, microseconds: str | None, pid: str | None
) -> None:
    for name, value in (("WATCHDOG_USEC", microseconds), ("WATCHDOG_PID", pid)):
        if value is not None:
            monkeypatch.setenv(name, value)

    async def serve() -> None:
        life = Life(0)
        async with watched(life.prove):
            await asyncio.sleep(0)
        assert not life.hangs.is_set()

    asyncio.run(serve())
    assert received(manager) == []
