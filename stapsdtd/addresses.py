"""What the daemon and its clients must agree on about addresses. Cheap to import, unlike `config`."""

from __future__ import annotations

import re

DEFAULT_ADDRESS = "unix:/run/stapsdtd/stapsdtd.sock"
"""Where the daemon listens, and commands connect, unless told otherwise."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "[::1]", "localhost"})
"""Hosts of `tcp:HOST:PORT` at which the daemon may listen, and clients connect, without TLS."""

_ADDRESS = re.compile(r"unix:(?P<path>/.+|[^/:@\0].*)|tcp:(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5})")


class WrongAddressError(ValueError):
    """A text is not the address of a daemon. The text is meant for users."""


def matched(address: str) -> re.Match[str]:
    """Return an address with the groups `path`, or `host` and `port`. Raises WrongAddressError.

    gRPC and others would take a text without `unix:` or `tcp:` for the name of a host.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > 0xFFFF:
        raise WrongAddressError(f"{address!r} is not of the form unix:PATH or tcp:HOST:PORT")
    return match
