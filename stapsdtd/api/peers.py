"""Identifies clients by their connections, and finds them again by the address of a gRPC call."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import struct
from typing import TypedDict

from stapsdtd.api.listeners import ListeningSocket, keep_alive
from stapsdtd.api.rights import Peer
from stapsdtd.errors import AccessDeniedError
from stapsdtd.sessions.own_clients import ConnectedClients

_log = logging.getLogger(__name__)

_SO_PEERGROUPS = 59
"""include/uapi/asm-generic/socket.h, since Linux 4.13; Python has no name for it."""
_CREDENTIALS = struct.Struct("i2I")
_GROUPS_BYTES = 1024
"""The most that Python's getsockopt takes. The kernel returns nothing for members of more than 256 groups, which count
as members of none.
"""

ADDRESS_PREFIX = "stapsdtd-client-"


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
        address = ADDRESS_PREFIX + secrets.token_hex(16)
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
            raise AccessDeniedError("unknown connection", "connect")
        return peer


def identify(connection: socket.socket, transport: asyncio.Transport | None, listening: ListeningSocket) -> Peer:
    """Identify the peer. transport: with TLS, after the handshake. Raises OSError if the connection is closed."""
    listener = listening.listener
    if connection.family == socket.AF_UNIX:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(raw)
        groups = frozenset({gid, *_supplementary_groups(connection)})
        return Peer(listener.address, uid, groups, pid, (), listener.role)
    keep_alive(connection)
    certificate: _Certificate | None = transport.get_extra_info("peercert") if transport is not None else None
    return Peer(listener.address, names=_names(certificate or {}), listener_role=listener.role)


def _supplementary_groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return ()
    return struct.unpack(f"{len(groups) // 4}I", groups)


class _Certificate(TypedDict, total=False):
    """As ssl.SSLSocket.getpeercert() returns it."""

    subject: tuple[tuple[tuple[str, str], ...], ...]
    subjectAltName: tuple[tuple[str, str], ...]


def _names(certificate: _Certificate) -> tuple[str, ...]:
    """Return the common name, then the alternative names."""
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return (*subject, *(value for _, value in certificate.get("subjectAltName", ())))
