"""Another tracer's program sleeps at a hit, so that no probe's program can be detached on the whole host: neither an
Unsubscribe nor a stop waits for that, and the next daemon serves.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.client import Client, SubscribeOptions
from stapsdtd.elf import parse_object
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.places import Place
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import TARGETS, TICKER, Daemon, Recorder, Ticker, compile_target, require, running_daemon, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.apart]

Hold = Callable[[], AbstractContextManager[None]]
STOP_SECONDS = 10
UNSUBSCRIBE_SECONDS = 8


@pytest.fixture(scope="session")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BpfObject]:
    require(platform.machine() == "x86_64", "a program that knows this architecture's registers")
    require(shutil.which("clang"), "clang")
    built = tmp_path_factory.mktemp("sleeper") / "sleeper.bpf.o"
    headers = f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}"
    command = ["clang", "-g", "-O2", "-target", "bpfel", "-D__TARGET_ARCH_x86", f"-I{headers}"]
    subprocess.run([*command, "-c", str(TARGETS / "sleeper.bpf.c"), "-o", str(built)], check=True)
    loaded = BpfObject(str(built), {}, {})
    yield loaded
    loaded.close()


@contextmanager
def asleep(folder: Path, tracefs: Tracefs, sleeper: BpfObject) -> Iterator[None]:
    program = compile_target("stuck.c", folder / "stuck")
    with open(program, "rb") as file:
        (site,) = parse_object(file).sites
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stuck:
        assert stuck.stdin is not None
        assert stuck.stdout is not None
        require(stuck.stdout.readline() == b"ready\n", "userfaultfd")
        place = Place(str(program), site.site_offset)
        event = ProbeEvent(tracefs, sleeper.program("on_hit"), f"sleeper_{os.getpid()}/hit", [place], 0)
        try:
            event.arm(stuck.pid)
            stuck.stdin.write(b"\n")
            stuck.stdin.flush()
            wait_for(lambda: "userfault" in Path(f"/proc/{stuck.pid}/stack").read_text(), "the program to sleep")
            yield
        finally:
            stuck.kill()
            stuck.wait()
            event.remove()


@pytest.fixture
def nothing_detaches(tmp_path: Path, tracefs: Tracefs, sleeper: BpfObject) -> Hold:
    """Within what it returns, no uprobe's program can be detached by anybody on this host."""
    return partial(asleep, tmp_path, tracefs, sleeper)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, "--engine", "bpf") as started:
        yield started


def test_unsubscribe_tells_that_it_is_still_disarming(
    nothing_detaches: Hold, daemon: Daemon, ticker_program: Path, ticker: Ticker
) -> None:
    with Client(daemon.target) as client:
        subscription = client.subscribe(f"{TICKER}:{ticker_program}::tick", SubscribeOptions(pids=[ticker.pid]))
        assert ticker.semaphore == 1
        with nothing_detaches():
            begin = time.monotonic()
            account = subscription.unsubscribe()
            assert time.monotonic() - begin < UNSUBSCRIBE_SECONDS
            assert subscription.still_disarming
            # what matters to the program is done
            assert ticker.do("fire 3") == 0
            assert account.fired == 0
            # and the daemon goes on
            recorder = Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick", pids=[ticker.pid])
            assert ticker.do("fire 5") == 1
            wait_for(lambda: len(recorder.events) == 5, "the events")
        assert recorder.finish().delivered == 5
        assert "still disarming" in daemon.log()


def test_stop_says_what_holds_it_and_hinders_no_next_start(
    tmp_path: Path, nothing_detaches: Hold, ticker_program: Path, ticker: Ticker
) -> None:
    daemon = Daemon(tmp_path, "--engine", "bpf")
    first = daemon.process
    selector = f"{TICKER}:{ticker_program}::tick"
    try:
        with Client(daemon.target) as client:
            client.subscribe(selector, SubscribeOptions(pids=[ticker.pid]))
            assert ticker.semaphore == 1
            with nothing_detaches():
                first.terminate()
                begin = time.monotonic()
                wait_for(lambda: first.poll() is not None or "stopping takes more" in daemon.log(), "a word")
                assert time.monotonic() - begin < STOP_SECONDS
                (line,) = [line for line in daemon.log().splitlines() if "stopping takes more" in line]
                assert "stapsdtd-reaper_0 in disarm (kernel/probe_events.py" in line
                assert "state D in " in line
                assert first.poll() is None
                assert ticker.semaphore == 0
                daemon.restart()
                with Client(daemon.target) as newcomer:
                    newcomer.subscribe(selector, SubscribeOptions(pids=[ticker.pid]))
                    assert ticker.semaphore == 1
        assert first.wait(20) == 0
        assert daemon.stop() == 0
    finally:
        for process in (first, daemon.process):
            process.kill()
            process.wait()
    assert ticker.semaphore == 0
    assert "Traceback" not in daemon.log()
