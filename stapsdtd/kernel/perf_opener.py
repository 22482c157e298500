"""The client of stapsdtd-opener, which opens perf events where the kernel gives them to CAP_SYS_ADMIN alone.

    request  u32 version, kind | s32 pid, cpu | u64 tracepoint             systemd/opener.c
    reply    u32 version | s32 errno, or 0 and one descriptor; then a second 0, when the opener has closed its own

Debian's and Ubuntu's kernels do so with kernel.perf_event_paranoid above 2. What was opened stays open when the opener
ends; the next request connects again, and systemd starts another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from array import array
from enum import IntEnum
from typing import cast

from stapsdtd.errors import HostRefusedError
from stapsdtd.kernel.host_calls import PERF_EVENT_OPEN

SOCKET_PATH = "/run/stapsdtd-opener/opener.sock"
VERSION = 1
REQUEST = struct.Struct("=IIiiQ")
REPLY = struct.Struct("=Ii")

_SECONDS = 10.0
_MOST_DESCRIPTORS = 4
"""That are received, so that too many are noticed."""
_DESCRIPTOR_BYTES = array("i").itemsize
_ATTEMPTS = 2
"""One connection may have ended since it was used; a new one that ends as well says that something is wrong."""


class Kind(IntEnum):
    """What may be opened: enum kind in systemd/opener.c."""

    TRACEPOINT = 1
    MAPPINGS = 2
    KPROBE_TRIAL = 3


class OpenerAbsentError(Exception):
    """There is no socket, or this process may not use it."""


class PerfDeniedError(HostRefusedError):
    """perf_event_open is denied: EACCES."""

    def __new__(cls, reason: str, remedy: str) -> PerfDeniedError:  # noqa: PYI034
        return cast("PerfDeniedError", super().__new__(cls, PERF_EVENT_OPEN.name, "", errno.EACCES, remedy, reason))

    def __init__(self, reason: str, remedy: str) -> None:
        """reason: what it takes. remedy: what an operator can do."""
        super().__init__(PERF_EVENT_OPEN.name, "", errno.EACCES, remedy, reason)
        self.reason = f"{self.operation}: {reason}"


_LOOK = "look at 'systemctl status stapsdtd-opener.socket' and at 'journalctl -u \"stapsdtd-opener@*\"'"


class OpenerSilentError(PerfDeniedError):
    """The opener does not answer."""

    def __new__(cls, reason: str) -> OpenerSilentError:  # noqa: PYI034
        return cast("OpenerSilentError", super().__new__(cls, _silent(reason), _LOOK))

    def __init__(self, reason: str) -> None:
        super().__init__(_silent(reason), _LOOK)


def _silent(reason: str) -> str:
    return f"the opener of perf events does not answer: {reason}"


class PerfOpener:
    """One connection, which is made at the first request. Any thread may ask; requests wait for each other."""

    def __init__(self, path: str = SOCKET_PATH, seconds: float = _SECONDS) -> None:
        """seconds: how long one request may take, and how long requests are refused at once after one took longer."""
        self._path = path
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._silent_until = 0.0
        self._is_used = False

    @property
    def is_used(self) -> bool:
        """Whether it has answered this process."""
        return self._is_used

    def open(self, kind: Kind, pid: int, cpu: int, tracepoint: int = 0) -> int:
        """Return the event's descriptor. tracepoint: the id of a tracefs event, for its kind alone.

        Raises OSError with the kernel's errno, OpenerSilentError, and OpenerAbsentError.
        """
        request = REQUEST.pack(VERSION, kind, pid, cpu, tracepoint)
        with self._lock:
            error, descriptors = self._answer(request)
            self._is_used = True
        if len(descriptors) != (error == 0):
            _close_all(descriptors)
            raise OpenerSilentError(f"it answered with {len(descriptors)} descriptors")
        if error:
            raise PERF_EVENT_OPEN.refused(subject_of(pid), error)
        return descriptors[0]

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _answer(self, request: bytes) -> tuple[int, list[int]]:
        """Return an errno and the descriptors that came with it."""
        if time.monotonic() < self._silent_until:
            raise OpenerSilentError(f"not within {self._seconds:g} s a moment ago")
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                return self._exchange(request)
            except TimeoutError as error:
                # its answer, if it comes, is not to be taken for that of the next request
                self._disconnect()
                self._silent_until = time.monotonic() + self._seconds
                raise OpenerSilentError(f"not within {self._seconds:g} s") from error
            except OSError as error:
                self._disconnect()
                problem = str(error.args[-1])
        raise OpenerSilentError(problem)

    def _exchange(self, request: bytes) -> tuple[int, list[int]]:
        if self._connection is None:
            self._connection = self._connected()
        self._connection.send(request)
        error, descriptors = _received(self._connection)
        if not error:
            try:
                # as long as it has one as well, closing ours unpatches nothing
                error, more = _received(self._connection)
            except BaseException:
                _close_all(descriptors)
                raise
            descriptors += more
        return error, descriptors

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(self._seconds)
            connection.connect(self._path)
        except (FileNotFoundError, PermissionError) as error:
            connection.close()
            raise OpenerAbsentError from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _received(connection: socket.socket) -> tuple[int, list[int]]:
    """Return the errno of one message and its descriptors. Raises OSError."""
    # socket.recv_fds() of Python 3.11 ignores its flags
    message, control, flags, _ = connection.recvmsg(
        REPLY.size + 1, socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [each for level, kind, data in control for each in _passed(level, kind, data)]
    problem = ""
    if not message:
        problem = "it closed the connection"
    elif len(message) != REPLY.size or flags & socket.MSG_CTRUNC:
        problem = "its message has another size"
    elif (version := REPLY.unpack(message)[0]) != VERSION:
        problem = f"it speaks version {version} of the protocol, and this process {VERSION}"
    if problem:
        _close_all(descriptors)
        raise ConnectionResetError(errno.ECONNRESET, problem)
    return REPLY.unpack(message)[1], descriptors


def _passed(level: int, kind: int, data: bytes) -> array[int]:
    """Return the descriptors that a part of a message's control data has."""
    descriptors = array("i")
    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        descriptors.frombytes(data[: len(data) // _DESCRIPTOR_BYTES * _DESCRIPTOR_BYTES])
    return descriptors


def subject_of(pid: int) -> str:
    """Return what an event is for, for messages. pid: -1 for all processes."""
    return "for all processes" if pid < 0 else f"for process {pid}"


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
