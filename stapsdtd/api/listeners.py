"""The sockets that clients connect to: made, or inherited from who started the daemon (sd_listen_fds(3))."""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import replace

from stapsdtd.config import DEFAULT_LISTEN, Listener, Tls
from stapsdtd.errors import StapsdtdError

_FIRST_INHERITED = 3
_BACKLOG = 1024
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds and tries: a TCP client that lost its power is gone after a minute."""
_USER_TIMEOUT_MS = 60_000


class CannotListenError(StapsdtdError):
    """The address is in use or cannot be made."""


class SocketLock:
    """Held for as long as a daemon serves a path: without it a second one would silently take the path away."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CannotListenError(
                f"{path}.lock: {error.strerror}; does its folder exist, and may you write there?"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise CannotListenError(
                f"{path}: another stapsdtd serves it; stop that one or choose another path"
            ) from error

    def release(self) -> None:
        """Leave the lock file: removing it would let two daemons hold locks on two files of one name."""
        os.close(self._descriptor)


class ListeningSocket:
    """One listener's socket, which accepts from now on. Raises CannotListenError."""

    def __init__(self, listener: Listener, inherited: socket.socket | None = None) -> None:
        self.listener = listener
        self.tls = None if listener.tls is None else _tls_context(listener.tls)
        self._lock = None if listener.path is None else SocketLock(listener.path)
        self._is_own = inherited is None
        try:
            self.socket = inherited or (
                _unix_socket(listener, listener.path) if listener.path else _tcp_socket(listener)
            )
        except BaseException:
            self._release()
            raise
        self.socket.setblocking(False)

    def renew_certificates(self) -> None:
        """Read the files again, for connections to come. Raises CannotListenError, and keeps what it had then."""
        if self.tls is not None and self.listener.tls is not None:
            _tls_context(self.listener.tls)
            _load(self.tls, self.listener.tls)

    def close(self) -> None:
        """The path goes too, unless whoever passed the socket on is to listen there again."""
        self.socket.close()
        if self._is_own and self.listener.path is not None:
            _unlink_socket(self.listener.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def open_listeners(listeners: Sequence[Listener]) -> list[ListeningSocket]:
    """Make what is configured, or take what was inherited for it. Raises CannotListenError.

    Inherited sockets take the default's place where nothing else is configured.
    """
    inherited = {_address(each): each for each in _inherited()}
    if inherited and [listener.address for listener in listeners] == [DEFAULT_LISTEN]:
        listeners = [replace(listeners[0], address=address) for address in inherited]
    unknown = inherited.keys() - {listener.address for listener in listeners}
    if unknown:
        raise CannotListenError(f"{min(unknown)} was passed on to the daemon, and its configuration does not name it")
    opened: list[ListeningSocket] = []
    try:
        for listener in listeners:
            opened.append(ListeningSocket(listener, inherited.get(listener.address)))  # noqa: PERF401 - closed below
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened


def _inherited() -> list[socket.socket]:
    """The sockets that are passed on to this very process; asked for once."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(count)):
        os.set_inheritable(descriptor, False)
        try:
            found.append(socket.socket(fileno=descriptor))
        except OSError as error:
            raise CannotListenError(f"descriptor {descriptor} was passed on to the daemon and is no socket") from error
        if found[-1].type != socket.SOCK_STREAM or not found[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise CannotListenError(f"descriptor {descriptor} was passed on to the daemon and does not listen")
    return found


def _address(listening: socket.socket) -> str:
    """As a configuration names it."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        if not isinstance(name, str):
            raise CannotListenError("a socket without a path was passed on to the daemon")
        return f"unix:{name}"
    host, port = name[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def _unix_socket(listener: Listener, path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # nobody may connect before it has its owner and mode
    before = os.umask(0o777)
    try:
        owner = -1 if listener.owner is None else pwd.getpwnam(listener.owner).pw_uid
        group = -1 if listener.group is None else grp.getgrnam(listener.group).gr_gid
        _unlink_socket(path)
        made.bind(path)
        os.chown(path, owner, group)
        os.chmod(path, listener.mode)
        made.listen(_BACKLOG)
    except (OSError, KeyError) as error:
        made.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotListenError(f"{path}: {reason}") from error
    finally:
        os.umask(before)
    return made


def _unlink_socket(path: str) -> None:
    """What a killed daemon left; a file that is no socket stays, and is in the way."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


def _tcp_socket(listener: Listener) -> socket.socket:
    host, port = listener.host_and_port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        raise CannotListenError(f"{listener.address}: {error.strerror or error}") from error
    return made


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out when a TCP client is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    _load(context, tls)
    return context


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.client_authority)
    except (OSError, ssl.SSLError) as error:
        files = f"{tls.certificate}, {tls.key} or {tls.client_authority}"
        raise CannotListenError(f"{files} cannot be used: {error}") from error
