"""Waits until the daemon has armed the probes that this process just mapped: no tracer is to miss their first hits."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

SOCKET_VARIABLE = "STAPSDTD_PROVIDER_SOCKET"
DEFAULT_SOCKET = "/run/stapsdtd/provider/stapsdtd.sock"

_LONGEST_SECONDS = 60.0
_TIMEVAL = struct.Struct("ll")


def wait_until_armed(seconds: float) -> None:
    """Return when the probes that this process maps are armed for everyone who traces them, or after some seconds.

    Return at once if no daemon runs, or nobody traces. A connection to the daemon's provider socket is all that it
    takes: the daemon closes it when it is done.
    """
    if not seconds > 0:
        return
    path = os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)
    # nothing that a tracer does may be an error of the program
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        # unlike settimeout, this has connect wait for its turn, too, if many programs wait (unix(7))
        timeout = _TIMEVAL.pack(*divmod(int(min(seconds, _LONGEST_SECONDS) * 1_000_000), 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.connect(path)
        connection.recv(1)
