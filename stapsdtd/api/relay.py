"""Accepts clients' connections for the gRPC server, which can neither inherit a socket nor identify a unix peer.

    client ──► listener ──► relay: authenticate, admit ──► a connection from a unique address ──► gRPC server
                                     └── PeerTable: address ──► Peer ◄── context.peer() of each call

The path of the gRPC server's socket is removed once the relay has opened it, so that nobody else can connect.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from stapsdtd.api.access import Gate
from stapsdtd.api.connections import HeldConnections, OpenConnections
from stapsdtd.api.frame_budget import FrameBudget
from stapsdtd.api.frames import FrameReader
from stapsdtd.api.half import Half
from stapsdtd.api.http2 import Http2Error
from stapsdtd.api.listeners import ListeningSocket, hang_up
from stapsdtd.api.peers import PeerTable, identify
from stapsdtd.api.rights import Peer
from stapsdtd.api.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts, enforced
from stapsdtd.errors import AccessDeniedError
from stapsdtd.kernel.host_calls import ACCEPT
from stapsdtd.sessions.token_bucket import TokenBuckets

_log = logging.getLogger(__name__)

_MAX_HANDSHAKES = 64
"""At a time: no quota applies before a client is identified, and asyncio takes 256 KiB for each handshake."""
_FLUSH_SECONDS = 5.0
_ACCEPT_PAUSE_SECONDS = 0.2
_ACCEPTS_PER_WAKEUP = 16

_BUFFER_BYTES = 120_000
"""Below malloc's threshold for mapping each block anew, which costs more than copying it."""


class Relay:
    """Accepts connections and copies data to and from the gRPC server. Runs on the API's event loop."""

    def __init__(
        self,
        peers: PeerTable,
        gate: Gate,
        max_connections: int,
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._timeouts = timeouts
        self._gate = gate
        self._clock = clock
        self._connections = OpenConnections(gate, max_connections, clock)
        self._frames = TokenBuckets(clock)
        self._held = HeldConnections()
        self._grpc_socket = -1
        self._listening: list[ListeningSocket] = []
        self._paused: dict[ListeningSocket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[socket.socket, None] = {}
        self._halves: set[Half] = set()
        # shared by all connections: what was read is written or copied before the next read
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

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
        return self._connections.count

    @property
    def clients(self) -> int:
        """The number of distinct clients that are connected."""
        return self._connections.clients

    @property
    def client_names(self) -> list[str]:
        return self._connections.client_names

    async def stop(self, *, is_flushing: bool = False) -> None:
        """Close everything. If is_flushing, first send clients what the gRPC server wrote before it closed."""
        self.stop_accepting()
        self._held.close_all()
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
            if connection.family == socket.AF_UNIX and not self._may_connect(connection, listening):
                continue
            source = f" from {address[0]}" if listening.listener.path is None else ""
            task = asyncio.get_running_loop().create_task(self._serve(connection, listening, source))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _may_connect(self, connection: socket.socket, listening: ListeningSocket) -> bool:
        """Report whether a local client may connect once more, before it costs a task. Otherwise dispose of it."""
        peer = identify(connection, None, listening)
        try:
            self._connections.take_attempt(peer)
        except AccessDeniedError as error:
            if self._held.hold(connection, peer.client):
                self._gate.record_refusal("connection", "connect", peer, error)
            else:
                # a line would cost more than all the rest
                self._gate.refusals["connection"] += 1
            return False
        return True

    def _pause(self, listening: ListeningSocket, error: OSError) -> None:
        """Stop accepting for a moment, since descriptors or memory ran out. Clients wait in the socket's backlog."""
        self._log_failure(listening, f"{ACCEPT.of(error, 'a connection')}; retrying")
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.socket)
        self._paused[listening] = loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen, listening)

    async def _serve(self, connection: socket.socket, listening: ListeningSocket, source: str) -> None:
        """Serve a connection until it is closed. source: where it comes from, for the log."""
        try:
            outside = await self._handshake(connection, listening)
            try:
                peer = identify(connection, outside.transport, listening)
                try:
                    if listening.tls is not None:
                        self._connections.take_attempt(peer)
                    admitted = self._connections.admit(peer)
                    frames = FrameReader(self._frame_budget(peer))
                except AccessDeniedError as error:
                    self._gate.record_refusal("connection", "connect", peer, error)
                    return
                with admitted:
                    await self._relay(outside, frames, peer)
            finally:
                outside.abort()
                await outside.lost
        except OSError as error:
            self._log_failure(listening, f"{str(error) or type(error).__name__}{source}")

    async def _handshake(self, connection: socket.socket, listening: ListeningSocket) -> Half:
        """Complete the TLS handshake, if there is one. Raises OSError if it fails."""
        connection.setblocking(False)
        outside = Half(self._buffer, self._halves)
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

    async def _relay(self, outside: Half, frames: FrameReader, peer: Peer) -> None:
        """Relay data until both ends are closed. Raises OSError if the gRPC server does not accept the connection."""
        inside = await self._connect(outside, peer)
        ends = outside.lost, inside.lost

        def refuse(error: Http2Error) -> None:
            self._gate.record_refusal("frames", "frames", peer, error)
            self._connections.take_disconnected(peer)
            outside.write(outside.sent.goaway(error, frames.last_stream))
            inside.abort()

        def time_out(reason: str) -> None:
            if not outside.lost.done():
                self._gate.record_refusal("connection", "connect", peer, AccessDeniedError(reason, "connect"))
                outside.abort()

        def charge(seconds: float) -> float:
            self._gate.shares.charge(peer.client, "frames", seconds)
            return self._gate.shares.seconds_to_wait(peer.client)

        outside.connect_to(inside, frames, refuse, charge)
        with enforced(self._timeouts, frames, time_out):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # the other end gets a limited time to take what is still buffered
        outside.close()
        inside.close()
        await asyncio.wait(ends, timeout=_FLUSH_SECONDS)
        outside.abort()
        inside.abort()
        await asyncio.wait(ends)

    def _frame_budget(self, peer: Peer) -> FrameBudget:
        rights = self._gate.policy.rights(peer)
        requests = rights.quotas.max_requests_per_second
        return FrameBudget(peer.client, requests, self._frames, self._gate.shares, self._clock)

    async def _connect(self, outside: Half, peer: Peer) -> Half:
        address = self._peers.add(peer)
        # removed from the table when the connection is lost, before anyone else can bind the address
        inside = Half(self._buffer, self._halves, partial(self._peers.remove, address))
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
        _log.warning("connection refused on %s: %s", listening.listener.address, reason)


def _max_descriptors() -> float:
    """Return the descriptor number from which on connections are refused. The rest is for the daemon itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit * 3 / 4
