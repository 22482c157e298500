"""Parses a server's address for gRPC, and loads the client's TLS credentials."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from stapsdtd.addresses import LOOPBACK_HOSTS, WrongAddressError, matched
from stapsdtd.client.errors import InvalidTargetError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the client's certificate and key, and the certificate of the authority that signed the server's."""

    certificate: str
    key: str
    authority: str


def resolve(target: str, tls: Tls | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """Return the target in gRPC's syntax, and credentials, or None to connect without. Raises InvalidTargetError."""
    try:
        match = matched(target)
    except WrongAddressError as error:
        raise InvalidTargetError(str(error)) from None
    if match["path"]:
        if tls is not None:
            raise InvalidTargetError(f"{target} takes no certificate; only tcp:HOST:PORT does")
        return target, None
    if tls is None and match["host"] not in LOOPBACK_HOSTS:
        hosts = ", ".join(sorted(LOOPBACK_HOSTS))
        raise InvalidTargetError(f"{target} needs a certificate, a key and an authority; only {hosts} go without")
    return f"dns:///{match['host']}:{match['port']}", None if tls is None else _credentials(tls)


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    # gRPC would fail only at the first call, with "failed to create security handshaker"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _check(f"{tls.certificate} and {tls.key}", lambda: context.load_cert_chain(tls.certificate, tls.key, _no_password))
    _check(tls.authority, lambda: context.load_verify_locations(tls.authority))
    return grpc.ssl_channel_credentials(_content(tls.authority), _content(tls.key), _content(tls.certificate))


def _no_password() -> str:
    # OpenSSL would prompt on the terminal, and gRPC does not support passphrases
    raise ValueError("the key has a passphrase, which is not supported")


def _check(files: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidTargetError(f"{files} cannot be used: {reason}") from error


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
