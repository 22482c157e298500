"""Where clients connect, in front of the gRPC server, which could neither inherit a socket nor tell who is there.

    client ──► listener ──► relay: who is it? may it? ──► a connection with a name of its own ──► gRPC server
                                     └── PeerTable: name ──► Peer ◄── context.peer() of each call

The gRPC server listens on a socket whose path is gone once the relay holds it, so that nobody else gets there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from stapsdtd.api.access import Gate, Peer, Rights
from stapsdtd.api.listeners import ListeningSocket, keep_alive
from stapsdtd.errors import AccessDeniedError

_log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 10.0
_FLUSH_SECONDS = 5.0

_SO_PEERGROUPS = 59
"""include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it."""
_CREDENTIALS = struct.Struct("i2I")
_GROUPS_BYTES = 1024
"""As many as Python's getsockopt takes. Who is in more than 256 groups, which the kernel then does not tell, is in
none.
"""

_NAME = "stapsdtd-client-"


class PeerTable:
    """Who is behind which connection to the gRPC server."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def add(self, peer: Peer) -> str:
        """Answer a name that nobody can guess."""
        name = _NAME + secrets.token_hex(16)
        self._peers[name] = peer
        return name

    def remove(self, name: str) -> None:
        self._peers.pop(name, None)

    def find(self, address: str) -> Peer:
        """Look a call's peer up, as gRPC names it. Raises AccessDeniedError for who did not come through the relay."""
        peer = self._peers.get(address.removeprefix("unix-abstract:"))
        if peer is None:
            raise AccessDeniedError("this connection is nobody's")
        return peer


class Relay:
    """Runs on the API's event loop."""

    def __init__(self, peers: PeerTable, gate: Gate, max_connections: int) -> None:
        self._peers = peers
        self._gate = gate
        self._max_connections = max_connections
        self._open: Counter[str] = Counter()
        self._links: set[_Link] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self, listening: Sequence[ListeningSocket], inner_path: str) -> None:
        """inner_path: where the gRPC server listens; it need not last beyond this call."""
        self._inner = os.open(inner_path, os.O_PATH | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        for each in listening:
            make = self._maker_of_links(each)
            if each.socket.family == socket.AF_UNIX:
                server = await loop.create_unix_server(make, sock=each.socket)
            else:
                server = await loop.create_server(
                    make, sock=each.socket, ssl=each.tls, ssl_handshake_timeout=_HANDSHAKE_SECONDS if each.tls else None
                )
            self._servers.append(server)

    def refuse_more(self) -> None:
        """Accept no more; what is connected goes on."""
        for server in self._servers:
            server.close()

    def stop(self) -> None:
        self.refuse_more()
        for link in list(self._links):
            link.abort()
        os.close(self._inner)

    def _maker_of_links(self, listening: ListeningSocket) -> Callable[[], _Outside]:
        return lambda: _Outside(self, listening)

    def connected(self, outside: _Outside, transport: asyncio.Transport, listening: ListeningSocket) -> None:
        """Let somebody in, or close the connection."""
        try:
            peer = _peer(transport, listening)
            rights = self._gate.policy.rights(peer)
            self._admit(peer, rights)
        except (AccessDeniedError, OSError) as error:
            _log.warning("connection refused on %s: %s", listening.listener.address, error)
            transport.abort()
            return
        link = _Link(self, peer, outside)
        self._links.add(link)
        self._open[peer.client] += 1
        link.start(self._inner)

    def _admit(self, peer: Peer, rights: Rights) -> None:
        most = rights.quotas.max_connections
        if most is not None and self._open[peer.client] >= most:
            raise AccessDeniedError(f"{peer.client} has {most} connections, as many as its role allows")
        if len(self._links) >= self._max_connections:
            raise AccessDeniedError(f"there are {len(self._links)} connections, as many as this server allows")

    def disconnected(self, link: _Link) -> None:
        if link in self._links:
            self._links.discard(link)
            self._open[link.peer.client] -= 1
            if not self._open[link.peer.client]:
                del self._open[link.peer.client]

    @property
    def peers(self) -> PeerTable:
        return self._peers


class _Half(asyncio.Protocol):
    """One end of a link: what comes in goes out at the other end, no faster than that takes it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.link: _Link | None = None
        self.other: _Half | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
        else:
            self._early.append(data)
            self.transport.pause_reading()

    def connect_to(self, other: _Half) -> None:
        """Have what comes in go there, what came already first."""
        self.other = other
        for data in self._early:
            other.transport.write(data)
        if self._early:
            self._early.clear()
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.link is not None:
            self.link.ended()


class _Outside(_Half):
    """The client's end."""

    def __init__(self, relay: Relay, listening: ListeningSocket) -> None:
        super().__init__()
        self._relay = relay
        self._listening = listening

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relay.connected(self, self.transport, self._listening)


class _Link:
    """A client's connection and the one that goes on to the gRPC server."""

    def __init__(self, relay: Relay, peer: Peer, outside: _Outside) -> None:
        self.peer = peer
        self._relay = relay
        self._halves: list[_Half] = [outside]
        outside.link = self

    def start(self, inner: int) -> None:
        self._task = asyncio.get_running_loop().create_task(self._connect(inner))

    async def _connect(self, inner: int) -> None:
        loop = asyncio.get_running_loop()
        self._name = self._relay.peers.add(self.peer)
        outside, inside = self._halves[0], _Half()
        inside.link = self
        # it may speak before this knows that it is connected
        inside.other = outside
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                connection.bind(f"\0{self._name}")
                await loop.sock_connect(connection, f"/proc/self/fd/{inner}")
                await loop.create_connection(lambda: inside, sock=connection)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            _log.warning("a connection cannot be passed on: %s", error)
            self.abort()
            return
        self._halves.append(inside)
        if outside.transport.is_closing():
            inside.transport.abort()
        else:
            outside.connect_to(inside)

    def ended(self) -> None:
        """One end is closed: let the other have what is still to be written, for as long as is reasonable."""
        self._forget()
        loop = asyncio.get_running_loop()
        for half in self._halves:
            if not half.transport.is_closing():
                half.transport.close()
                loop.call_later(_FLUSH_SECONDS, half.transport.abort)

    def abort(self) -> None:
        self._forget()
        for half in self._halves:
            half.transport.abort()

    def _forget(self) -> None:
        # before the name is free to be taken by others
        with contextlib.suppress(AttributeError):
            self._relay.peers.remove(self._name)
        self._relay.disconnected(self)


def _peer(transport: asyncio.Transport, listening: ListeningSocket) -> Peer:
    """Raises OSError where the connection is gone."""
    listener, connection = listening.listener, cast("socket.socket", transport.get_extra_info("socket"))
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
