"""Where clients connect, in front of the gRPC server, which could neither inherit a socket nor tell who is there.

    client ──► listener ──► relay: who is it? may it? ──► a connection with a name of its own ──► gRPC server
                                     └── PeerTable: name ──► Peer ◄── context.peer() of each call

The gRPC server listens on a socket whose path is gone once the relay holds it, so that nobody else gets there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from stapsdtd.api.access import Gate, Peer
from stapsdtd.api.listeners import ListeningSocket, hang_up, keep_alive
from stapsdtd.api.opening import Opening
from stapsdtd.errors import AccessDeniedError
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.token_bucket import TokenBucket

_log = logging.getLogger(__name__)

_MOST_HANDSHAKES = 64
"""At a time: who is nobody yet counts for nobody, and asyncio takes 256 KiB for each."""
_FLUSH_SECONDS = 5.0
_REST_SECONDS = 0.2
_ACCEPTED_AT_ONCE = 16
_RECORDS_PER_SECOND = 20

_BUFFER_BYTES = 120_000
"""Less than malloc maps anew for each block, which costs more than copying it."""

_SO_PEERGROUPS = 59
"""include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it."""
_CREDENTIALS = struct.Struct("i2I")
_GROUPS_BYTES = 1024
"""As many as Python's getsockopt takes. Who is in more than 256 groups, which the kernel then does not tell, is in
none.
"""

_NAME = "stapsdtd-client-"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client may take: for TLS; then for HTTP/2's greeting; and until its first request, from the same
    moment on. No request may take longer than twice that from its first byte to its last. Who takes longer is
    disconnected.
    """

    handshake_seconds: float = 10.0
    greeting_seconds: float = 10.0
    request_seconds: float = 60.0


