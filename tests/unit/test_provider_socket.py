"""Programs that wait for their probes at a daemon's provider socket."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stapsdtd.provider.waiting import SOCKET_VARIABLE, wait_until_armed
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.sessions.provider_socket import DEFAULT_LIMITS, ProviderSocket, ProviderSockets, WaitLimits
from tests.support import without_descriptors
from tests.users import public_folder

PATIENCE_SECONDS = 20


@contextmanager
def opened(
    path: Path,
    armed_in: Callable[[int], Future[None]],
    limits: WaitLimits = DEFAULT_LIMITS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ProviderSocket]:
    with closing(ProviderSocket(str(path), armed_in, limits, clock=clock)) as provider_socket:
        yield provider_socket


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(str(path))
    return connection


async def is_ended(connection: socket.socket) -> bool:
    return await asyncio.to_thread(connection.recv, 1) == b""


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * PATIENCE_SECONDS))


class Arming:
    """What a daemon would arm. asked: set when a process waits."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.pids: list[int] = []
        self.futures: list[Future[None]] = []

    def armed_in(self, pid: int) -> Future[None]:
        self.pids.append(pid)
        self.futures.append(unfinished())
        self.asked.set()
        return self.futures[-1]


def test_a_wait_ends_when_the_probes_are_armed(tmp_path: Path) -> None:
    async def test() -> None:
        arming = Arming()
        with opened(tmp_path / "socket", arming.armed_in), connected(tmp_path / "socket") as connection:
            ended = asyncio.create_task(is_ended(connection))
            await arming.asked.wait()
            assert arming.pids == [os.getpid()]
            assert not ended.done()
            arming.futures[0].set_result(None)
            assert await ended

    run(test())


def test_nothing_to_arm(tmp_path: Path) -> None:
    async def test() -> None:
        with opened(tmp_path / "socket", lambda _: finished()), connected(tmp_path / "socket") as connection:
            assert await is_ended(connection)

    run(test())


def test_arming_that_takes_long_ends_the_wait(tmp_path: Path) -> None:
    async def test() -> None:
        path, limits = tmp_path / "socket", WaitLimits(seconds=0.1)
        with opened(path, lambda _: unfinished(), limits), connected(path) as connection:
            assert await is_ended(connection)

    run(test())


def test_whoever_waits_no_longer_leaves_room_for_others(tmp_path: Path) -> None:
    async def test() -> None:
        path, arming = tmp_path / "socket", Arming()
        with opened(path, arming.armed_in, WaitLimits(waiting_of_user=1)):
            with connected(path):
                await arming.asked.wait()
            arming.asked.clear()
            # until the daemon has noticed, others are turned away
            while not arming.asked.is_set():
                with connected(path) as other:
                    asked, ended = asyncio.create_task(arming.asked.wait()), asyncio.create_task(is_ended(other))
                    await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
                    for future in arming.futures[1:]:
                        future.set_result(None)
                    await ended
                    asked.cancel()

    run(test())


WAIT_AS_ANOTHER = """
import os, socket, sys
os.setuid(12345)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    connection.recv(1)
"""


