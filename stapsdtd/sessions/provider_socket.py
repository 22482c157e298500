"""The socket on which programs wait until the probes that they just mapped are armed.

    program                                   daemon
    map a library with probes
    connect                         ──►       look at the process that connected, arm its probes
    wait for the connection's end   ◄──       close the connection
    fire

Nothing is sent. A program that nobody traces waits for one round trip; one that maps probes somebody wants, for the
milliseconds that arming takes. What goes wrong ends the wait early, never late.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from stapsdtd.kernel.host_calls import ACCEPT, LISTEN, host_call
from stapsdtd.sessions.token_bucket import TokenBuckets

_log = logging.getLogger(__name__)

_FOLDER = "provider"
_CREDENTIALS = struct.Struct("i2I")
_ACCEPTS_AT_ONCE = 16
_FLOOD_PAUSE_SECONDS = 0.01
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """waiting, waiting_of_user: processes at a time. per_second: of a user. What exceeds them does not wait.
    seconds: for how long one may wait.
    """

    waiting: int = 256
    waiting_of_user: int = 32
    per_second: int = 200
    seconds: float = 60.0


DEFAULT_LIMITS = WaitLimits()


class ProviderSockets:
    """One for each unix socket that clients connect to: `provider/stapsdtd.sock` beside `stapsdtd.sock`.

    They have a folder of their own, which containers may mount without the sockets that clients connect to. Runs on an
    event loop.
    """

    def __init__(self, armed_in: Callable[[int], Future[None]]) -> None:
        """armed_in: as of `ProviderSocket`."""
        self._armed_in = armed_in
        self._sockets: list[ProviderSocket] = []
        self._folders: list[str] = []

    def open(self, listener_paths: Iterable[str]) -> None:
        """Listen. Call this while the listeners' paths are locked. Programs do without where it fails."""
        for listener_path in listener_paths:
            folder = os.path.join(os.path.dirname(listener_path), _FOLDER)
            path = os.path.join(folder, os.path.basename(listener_path))
            try:
                with host_call(LISTEN, path):
                    self._make(folder)
                    self._sockets.append(ProviderSocket(path, self._armed_in))
            except OSError as error:
                _log.warning("programs cannot wait there for their probes: %s", error)

    def _make(self, folder: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(folder)
            self._folders.append(folder)
            os.chmod(folder, 0o755)  # noqa: S103

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        for folder in self._folders:
            with suppress(OSError):
                os.rmdir(folder)


class ProviderSocket:
    """Runs on an event loop."""

    def __init__(
        self,
        path: str,
        armed_in: Callable[[int], Future[None]],
        limits: WaitLimits = DEFAULT_LIMITS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """armed_in: called with a pid; returns a future that is done when the process's probes are armed.

        Raises OSError.
        """
        self.path = path
        self._armed_in = armed_in
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._waiting: Counter[int] = Counter()
        self._waits = TokenBuckets(clock)
        self._open: dict[socket.socket, tuple[int, asyncio.TimerHandle]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._socket = _listen(path)
        self._loop.add_reader(self._socket, self._accept_all)

    def close(self) -> None:
        """Stop listening, and end all waits."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        for connection in list(self._open):
            self._end(connection)

    def _accept_all(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                refusal = ACCEPT.of(error, f"a connection at {self.path}")
                _log.warning("no program can wait for its probes for %g s: %s", _RETRY_SECONDS, refusal)
                self._pause(_RETRY_SECONDS)
                return
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(credentials)
            # a pid of 0 is that of a process in another pid namespace
            if pid and self._may_wait(uid):
                self._begin(connection, pid, uid)
            else:
                connection.close()
                if pid:
                    self._pause(_FLOOD_PAUSE_SECONDS)
                    return

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(seconds, self._loop.add_reader, self._socket, self._accept_all)

    def _may_wait(self, uid: int) -> bool:
        limits = self._limits
        if len(self._open) >= limits.waiting or self._waiting[uid] >= limits.waiting_of_user:
            return False
        return self._waits.take(uid, limits.per_second)

    def _begin(self, connection: socket.socket, pid: int, uid: int) -> None:
        self._open[connection] = uid, self._loop.call_later(self._limits.seconds, self._end, connection)
        self._waiting[uid] += 1
        try:
            armed = self._armed_in(pid)
        except BaseException:
            self._end(connection)
            raise
        if armed.done():
            self._end(connection)
            return
        # it waits no longer than it chose to
        self._loop.add_reader(connection, self._end, connection)
        armed.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._end, connection))

    def _end(self, connection: socket.socket) -> None:
        if connection in self._open:
            uid, timer = self._open.pop(connection)
            timer.cancel()
            self._loop.remove_reader(connection)
            self._waiting[uid] -= 1
            self._waiting += Counter()
            connection.close()


def _listen(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        # a daemon that was killed left it
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listening.bind(path)
        # all that a connection gives is a wait
        os.chmod(path, 0o666)  # noqa: S103
        listening.listen(socket.SOMAXCONN)
    except BaseException:
        listening.close()
        raise
    return listening
