"""A server's address as people write it, and as gRPC does; and who one is there."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from stapsdtd.client.errors import InvalidTargetError

if TYPE_CHECKING:
    from collections.abc import Callable

_TCP = re.compile(r"tcp:(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5})")
_LOOPBACK = re.compile(r"127\.[0-9.]+|\[::1\]|localhost")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: a client's certificate and its key, and the authority that signed the server's certificate."""

    certificate: str
    key: str
    authority: str


def resolved(target: str, tls: Tls | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """The target for gRPC, and the credentials, None where it is to go without. Raises InvalidTargetError."""
    match = _TCP.fullmatch(target)
    if match is None:
        if target.startswith("tcp:"):
            raise InvalidTargetError(f"{target!r} is not of the form tcp:HOST:PORT")
        if tls is not None:
            raise InvalidTargetError(f"{target} takes no certificate; that is for tcp:HOST:PORT")
        return target, None
    if tls is None and not _LOOPBACK.fullmatch(match["host"]):
        raise InvalidTargetError(f"{target} takes a certificate, a key and an authority: it is no loopback address")
    return f"dns:///{match['host']}:{match['port']}", None if tls is None else _credentials(tls)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    # gRPC would only say, at the first call, that it "failed to create security handshaker"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _check(f"{tls.certificate} and {tls.key}", lambda: context.load_cert_chain(tls.certificate, tls.key, _no_password))
    _check(tls.authority, lambda: context.load_verify_locations(tls.authority))
    return grpc.ssl_channel_credentials(_content(tls.authority), _content(tls.key), _content(tls.certificate))


def _no_password() -> str:
    # OpenSSL would ask at the terminal, and gRPC cannot be told
    raise ValueError("the key has a password")


def _check(files: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidTargetError(f"{files} cannot be used: {reason}") from error


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
