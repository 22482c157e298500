"""The client's side: what it makes of an opener that answers, fails, is slow, or is not there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stapsdtd.kernel.perf_opener import (
    REPLY,
    REQUEST,
    VERSION,
    Kind,
    OpenerAbsentError,
    OpenerSilentError,
    PerfOpener,
)
from tests.support import wait_for

Serve = Callable[[socket.socket], None]
"""Serves one connection."""

_SILENT = "the opener of perf events does not answer"


class FakeOpener:
    """Listens as systemd does, and serves each connection in a thread."""

    def __init__(self, path: str, *serve: Serve) -> None:
        """serve: for the first connection, the second, and so on; the last one serves all further ones as well."""
        self.requests: list[bytes] = []
        self.connections = 0
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.ExitStack() as threads:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                serve = self._serve[min(self.connections, len(self._serve) - 1)]
                self.connections += 1
                thread = threading.Thread(target=self._run, args=(serve, connection))
                thread.start()
                threads.callback(thread.join)

    @staticmethod
    def _run(serve: Serve, connection: socket.socket) -> None:
        # the client may be gone, with answers that it did not read
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            serve(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def answering(error: int = 0, descriptors: int = 1, version: int = VERSION, size: int = REPLY.size) -> Serve:
    """Answer each request so, with descriptors of a file that holds it."""

    def serve(connection: socket.socket) -> None:
        while request := connection.recv(REQUEST.size + 1):
            file = os.memfd_create("request", os.MFD_CLOEXEC)
            os.write(file, request)
            answer = REPLY.pack(version, error).ljust(size, b"\0")[:size]
            socket.send_fds(connection, [answer], [file] * descriptors)
            os.close(file)
            if not error:
                connection.send(answer)

    return serve


def ends_at_once(connection: socket.socket) -> None:
    """Close the connection, as systemd does with one whose process could not be started."""


def ends_at_a_request(connection: socket.socket) -> None:
    connection.recv(REQUEST.size)


def never_answers(connection: socket.socket) -> None:
    while connection.recv(REQUEST.size):
        pass


@contextlib.contextmanager
def serving(folder: Path, *serve: Serve, seconds: float = 20.0) -> Iterator[tuple[FakeOpener, PerfOpener]]:
    fake = FakeOpener(str(folder / "sock"), *serve)
    opener = PerfOpener(str(folder / "sock"), seconds)
    try:
        yield fake, opener
    finally:
        opener.close()
        fake.close()


def content(descriptor: int) -> tuple[int, ...]:
    assert not os.get_inheritable(descriptor)
    try:
        return REQUEST.unpack(os.pread(descriptor, 100, 0))
    finally:
        os.close(descriptor)


def test_the_request_says_what_is_to_be_opened(tmp_path: Path) -> None:
    with serving(tmp_path, answering()) as (fake, opener):
        assert content(opener.open(Kind.TRACEPOINT, 42, -1, 1234)) == (VERSION, 1, 42, -1, 1234)
        assert content(opener.open(Kind.MAPPINGS, -1, 3)) == (VERSION, 2, -1, 3, 0)
        assert content(opener.open(Kind.KPROBE_TRIAL, -1, 0)) == (VERSION, 3, -1, 0, 0)
        assert opener.is_used
        assert fake.connections == 1


@pytest.mark.parametrize(
    ("error", "raised"), [(errno.ESRCH, ProcessLookupError), (errno.EACCES, PermissionError), (errno.EMFILE, OSError)]
)
def test_the_kernels_errors_are_raised_as_if_it_was_asked_here(
    tmp_path: Path, error: int, raised: type[OSError]
) -> None:
    with serving(tmp_path, answering(error, descriptors=0)) as (fake, opener):
        for _ in range(2):
            with pytest.raises(raised, match=f"perf_event_open for process 42: {os.strerror(error)}; ") as caught:
                opener.open(Kind.TRACEPOINT, 42, -1, 1234)
            assert caught.value.errno == error
        assert fake.connections == 1


def test_one_that_ends_while_it_has_the_descriptor_as_well(tmp_path: Path) -> None:
    def ends(connection: socket.socket) -> None:
        file = os.memfd_create("request", os.MFD_CLOEXEC)
        connection.recv(REQUEST.size)
        socket.send_fds(connection, [REPLY.pack(VERSION, 0)], [file])
        os.close(file)

    before = open_files()
    with serving(tmp_path, ends, answering()) as (fake, opener):
        os.close(opener.open(Kind.MAPPINGS, -1, 0))
        assert fake.connections == 2
    assert open_files() == before


def test_nothing_there(tmp_path: Path) -> None:
    opener = PerfOpener(str(tmp_path / "sock"))
    with pytest.raises(OpenerAbsentError):
        opener.open(Kind.MAPPINGS, -1, 0)
    # it is looked for each time
    with serving(tmp_path, answering()) as (_, served):
        os.close(opener.open(Kind.MAPPINGS, -1, 0))
        os.close(served.open(Kind.MAPPINGS, -1, 0))
        opener.close()


def test_a_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "sock"))
    with pytest.raises(OpenerSilentError, match=f"{_SILENT}: Connection refused; .*systemctl status"):
        PerfOpener(str(tmp_path / "sock")).open(Kind.MAPPINGS, -1, 0)


def test_one_that_ended_is_connected_to_again(tmp_path: Path) -> None:
    with serving(tmp_path, ends_at_a_request, answering()) as (fake, opener):
        os.close(opener.open(Kind.MAPPINGS, -1, 0))
        os.close(opener.open(Kind.MAPPINGS, -1, 1))
        assert fake.connections == 2


@pytest.mark.parametrize("serve", [ends_at_once, ends_at_a_request])
def test_one_that_ends_each_time_is_given_up_until_the_next_request(tmp_path: Path, serve: Serve) -> None:
    with serving(tmp_path, serve, serve, answering()) as (fake, opener):
        with pytest.raises(OpenerSilentError, match=_SILENT) as caught:
            opener.open(Kind.MAPPINGS, -1, 0)
        assert caught.value.errno == errno.EACCES
        assert not opener.is_used
        assert fake.connections == 2
        os.close(opener.open(Kind.MAPPINGS, -1, 0))


def test_one_that_never_answers_holds_up_one_request_and_none_after_it(tmp_path: Path) -> None:
    seconds = 0.3
    with serving(tmp_path, never_answers, seconds=seconds) as (fake, opener):
        with pytest.raises(OpenerSilentError, match=rf"{_SILENT}: not within 0\.3 s;"):
            opener.open(Kind.MAPPINGS, -1, 0)
        for _ in range(100):
            with pytest.raises(OpenerSilentError, match=r"not within 0\.3 s a moment ago;"):
                opener.open(Kind.MAPPINGS, -1, 0)
        # 100 that each waited would have taken half a minute, and a connection each
        assert fake.connections < 10


def test_an_answer_that_comes_too_late_is_nobodys(tmp_path: Path) -> None:
    asked_again = threading.Event()

    def late(connection: socket.socket) -> None:
        connection.recv(REQUEST.size)
        asked_again.wait()
        connection.send(REPLY.pack(VERSION, errno.ENODEV))

    with serving(tmp_path, late, answering(), seconds=0.3) as (_, opener):
        with pytest.raises(OpenerSilentError):
            opener.open(Kind.MAPPINGS, -1, 7)
        opener._silent_until = 0.0
        asked_again.set()
        assert content(opener.open(Kind.MAPPINGS, -1, 8))[3] == 8


@pytest.mark.parametrize(
    "serve",
    [
        answering(version=VERSION + 1),
        answering(size=REPLY.size - 1),
        answering(size=REPLY.size + 1),
        answering(descriptors=0),
        answering(descriptors=2),
        answering(descriptors=20),
        answering(errno.ENOENT, descriptors=1),
    ],
    ids=["version", "short", "long", "no descriptor", "two", "twenty", "with an error"],
)
def test_answers_that_are_none(tmp_path: Path, serve: Serve) -> None:
    with serving(tmp_path, serve) as (_, opener):
        before = open_files()
        with pytest.raises(OpenerSilentError, match=_SILENT):
            opener.open(Kind.MAPPINGS, -1, 0)
        # the opener closes its own
        wait_for(lambda: open_files() == before, "what was received to be closed")


def open_files() -> Sequence[str]:
    """Return what this process has open that an opener could have sent."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if os.path.lexists(link) and "memfd:request" in os.readlink(link))


def test_threads_each_get_their_own_answer(tmp_path: Path) -> None:
    got: dict[int, int] = {}

    with serving(tmp_path, answering()) as (fake, opener):

        def ask(cpus: range) -> None:
            for cpu in cpus:
                got[cpu] = content(opener.open(Kind.MAPPINGS, -1, cpu))[3]

        threads = [threading.Thread(target=ask, args=(range(first, 400, 8),)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {cpu: cpu for cpu in range(400)}
        assert fake.connections == 1
