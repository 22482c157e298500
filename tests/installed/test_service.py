"""The service as systemd runs it: it starts with its first client, reloads, restarts, and leaves nothing armed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from stapsdtd.client import Client, ClientError, End, EndReason, EventBatch
from tests.installed import machine
from tests.installed.machine import ALICE, FIRE, FOR_EVER
from tests.waiting import wait_for

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

HITS = 500
_SETTINGS = Path("/etc/stapsdtd/stapsdtd.toml")


def test_first_client_starts_it() -> None:
    machine.systemctl("stop", machine.SERVICE)
    assert machine.show("ActiveState") == "inactive"
    assert machine.show("ActiveState", machine.SOCKET) == "active"
    # with emulated instructions, it starts more slowly than a client waits
    machine.run("stapsdt", "info", user=ALICE, check=False)
    wait_for(lambda: machine.show("ActiveState") == "active", "the service to be up")
    assert machine.count("--", FIRE, str(HITS), user=ALICE) == HITS


def test_reload_keeps_what_is_subscribed() -> None:
    pid, before = machine.main_pid(), machine.cursor()
    with machine.tracing("count", "heldout:hit", "--json", user=ALICE) as counting:
        machine.systemctl("reload", machine.SERVICE)
        wait_for(lambda: any("reloaded" in line for line in machine.journal(before)), "the settings to be read again")
        machine.run(FIRE, str(HITS), user=ALICE)
        done = counting.interrupt()
    assert machine.counted(done) == HITS, done.stderr
    assert machine.main_pid() == pid


class Streaming:
    """A client of root that reads events until its stream ends."""

    def __init__(self, selector: str) -> None:
        self._client = Client(machine.SERVER)
        self._subscription = self._client.subscribe(selector)
        self.events = 0
        self.ended: EndReason | ClientError | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for message in self._subscription.messages():
                match message:
                    case EventBatch(events=events):
                        self.events += len(events)
                    case End(reason=reason):
                        self.ended = reason
                    case _:
                        self.events += len(getattr(message, "seqs", ()))
        except ClientError as error:
            self.ended = error

    def wait(self) -> None:
        wait_for(lambda: not self._thread.is_alive(), "the stream to end")
        self._client.close()


def test_restart_under_load() -> None:
    before = machine.main_pid()
    streaming = Streaming("heldout:hit(arg0)")
    with machine.running(FIRE, FOR_EVER, user=ALICE) as load:
        wait_for(lambda: streaming.events > 1000, "events")
        machine.systemctl("restart", machine.SERVICE)
        streaming.wait()
        assert streaming.ended is EndReason.SERVER_STOPPING
        assert machine.main_pid() != before
        assert not machine.left_by(before)
        assert machine.semaphore(load.pid) == 0
        assert machine.subscriptions() == []
    assert machine.count("--", FIRE, str(HITS), user=ALICE) == HITS


def test_kill_under_load() -> None:
    before = machine.main_pid()
    streaming = Streaming("heldout:hit(arg0)")
    with machine.running(FIRE, FOR_EVER, user=ALICE) as load:
        wait_for(lambda: streaming.events > 1000, "events")
        os.kill(before, signal.SIGKILL)
        streaming.wait()
        assert isinstance(streaming.ended, ClientError)
        machine.wait_for_another(before)
        assert not machine.left_by(before)
        assert machine.semaphore(load.pid) == 0
    assert machine.count("--", FIRE, str(HITS), user=ALICE) == HITS


def test_settings_that_are_wrong_are_named() -> None:
    pid, before, old = machine.main_pid(), machine.cursor(), _SETTINGS.read_text()
    try:
        _SETTINGS.write_text(old + "\n[limits]\nmax_subscription = 1\n")
        machine.systemctl("reload", machine.SERVICE, check=False)
        wait_for(lambda: any("max_subscription" in line for line in machine.journal(before)), "it to be named")
    finally:
        _SETTINGS.write_text(old)
    assert machine.main_pid() == pid
