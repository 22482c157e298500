"""The process connector's socket of a daemon, looked at from outside."""

from __future__ import annotations

import ctypes
import os
import socket

_PIDFD_GETFD = 438
_NETLINK_CONNECTOR = 11


def connector_queue_bytes(pid: int) -> int | None:
    """How long the queue of its process connector is; None where it has none."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            copied = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if copied < 0:
                continue
            try:
                found = socket.socket(fileno=copied)
            except OSError:
                os.close(copied)
                continue
            with found:
                if (found.family, found.proto) == (socket.AF_NETLINK, _NETLINK_CONNECTOR):
                    # the kernel counts double, for its own
                    return found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
    finally:
        os.close(pidfd)
    return None