class PeerTable:
    """Who is behind which connection to the gRPC server, on an event loop. connected: is told whose processes they
    are, until these end: others may hold the connection then, and still others get the number.
    """

    def __init__(self, connected: ConnectedClients) -> None:
        self._peers: dict[str, Peer] = {}
        self._processes: dict[str, int] = {}
        self._connected = connected

    def add(self, peer: Peer) -> str:
        """Answer a name that nobody can guess."""
        name = _NAME + secrets.token_hex(16)
        self._peers[name] = peer
        if peer.pid is not None:
            self._join(name, peer.pid)
        return name

    def remove(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None and peer.pid is not None:
            self._leave(name, peer.pid)

    def _join(self, name: str, pid: int) -> None:
        try:
            process = self._processes[name] = os.pidfd_open(pid)
        except OSError as error:
            # it ended already, or is in another pid namespace and has no number here
            _log.debug("pid %d is connected, and its events are told: %s", pid, error)
            return
        self._connected.joined(pid)
        asyncio.get_running_loop().add_reader(process, self._leave, name, pid)

    def _leave(self, name: str, pid: int) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            asyncio.get_running_loop().remove_reader(process)
            os.close(process)
            self._connected.left(pid)

    def find(self, address: str) -> Peer:
        """Look a call's peer up, as gRPC names it. Raises AccessDeniedError for who did not come through the relay."""
        peer = self._peers.get(address.removeprefix("unix-abstract:"))
        if peer is None:
            raise AccessDeniedError("this connection is nobody's")
        return peer


class Relay:
    """Runs on the API's event loop."""

    def __init__(self, peers: PeerTable, gate: Gate, max_connections: int, patience: Patience = Patience()) -> None:
        self._peers = peers
        self._patience = patience
        self._gate = gate
        self._max_connections = max_connections
        self._open: Counter[str] = Counter()
        self._count = 0
        self._inner = -1
        self._listening: list[ListeningSocket] = []
        self._resting: dict[ListeningSocket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[socket.socket, None] = {}
        self._halves: set[_Half] = set()
        # one for all: what is read goes on, or is copied, before the next is read
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._records = TokenBucket(_RECORDS_PER_SECOND)

    def start(self, listening: Sequence[ListeningSocket], inner_path: str) -> None:
        """inner_path: where the gRPC server listens; it need not last beyond this call."""
        self._inner = os.open(inner_path, os.O_PATH | os.O_CLOEXEC)
        self._listening = list(listening)
        for each in self._listening:
            self._listen(each)

    def _listen(self, listening: ListeningSocket) -> None:
        self._resting.pop(listening, None)
        asyncio.get_running_loop().add_reader(listening.socket, self._accept, listening)

    def refuse_more(self) -> None:
        """Accept no more; what is connected goes on."""
        for each in self._listening:
            asyncio.get_running_loop().remove_reader(each.socket)
        for timer in self._resting.values():
            timer.cancel()
        self._listening.clear()
        self._resting.clear()

    @property
    def connections(self) -> int:
        """Open now; this and `clients` may be read in any thread."""
        return self._count

    @property
    def clients(self) -> int:
        """Different ones that are connected now."""
        return len(self._open)

    async def stop(self, *, is_flushing: bool = False) -> None:
        """Close everything; first, if flushing, let clients have what the gRPC server said before it hung up."""
        self.refuse_more()
        for connection in list(self._handshakes):
            hang_up(connection)
        if is_flushing and self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_SECONDS)
        for half in list(self._halves):
            half.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_SECONDS)
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    def _accept(self, listening: ListeningSocket) -> None:
        # a few at a time, so that a flood leaves room for what else the loop has to do
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(listening, error)
                return
            if connection.fileno() >= _most_descriptors():
                connection.close()
                self._note(listening, "the daemon has nearly as many descriptors as it may have")
                continue
            task = asyncio.get_running_loop().create_task(self._serve(connection, address, listening))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _rest(self, listening: ListeningSocket, error: OSError) -> None:
        """Nothing can be accepted, descriptors or memory being short: who waits is let in when there is some again."""
        self._note(listening, f"{error.strerror}; trying again")
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.socket)
        self._resting[listening] = loop.call_later(_REST_SECONDS, self._listen, listening)

    async def _serve(self, connection: socket.socket, address: Any, listening: ListeningSocket) -> None:
        """A connection's whole life. address: whence it comes, as accept() tells."""
        try:
            opening = Opening()
            outside = await self._greet(connection, listening, opening)
            try:
                peer = _peer(connection, outside.transport, listening)
                try:
                    admitted = self._admitted(peer)
                except AccessDeniedError as error:
                    self._gate.note_refusal("connection", "connect", peer, error)
                    return
                with admitted:
                    await self._pass_on(outside, opening, peer)
            finally:
                outside.abort()
                await outside.lost
        except OSError as error:
            whence = f" from {address[0]}" if listening.listener.path is None else ""
            self._note(listening, f"{str(error) or type(error).__name__}{whence}")

    async def _greet(self, connection: socket.socket, listening: ListeningSocket, opening: Opening) -> _Half:
        """Raises OSError where TLS does not come about."""
        connection.setblocking(False)
        outside = _Half(self._buffer, self._halves, opening=opening)
        if listening.tls is not None:
            if len(self._handshakes) >= _MOST_HANDSHAKES:
                # an honest one takes milliseconds
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                hang_up(oldest)
            self._handshakes[connection] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: outside,
                connection,
                ssl=listening.tls,
                ssl_handshake_timeout=self._patience.handshake_seconds if listening.tls else None,
            )
        finally:
            self._handshakes.pop(connection, None)
        return outside

    def _admitted(self, peer: Peer) -> AbstractContextManager[None]:
        """Within it the connection counts. Raises AccessDeniedError where there are too many, or no role is for it."""
        own_most = self._gate.policy.rights(peer).quotas.max_connections
        if own_most is not None and self._open[peer.client] >= own_most:
            raise AccessDeniedError(f"{peer.client} has {own_most} connections, as many as its role allows")
        # many users together cannot shut those out who have no bound of their own
        most = self._max_connections - (self._max_connections // 8 if own_most is not None else 0)
        if self._count >= most:
            raise AccessDeniedError(f"there are {self._count} connections, as many as this server allows")
        return self._counted(peer)

    @contextmanager
    def _counted(self, peer: Peer) -> Iterator[None]:
        self._count += 1
        self._open[peer.client] += 1
        try:
            yield
        finally:
            self._count -= 1
            self._open[peer.client] -= 1
            if not self._open[peer.client]:
                del self._open[peer.client]

    async def _pass_on(self, outside: _Half, opening: Opening, peer: Peer) -> None:
        """Return when both ends are closed. Raises OSError where the gRPC server does not take it."""
        inside = await self._connect(outside, peer)
        outside.connect_to(inside)
        ends = outside.lost, inside.lost
        with self._hurrying(outside, opening, peer):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # the other one gets what is still to be written, for as long as is reasonable
        outside.close()
        inside.close()
        await asyncio.wait(ends, timeout=_FLUSH_SECONDS)
        outside.abort()
        inside.abort()
        await asyncio.wait(ends)

    @contextmanager
    def _hurrying(self, outside: _Half, opening: Opening, peer: Peer) -> Iterator[None]:
        """Within it who says nothing, or a byte now and then, is disconnected."""

        def give_up(what: str, seconds: float) -> None:
            if not outside.lost.done():
                late = AccessDeniedError(f"{what} did not come within {seconds:g} s")
                self._gate.note_refusal("connection", "connect", peer, late)
                outside.abort()

        def check(what: str, seconds: float, is_there: Callable[[], bool]) -> None:
            if not is_there():
                give_up(what, seconds)

        def check_requests(unfinished: frozenset[int]) -> None:
            if unfinished & opening.unfinished:
                give_up("the end of a request", patience.request_seconds)
                return
            timers[-1] = loop.call_later(patience.request_seconds, check_requests, frozenset(opening.unfinished))

        loop, patience = asyncio.get_running_loop(), self._patience
        wanted = (
            ("HTTP/2's preface and settings", patience.greeting_seconds, lambda: opening.is_greeting_over),
            ("a first request", patience.request_seconds, lambda: opening.is_over),
        )
        timers = [loop.call_later(seconds, check, what, seconds, is_there) for what, seconds, is_there in wanted]
        timers.append(loop.call_later(patience.request_seconds, check_requests, frozenset[int]()))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    async def _connect(self, outside: _Half, peer: Peer) -> _Half:
        name = self._peers.add(peer)
        # which it is before the name is free to be taken by others
        inside = _Half(self._buffer, self._halves, partial(self._peers.remove, name))
        # it may speak before this knows that it is connected
        inside.other = outside
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.bind(f"\0{name}")
            connection.connect(f"/proc/self/fd/{self._inner}")
            await asyncio.get_running_loop().create_connection(lambda: inside, sock=connection)
        except BaseException:
            self._peers.remove(name)
            connection.close()
            raise
        return inside

    def _note(self, listening: ListeningSocket, reason: str) -> None:
        """Of somebody who is not known yet."""
        self._gate.refusals["connection"] += 1
        # who is refused may try again at once, as often as he likes
        if self._records.take(1):
            _log.warning("connection refused on %s: %s", listening.listener.address, reason)


class _Half(asyncio.BufferedProtocol):
    """One end of a connection: what comes in goes out at the other end, no faster than that takes it.

    lost: done when it is closed. all_halves: where it is while it is open. opening: is shown what comes in.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        buffer: memoryview,
        all_halves: set[_Half],
        at_end: Callable[[], None] = lambda: None,
        opening: Opening | None = None,
    ) -> None:
        self.other: _Half | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = buffer
        self._all = all_halves
        self._at_end = at_end
        self._opening = opening
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._all.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._all.discard(self)
        self._at_end()
        self.lost.set_result(None)

    def get_buffer(self, size: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        # from Python 3.12 on, asyncio keeps what it is given until that is written
        data = bytes(self._buffer[:count])
        if self._opening is not None:
            self._opening.feed(data)
        if self.other is not None:
            self.other.write(data)
        else:
            # pausing before there is anything, in connection_made, would have no effect
            self._early += data
            self.transport.pause_reading()

    def connect_to(self, other: _Half) -> None:
        """Have what comes in go there, what came already first."""
        self.other = other
        self.transport.resume_reading()
        # after resuming, since it may have to be paused for this already
        other.write(self._early)
        self._early = b""

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """When what was written is out."""
        # asyncio's TLS does not bear it twice, nor to be aborted after that
        if not self.transport.is_closing():
            self.transport.close()

    def abort(self) -> None:
        if not self.lost.done():
            self.transport.abort()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()


def _most_descriptors() -> float:
    """Beyond that connections are refused, since the rest of the daemon needs some too."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if most == resource.RLIM_INFINITY else most * 3 / 4


def _peer(connection: socket.socket, transport: asyncio.Transport, listening: ListeningSocket) -> Peer:
    """Raises OSError where the connection is gone."""
    listener = listening.listener
    if connection.family == socket.AF_UNIX:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(raw)
        groups = frozenset({gid, *_supplementary_groups(connection)})
        return Peer(listener.address, uid, groups, pid, (), listener.role)
    keep_alive(connection)
    names = _names(transport.get_extra_info("peercert") or {})
    return Peer(listener.address, names=names, listener_role=listener.role)


def _supplementary_groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return ()
    return struct.unpack(f"{len(groups) // 4}I", groups)


def _names(certificate: dict[str, Any]) -> tuple[str, ...]:
    """Of ssl.SSLSocket.getpeercert: the common name, then the alternative ones."""
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return (*subject, *(value for _, value in certificate.get("subjectAltName", ())))