def test_one_user_cannot_have_many_wait(tmp_path: Path) -> None:
    async def test() -> None:
        path, arming = tmp_path / "socket", Arming()
        with opened(path, arming.armed_in, WaitLimits(waiting_of_user=3)):
            connections = [connected(path) for _ in range(5)]
            assert await is_ended(connections[3])
            assert await is_ended(connections[4])
            assert len(arming.futures) == 3
            for future in arming.futures:
                future.set_result(None)
            assert all([await is_ended(each) for each in connections])
            arming.asked.clear()
            with connected(path):
                await arming.asked.wait()
            for each in connections:
                each.close()

    run(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_may_wait() -> None:
    async def test() -> None:
        with public_folder() as folder:
            path, arming = folder / "socket", Arming()
            with opened(path, arming.armed_in, WaitLimits(waiting_of_user=1)), connected(path):
                await arming.asked.wait()
                arming.asked.clear()
                another = await asyncio.create_subprocess_exec(sys.executable, "-c", WAIT_AS_ANOTHER, path)
                await arming.asked.wait()
                arming.futures.pop().set_result(None)
                assert await another.wait() == 0

    run(test())


def test_all_users_together_have_a_limit(tmp_path: Path) -> None:
    async def test() -> None:
        path, arming = tmp_path / "socket", Arming()
        with opened(path, arming.armed_in, WaitLimits(waiting=1)), connected(path), connected(path) as second:
            assert await is_ended(second)
            assert len(arming.futures) == 1

    run(test())


def test_a_user_may_wait_so_often(tmp_path: Path) -> None:
    now = 100.0

    async def test() -> None:
        nonlocal now
        path, waits = tmp_path / "socket", 0

        def armed_in(_: int) -> Future[None]:
            nonlocal waits
            waits += 1
            return finished()

        async def wait_often() -> None:
            for _ in range(10):
                with connected(path) as connection:
                    assert await is_ended(connection)

        with opened(path, armed_in, WaitLimits(per_second=4), clock=lambda: now):
            await wait_often()
            assert waits == 4
            now += 0.5
            await wait_often()
            assert waits == 6

    run(test())


def test_without_descriptors_programs_wait_a_little_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        path = tmp_path / "socket"
        with opened(path, lambda _: finished()):
            with without_descriptors():
                connection = socket.socket(fileno=held)
                connection.connect(str(path))
                # the loop calls what is ready before what it is given now
                await asyncio.get_running_loop().create_task(asyncio.sleep(0))
                assert caplog.records
            connection.settimeout(PATIENCE_SECONDS)
            assert await is_ended(connection)
            connection.close()

    held = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()
    run(test())
    assert "no program can wait for its probes for 1 s: accept a connection at " in caplog.text
    assert "Too many open files; the daemon has no descriptors left: raise LimitNOFILE" in caplog.text


def test_closing_ends_all_waits_and_removes_the_path(tmp_path: Path) -> None:
    async def test() -> None:
        path, arming = tmp_path / "provider" / "socket", Arming()
        sockets = ProviderSockets(arming.armed_in)
        sockets.open([str(tmp_path / "socket")])
        with connected(path) as connection:
            ended = asyncio.create_task(is_ended(connection))
            await arming.asked.wait()
            sockets.close()
            assert await ended
        assert not path.parent.exists()

    run(test())


def test_what_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))

    async def test() -> None:
        with opened(path, lambda _: finished()), connected(path) as connection:
            assert await is_ended(connection)

    run(test())


def test_another_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "provider" / "socket"
    path.parent.mkdir()
    path.write_text("a file")

    async def test() -> None:
        sockets = ProviderSockets(lambda _: finished())
        sockets.open([str(tmp_path / "socket")])
        sockets.close()

    run(test())
    assert path.read_text() == "a file"
    assert f"programs cannot wait there for their probes: listen at {path}: Address already in use; " in caplog.text


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "provider").mkdir()

    async def test() -> None:
        sockets = ProviderSockets(lambda _: finished())
        sockets.open([str(tmp_path / "socket")])
        sockets.close()

    run(test())
    assert list((tmp_path / "provider").iterdir()) == []


def test_path_that_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        sockets = ProviderSockets(lambda _: finished())
        sockets.open([str(tmp_path / ("x" * 200))])
        sockets.close()

    run(test())
    assert "programs cannot wait there" in caplog.text
    assert "path too long" in caplog.text


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs look for the socket."""
    path = tmp_path / "socket"
    monkeypatch.setenv(SOCKET_VARIABLE, str(path))
    return path


def test_without_a_daemon_nothing_waits(path: Path) -> None:
    wait_until_armed(3600)
    wait_until_armed(float("inf"))
    path.write_text("no socket")
    wait_until_armed(3600)


def test_a_daemon_that_does_not_answer_is_not_waited_for_long(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(0)
        wait_until_armed(0.01)
        # its queue is full now
        threads = [threading.Thread(target=wait_until_armed, args=(0.01,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


def test_no_time_means_no_wait(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(1)
        listening.setblocking(False)
        wait_until_armed(0)
        wait_until_armed(float("nan"))
        with pytest.raises(BlockingIOError):
            listening.accept()
