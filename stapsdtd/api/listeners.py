"""The sockets that clients connect to, bound here or inherited from the service manager (sd_listen_fds(3))."""

from __future__ import annotations

import errno
import fcntl
import grp
import ipaddress
import os
import pwd
import socket
import ssl
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from stapsdtd.addresses import DEFAULT_ADDRESS
from stapsdtd.config import Listener, Tls
from stapsdtd.errors import StapsdtdError
from stapsdtd.kernel.host_calls import LISTEN

_FIRST_INHERITED = 3
_BACKLOG = 1024
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""In seconds, seconds and probes: a TCP peer that vanished is detected after a minute."""
_USER_TIMEOUT_MS = 60_000


class CannotListenError(StapsdtdError):
    """The address is in use or cannot be bound."""


class SocketLock:
    """Held while a daemon serves a path. Without it, a second daemon would silently take the path over."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CannotListenError(str(LISTEN.of(error, f"{path}.lock"))) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise CannotListenError(f"{path}: another stapsdtd serves it; stop it or choose another path") from error

    def release(self) -> None:
        """Release the lock, but keep its file: if it were removed, two daemons could lock two files of one name."""
        os.close(self._descriptor)


class ListeningSocket:
    """The listening socket of one listener. Raises CannotListenError."""

    def __init__(self, listener: Listener, inherited: socket.socket | None = None) -> None:
        self.listener = listener
        self.tls = self.new_context()
        self._lock = None if listener.path is None else SocketLock(listener.path)
        self._is_own = inherited is None
        self._is_closed = False
        try:
            self.socket = inherited or (
                _unix_socket(listener, listener.path) if listener.path else _tcp_socket(listener)
            )
        except BaseException:
            self._release()
            raise
        self.socket.setblocking(False)

    def new_context(self) -> ssl.SSLContext | None:
        """Read the certificate files again; None without TLS. Raises CannotListenError."""
        return None if self.listener.tls is None else _tls_context(self.listener.tls)

    def close(self) -> None:
        """Close the socket and remove its path, unless it was inherited. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self.socket.close()
        if self._is_own and self.listener.path is not None and _is_socket(self.listener.path):
            os.unlink(self.listener.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def open_listeners(listeners: Sequence[Listener]) -> list[ListeningSocket]:
    """Open the configured listeners, using inherited sockets for those that have one. Raises CannotListenError.

    Inherited unix sockets replace the default listener if no other is configured.
    """
    with ExitStack() as on_failure:
        inherited = _inherited(on_failure)
        if [listener.address for listener in listeners] == [DEFAULT_ADDRESS]:
            paths = [address for address in inherited if address.startswith("unix:")]
            listeners = [replace(listeners[0], address=address) for address in paths] or listeners
        unknown = inherited.keys() - {listener.address for listener in listeners}
        if unknown:
            raise CannotListenError(
                f"{min(unknown)} was passed to the daemon but is not configured; add it to 'listen'"
            )
        opened = []
        for listener in listeners:
            opened.append(ListeningSocket(listener, inherited.get(listener.address)))
            on_failure.callback(opened[-1].close)
        on_failure.pop_all()
    return opened


def _inherited(on_failure: ExitStack) -> dict[str, socket.socket]:
    """Take the sockets passed to this process from its environment, by address. Raises CannotListenError."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    inherited: dict[str, socket.socket] = {}
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(count)):
        listening = on_failure.enter_context(_listening_socket(descriptor))
        inherited[_address(listening)] = listening
    return inherited


def _listening_socket(descriptor: int) -> socket.socket:
    """Raises CannotListenError."""
    try:
        os.set_inheritable(descriptor, False)
        listening = socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListenError(f"descriptor {descriptor} was passed to the daemon but is not a socket") from error
    if (
        listening.family not in {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
        or listening.type != socket.SOCK_STREAM
        or not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        listening.close()
        raise CannotListenError(
            f"descriptor {descriptor} was passed to the daemon but is not a listening stream socket"
        )
    return listening


def _address(listening: socket.socket) -> str:
    """Return a socket's address as a configuration names it."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}" if isinstance(name, str) else f"unix:@{name[1:].decode(errors='backslashreplace')}"
    host, port = name[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def _unix_socket(listener: Listener, path: str) -> socket.socket:
    with ExitStack() as on_failure:
        listening = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        try:
            owner = -1 if listener.owner is None else pwd.getpwnam(listener.owner).pw_uid
            group = -1 if listener.group is None else grp.getgrnam(listener.group).gr_gid
            if _is_socket(path):
                _check_abandoned(path)
                os.unlink(path)
            listening.bind(path)
            os.chown(path, owner, group, follow_symlinks=False)
            os.chmod(path, listener.mode)
            # only now that owner and mode are set: nobody can connect before
            listening.listen(_BACKLOG)
        except OSError as error:
            raise CannotListenError(str(LISTEN.of(error, path))) from error
        except KeyError as error:
            raise CannotListenError(f"{path}: {error}") from error
        on_failure.pop_all()
    return listening


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _check_abandoned(path: str) -> None:
    """Raises CannotListenError if somebody listens on the path, such as the service manager on the daemon's behalf."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        if caller.connect_ex(path) in {0, errno.EAGAIN}:
            raise CannotListenError(
                f"{path}: another process listens there; choose another path or run 'systemctl stop stapsdtd.socket'"
            )


def _tcp_socket(listener: Listener) -> socket.socket:
    host, port = listener.host_and_port
    with ExitStack() as on_failure:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if listener.plain:
                _check_loopback(listener, str(address[0]))
            listening = on_failure.enter_context(socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise CannotListenError(f"{listener.address}: {_reason(error)}") from error
        on_failure.pop_all()
    return listening


def _check_loopback(listener: Listener, host: str) -> None:
    """Raises CannotListenError if the configured name resolved to something else."""
    if not ipaddress.ip_address(host).is_loopback:
        raise CannotListenError(f"{listener.address} is {host} on this host, which is not a loopback address")


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect TCP peers that vanished without closing the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def hang_up(connection: socket.socket) -> None:
    """Shut the connection down, so that whoever reads from it sees its end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _tls_context(tls: Tls) -> ssl.SSLContext:
    """Create a new context, since an existing one never drops an authority that it trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # no session resumption: a client that reconnects must present its certificate again, which may have expired
    context.num_tickets = 0
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(tls.certificate, tls.key, _refuse_password)
    except (OSError, ValueError) as error:
        raise CannotListenError(f"{tls.certificate} and {tls.key} cannot be used: {_reason(error)}") from error
    try:
        context.load_verify_locations(tls.client_authority)
    except (OSError, ValueError) as error:
        raise CannotListenError(f"{tls.client_authority} cannot be used: {_reason(error)}") from error
    return context


def _refuse_password() -> str:
    # OpenSSL would prompt on the terminal
    raise ValueError("the key has a passphrase; remove it, since the daemon cannot ask for it")


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
