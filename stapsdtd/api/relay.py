"""Accepts clients' connections for the gRPC server, which can neither inherit a socket nor identify a unix peer.

    client ──► listener ──► relay: authenticate, admit ──► a connection from a unique address ──► gRPC server
                                     └── PeerTable: address ──► Peer ◄── context.peer() of each call

The path of the gRPC server's socket is removed once the relay has opened it, so that nobody else can connect.
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

_MAX_HANDSHAKES = 64
"""At a time: no quota applies before a client is identified, and asyncio takes 256 KiB for each handshake."""
_FLUSH_SECONDS = 5.0
_ACCEPT_PAUSE_SECONDS = 0.2
_ACCEPTS_PER_WAKEUP = 16
_LOG_RECORDS_PER_SECOND = 20

_BUFFER_BYTES = 120_000
"""Below malloc's threshold for mapping each block anew, which costs more than copying it."""

_SO_PEERGROUPS = 59
"""include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it."""
_CREDENTIALS = struct.Struct("i2I")
_GROUPS_BYTES = 1024
"""The most that Python's getsockopt takes. The kernel returns nothing for members of more than 256 groups, which count
as members of none.
"""

_ADDRESS_PREFIX = "stapsdtd-client-"


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Limits in seconds, after which a client is disconnected.

    handshake_seconds: for the TLS handshake.
    greeting_seconds: for HTTP/2's preface and SETTINGS, after the handshake.
    request_seconds: for the headers of the first request, after the handshake. A request may take at least as long, and
    at most twice as long, from its first byte to its last.
    """

    handshake_seconds: float = 10.0
    greeting_seconds: float = 10.0
    request_seconds: float = 60.0


class PeerTable:
    """The peers of the connections to the gRPC server, by the address that each comes from. Runs on an event loop.

    connected: is notified of the peers' processes as they connect, and when they disconnect or end: after that another
    process may hold the connection, and yet another one reuse the pid.
    """

    def __init__(self, connected: ConnectedClients) -> None:
        self._peers: dict[str, Peer] = {}
        self._pidfds: dict[str, int] = {}
        self._connected = connected

    def add(self, peer: Peer) -> str:
        """Return a new address, which cannot be guessed."""
        address = _ADDRESS_PREFIX + secrets.token_hex(16)
        self._peers[address] = peer
        if peer.pid is not None:
            self._join(address, peer.pid)
        return address

    def remove(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None and peer.pid is not None:
            self._leave(address, peer.pid)

    def _join(self, address: str, pid: int) -> None:
        try:
            pidfd = self._pidfds[address] = os.pidfd_open(pid)
        except OSError as error:
            # it ended already, or is in another pid namespace and has no pid here
            _log.debug("pid %d: cannot recognize a client's own events: %s", pid, error)
            return
        self._connected.joined(pid)
        asyncio.get_running_loop().add_reader(pidfd, self._leave, address, pid)

    def _leave(self, address: str, pid: int) -> None:
        pidfd = self._pidfds.pop(address, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            self._connected.left(pid)

    def find(self, address: str) -> Peer:
        """Return the peer with an address as gRPC names it. Raises AccessDeniedError if it bypassed the relay."""
        peer = self._peers.get(address.removeprefix("unix-abstract:"))
        if peer is None:
            raise AccessDeniedError("unknown connection")
        return peer


class Relay:
    """Accepts connections and copies data to and from the gRPC server. Runs on the API's event loop."""

    def __init__(
        self, peers: PeerTable, gate: Gate, max_connections: int, timeouts: ClientTimeouts = ClientTimeouts()
    ) -> None:
        self._peers = peers
        self._timeouts = timeouts
        self._gate = gate
        self._max_connections = max_connections
        self._open: Counter[str] = Counter()
        self._count = 0
        self._grpc_socket = -1
        self._listening: list[ListeningSocket] = []
        self._paused: dict[ListeningSocket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[socket.socket, None] = {}
        self._halves: set[_Half] = set()
        # shared by all connections: what was read is written or copied before the next read
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._log_records = TokenBucket(_LOG_RECORDS_PER_SECOND)

    def start(self, listening: Sequence[ListeningSocket], grpc_path: str) -> None:
        """Start accepting. grpc_path: the gRPC server's socket, which may be removed when this returns."""
        self._grpc_socket = os.open(grpc_path, os.O_PATH | os.O_CLOEXEC)
        self._listening = list(listening)
        for listening_socket in self._listening:
            self._listen(listening_socket)

    def _listen(self, listening: ListeningSocket) -> None:
        self._paused.pop(listening, None)
        asyncio.get_running_loop().add_reader(listening.socket, self._accept, listening)

    def stop_accepting(self) -> None:
        """Accept no more connections; open ones continue."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening.socket)
        for timer in self._paused.values():
            timer.cancel()
        self._listening.clear()
        self._paused.clear()

    @property
    def connections(self) -> int:
        """The number of open connections. Any thread may read this and `clients`."""
        return self._count

    @property
    def clients(self) -> int:
        """The number of distinct clients that are connected."""
        return len(self._open)

    async def stop(self, *, is_flushing: bool = False) -> None:
        """Close everything. If is_flushing, first send clients what the gRPC server wrote before it closed."""
        self.stop_accepting()
        for connection in list(self._handshakes):
            hang_up(connection)
        if is_flushing and self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_SECONDS)
        for half in list(self._halves):
            half.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_SECONDS)
        if self._grpc_socket >= 0:
            os.close(self._grpc_socket)
            self._grpc_socket = -1

    def _accept(self, listening: ListeningSocket) -> None:
        # a few at a time, so that a flood of connections does not starve the event loop
        for _ in range(_ACCEPTS_PER_WAKEUP):
            try:
                connection, address = listening.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(listening, error)
                return
            if connection.fileno() >= _max_descriptors():
                connection.close()
                self._log_failure(listening, "the daemon is short of file descriptors; raise LimitNOFILE")
                continue
            task = asyncio.get_running_loop().create_task(self._serve(connection, address, listening))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self, listening: ListeningSocket, error: OSError) -> None:
        """Stop accepting for a moment, since descriptors or memory ran out. Clients wait in the socket's backlog."""
        self._log_failure(listening, f"{error.strerror}; retrying")
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.socket)
        self._paused[listening] = loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen, listening)

    async def _serve(self, connection: socket.socket, address: Any, listening: ListeningSocket) -> None:
        """Serve a connection until it is closed. address: the client's, as returned by accept()."""
        try:
            opening = Opening()
            outside = await self._handshake(connection, listening, opening)
            try:
                peer = _peer(connection, outside.transport, listening)
                try:
                    admitted = self._admitted(peer)
                except AccessDeniedError as error:
                    self._gate.record_refusal("connection", "connect", peer, error)
                    return
                with admitted:
                    await self._relay(outside, opening, peer)
            finally:
                outside.abort()
                await outside.lost
        except OSError as error:
            source = f" from {address[0]}" if listening.listener.path is None else ""
            self._log_failure(listening, f"{str(error) or type(error).__name__}{source}")

    async def _handshake(self, connection: socket.socket, listening: ListeningSocket, opening: Opening) -> _Half:
        """Complete the TLS handshake, if there is one. Raises OSError if it fails."""
        connection.setblocking(False)
        outside = _Half(self._buffer, self._halves, opening=opening)
        if listening.tls is not None:
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                # a regular handshake takes milliseconds
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                hang_up(oldest)
            self._handshakes[connection] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: outside,
                connection,
                ssl=listening.tls,
                ssl_handshake_timeout=self._timeouts.handshake_seconds if listening.tls else None,
            )
        finally:
            self._handshakes.pop(connection, None)
        return outside

    def _admitted(self, peer: Peer) -> AbstractContextManager[None]:
        """Return a context in which the connection is counted.

        Raises AccessDeniedError if there are too many connections, or no role applies to the peer.
        """
        quota = self._gate.policy.rights(peer).quotas.max_connections
        if quota is not None and self._open[peer.client] >= quota:
            raise AccessDeniedError(f"{peer.client} has {quota} connections, as many as its role allows")
        # clients with a quota cannot together lock out those without one
        limit = self._max_connections - (self._max_connections // 8 if quota is not None else 0)
        if self._count >= limit:
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

    async def _relay(self, outside: _Half, opening: Opening, peer: Peer) -> None:
        """Relay data until both ends are closed. Raises OSError if the gRPC server does not accept the connection."""
        inside = await self._connect(outside, peer)
        outside.connect_to(inside)
        ends = outside.lost, inside.lost
        with self._enforcing_timeouts(outside, opening, peer):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # the other end gets a limited time to take what is still buffered
        outside.close()
        inside.close()
        await asyncio.wait(ends, timeout=_FLUSH_SECONDS)
        outside.abort()
        inside.abort()
        await asyncio.wait(ends)

    @contextmanager
    def _enforcing_timeouts(self, outside: _Half, opening: Opening, peer: Peer) -> Iterator[None]:
        """Disconnect, within the context, a client that sends nothing or only trickles."""

        def time_out(awaited: str, seconds: float) -> None:
            if not outside.lost.done():
                reason = AccessDeniedError(f"timed out after {seconds:g} s waiting for {awaited}")
                self._gate.record_refusal("connection", "connect", peer, reason)
                outside.abort()

        def check(awaited: str, seconds: float, has_arrived: Callable[[], bool]) -> None:
            if not has_arrived():
                time_out(awaited, seconds)

        def check_requests(unfinished: frozenset[int]) -> None:
            if unfinished & opening.unfinished:
                time_out("the end of a request", timeouts.request_seconds)
                return
            timers[-1] = loop.call_later(timeouts.request_seconds, check_requests, frozenset(opening.unfinished))

        loop, timeouts = asyncio.get_running_loop(), self._timeouts
        checks = (
            ("the HTTP/2 preface and settings", timeouts.greeting_seconds, lambda: opening.is_greeting_over),
            ("a first request", timeouts.request_seconds, lambda: opening.is_over),
        )
        timers = [
            loop.call_later(seconds, check, awaited, seconds, has_arrived) for awaited, seconds, has_arrived in checks
        ]
        timers.append(loop.call_later(timeouts.request_seconds, check_requests, frozenset[int]()))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    async def _connect(self, outside: _Half, peer: Peer) -> _Half:
        address = self._peers.add(peer)
        # removed from the table when the connection is lost, before anyone else can bind the address
        inside = _Half(self._buffer, self._halves, partial(self._peers.remove, address))
        # the server may send data before create_connection returns
        inside.other = outside
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.bind(f"\0{address}")
            connection.connect(f"/proc/self/fd/{self._grpc_socket}")
            await asyncio.get_running_loop().create_connection(lambda: inside, sock=connection)
        except BaseException:
            self._peers.remove(address)
            connection.close()
            raise
        return inside

    def _log_failure(self, listening: ListeningSocket, reason: str) -> None:
        """Count and log a connection that failed before its peer was identified."""
        self._gate.refusals["connection"] += 1
        # within a rate limit, since a client that is refused may retry at once
        if self._log_records.take(1):
            _log.warning("connection refused on %s: %s", listening.listener.address, reason)


class _Half(asyncio.BufferedProtocol):
    """One end of a relayed connection: writes what it reads to the other end, no faster than that end accepts it.

    lost: done when this end is closed.
    all_halves: contains this end while it is open.
    opening: is fed what is read.
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
        self._all_halves = all_halves
        self._at_end = at_end
        self._opening = opening
        self._early_data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._all_halves.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._all_halves.discard(self)
        self._at_end()
        self.lost.set_result(None)

    def get_buffer(self, size: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        # copied, since Python 3.12 and later keep a reference to it until it is written
        data = bytes(self._buffer[:count])
        if self._opening is not None:
            self._opening.feed(data)
        if self.other is not None:
            self.other.write(data)
        else:
            # pausing earlier, in connection_made, would have no effect
            self._early_data += data
            self.transport.pause_reading()

    def connect_to(self, other: _Half) -> None:
        """Write what is read to other, beginning with what was read already."""
        self.other = other
        self.transport.resume_reading()
        # after resuming, since this write may have to pause reading again
        other.write(self._early_data)
        self._early_data = b""

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close once everything written was sent."""
        # asyncio's TLS transport cannot be closed twice, nor aborted after that
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


def _max_descriptors() -> float:
    """Return the descriptor number from which on connections are refused. The rest is for the daemon itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit * 3 / 4


def _peer(connection: socket.socket, transport: asyncio.Transport, listening: ListeningSocket) -> Peer:
    """Identify the peer. Raises OSError if the connection is closed."""
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
    """Return the common name, then the alternative names, from ssl.SSLSocket.getpeercert()."""
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return (*subject, *(value for _, value in certificate.get("subjectAltName", ())))
