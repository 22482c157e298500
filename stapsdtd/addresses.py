"""What the daemon and its clients must agree on about addresses. Cheap to import, unlike `config`."""

DEFAULT_ADDRESS = "unix:/run/stapsdtd/stapsdtd.sock"
"""Where the daemon listens, and commands connect, unless told otherwise."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "[::1]", "localhost"})
"""Hosts of `tcp:HOST:PORT` at which the daemon may listen, and clients connect, without TLS."""
