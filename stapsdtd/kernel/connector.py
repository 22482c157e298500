"""The netlink process connector: fork, exec and exit as they happen (include/uapi/linux/cn_proc.h).

    nlmsghdr 16 bytes | cn_msg 20 bytes | what u32, cpu u32, timestamp u64 | up to 24 bytes that depend on what

pyroute2 creates the socket and joins the group. Messages are read from its descriptor as raw bytes: that costs a
microsecond per message, tolerates command names that are not UTF-8, and keeps the socket usable after ENOBUFS. A plain
send fails if there is no process connector, as outside the initial network namespace.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pyroute2 import ProcEventSocket

from stapsdtd.errors import KernelFeatureError

_EVENT = struct.Struct("=IIQIIII")
_EVENT_AT = 36
_MAX_MESSAGE_BYTES = 256
_FORK, _EXEC, _EXIT = 0x1, 0x2, 0x8000_0000
_CN_IDX_PROC = _CN_VAL_PROC = 1
_PROC_CN_MCAST_LISTEN = 1
_NLMSG_DONE = 3
_REQUEST = struct.Struct("=IHHIIIIIIHHI")
QUEUE_BYTES = 8 << 20
_SO_RCVBUFFORCE = 33
_SO_ATTACH_FILTER = 26

MOST_AT_ONCE = 500
"""Events that one read() yields: whoever reads has others to serve, and any process may fork without end."""
_LD_W_ABS, _JEQ_K, _RET_K = 0x20, 0x15, 0x06
_INSTRUCTION = struct.Struct("=HBBI")


class Forked(NamedTuple):
    """Process pid has a new thread tid; a new process if both are equal. parent: of that process."""

    tid: int
    pid: int
    parent: int = 0


class Executed(NamedTuple):
    pid: int


class Exited(NamedTuple):
    """Thread tid of process pid exited; other threads may outlive the leader."""

    tid: int
    pid: int


class Overflowed(NamedTuple):
    """Messages were lost; rescan /proc."""


ProcessEvent = Forked | Executed | Exited | Overflowed


class ProcessConnector:
    """Raises KernelFeatureError if this process may not listen."""

    def __init__(self) -> None:
        # pyroute2 runs its own event loop, which cannot nest in a running one, and gives each thread its own socket;
        # so a single thread makes all calls
        self._worker = ThreadPoolExecutor(1, "stapsdtd-pyroute2")
        try:
            self._netlink, descriptor = self._worker.submit(_listen).result()
        except Exception as error:  # OSError, or pyroute2's NetlinkError
            self._worker.shutdown()
            raise KernelFeatureError(
                "process connector",
                str(error),
                "run as root in the initial network namespace, on a kernel with CONFIG_PROC_EVENTS",
            ) from error
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        _drop_others(self._socket)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, QUEUE_BYTES)
        except PermissionError:  # without CAP_NET_ADMIN the host's default bounds the queue
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[ProcessEvent]:
        """Yield pending events without waiting, MOST_AT_ONCE at most."""
        for _ in range(MOST_AT_ONCE):
            try:
                message = self._socket.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                yield Overflowed()
                continue
            if len(message) < _EVENT_AT + _EVENT.size:
                continue
            what, _cpu, _timestamp, first, second, third, fourth = _EVENT.unpack_from(message, _EVENT_AT)
            if what == _FORK:
                yield Forked(third, fourth, second)
            elif what == _EXEC:
                yield Executed(second)
            elif what == _EXIT:
                yield Exited(first, second)

    def close(self) -> None:
        self._socket.close()
        self._worker.submit(self._netlink.close).result()
        self._worker.shutdown()


def _drop_others(connector: socket.socket) -> None:
    """Have the kernel drop events of other kinds: any process may rename itself 100,000 times a second.

    A classic BPF program (Documentation/networking/filter.rst) loads numbers in network order.
    """
    kinds = [socket.htonl(kind) for kind in (_FORK, _EXEC, _EXIT)]
    program = [
        (_LD_W_ABS, 0, 0, _EVENT_AT),
        *((_JEQ_K, len(kinds) - number, 0, kind) for number, kind in enumerate(kinds)),
        (_RET_K, 0, 0, 0),
        (_RET_K, 0, 0, 0xFFFF_FFFF),
    ]
    instructions = b"".join(_INSTRUCTION.pack(*each) for each in program)
    buffer = ctypes.create_string_buffer(instructions)
    # struct sock_fprog
    connector.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(buffer))
    )


def _listen() -> tuple[Any, int]:
    """Return pyroute2's socket and a duplicate descriptor to read from."""
    netlink = ProcEventSocket()
    try:
        netlink.bind()
        with socket.socket(fileno=socket.dup(netlink.fileno())) as plain:
            plain.send(
                _REQUEST.pack(
                    *(_REQUEST.size, _NLMSG_DONE, 0, 0, 0),
                    *(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, 4, 0),
                    _PROC_CN_MCAST_LISTEN,
                )
            )
            return netlink, plain.detach()
    except BaseException:
        netlink.close()
        raise
