"""The other side of `processes`: `python -I -m stapsdtd.sandbox.worker [--idle] SOCKET USER GROUP`.

    daemon ──► zygote   SEQPACKET   1 byte and a socket: fork a worker that serves it ──► i32 pid, or -errno
                                    i32 pid: kill that worker ──► i32 its wait status
    daemon ──► worker   STREAM      first u8 which measures of the sandbox are missing ◄──, then as `protocol` says

The zygote imports everything, drops its rights and never sees a file. So a worker is new within two milliseconds, and a
worker that a file took over has nobody to pass it on to. The zygote's user is the workers', since a daemon without
CAP_KILL may not kill what belongs to another user.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from stapsdtd.elf import parse_object
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import ParsedObject
from stapsdtd.provider.architecture import X86_64
from stapsdtd.provider.argtypes import INT64, STRING, Declaration
from stapsdtd.provider.image import build_image
from stapsdtd.sandbox import lockdown, protocol
from stapsdtd.sandbox.lockdown import Measure

Parse = Callable[[BinaryIO, BinaryIO | None], ParsedObject]
"""Reads a file, with its debug file beside it."""

PID = struct.Struct("<i")

IDLE = "--idle"

_SOCKET = 3
"""Where the one descriptor is that is left beside the null device."""


def serve(arguments: list[str], parse: Parse = parse_object) -> None:
    """Be the zygote until the daemon closes its end. arguments: a socket's descriptor, user and group id."""
    if arguments[0] == IDLE:
        # workers inherit it
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    descriptor, user, group = map(int, arguments[-3:])
    _leave_open(descriptor)
    for number in (signal.SIGINT, signal.SIGTERM):
        # these go to all processes of a service or a terminal; here it ends when the daemon is done with it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    _warm_up()
    had_bytes = lockdown.address_space()
    missing = lockdown.drop_rights(user, group)
    # until now it could have said what went wrong
    os.dup2(0, 2)
    # what the workers share is not to be copied because a collector looked at it
    gc.disable()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=_SOCKET) as control:
        _Zygote(missing, had_bytes, parse).answer(control)


def _leave_open(descriptor: int) -> None:
    null, moved = os.open(os.devnull, os.O_RDWR), os.dup(descriptor)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(moved, _SOCKET)
    os.closerange(_SOCKET + 1, os.sysconf("SC_OPEN_MAX"))


def _warm_up() -> None:
    """Have made what numpy and others import or make on first use, while they still can."""
    image = build_image("warm", [Declaration("up", (INT64, STRING))], X86_64).content
    protocol.decode(b"".join(protocol.encode(parse_object(io.BytesIO(image)))), len(image))


class _Zygote:
    def __init__(self, missing: Measure, had_bytes: int, parse: Parse) -> None:
        self._missing = missing
        self._had_bytes = had_bytes
        self._parse = parse
        self._pid = os.getpid()

    def answer(self, control: socket.socket) -> None:
        workers: set[int] = set()
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, PID.size, 1)
            if not message:
                break
            if descriptors:
                answer = self._fork(descriptors[0])
                os.close(descriptors[0])
                workers.update({answer} if answer > 0 else ())
            else:
                (pid,) = PID.unpack(message)
                answer = _end(pid) if pid in workers else 0
                workers.discard(pid)
            control.sendall(PID.pack(answer))
        for pid in workers:
            _end(pid)

    def _fork(self, descriptor: int) -> int:
        try:
            pid = os.fork()
        except OSError as error:
            return -(error.errno or errno.EAGAIN)
        if pid:
            return pid
        status = 1
        try:
            self._be_worker(descriptor)
            status = 0
        finally:
            # whatever happens, nothing of the zygote's goes on here
            os._exit(status)

    def _be_worker(self, descriptor: int) -> None:
        os.dup2(descriptor, _SOCKET)
        os.closerange(_SOCKET + 1, os.sysconf("SC_OPEN_MAX"))
        # made before the filter, since Python asks a socket for its address
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=_SOCKET) as channel:
            missing = self._missing | lockdown.confine(self._pid, self._had_bytes)
            channel.sendall(bytes([missing.value]))
            while _answer(channel, self._parse):
                pass


def _end(pid: int) -> int:
    """Return the wait status of a child, which may have ended already."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _answer(channel: socket.socket, parse: Parse) -> bool:
    """Serve one request; return False where it was the last one."""
    message, descriptors, _, _ = socket.recv_fds(channel, len(protocol.REQUEST), 2)
    if not message:
        return False
    is_exhausted = False
    try:
        with contextlib.ExitStack() as opened:
            file, *debug_files = [opened.enter_context(open(descriptor, "rb")) for descriptor in descriptors]
            parts = protocol.encode(parse(file, debug_files[0] if debug_files else None))
    except ObjectUnreadableError as error:
        parts = protocol.encode_reason(error.reason)
        is_exhausted = isinstance(error.__cause__, MemoryError)
    except MemoryError:
        parts = protocol.encode_reason("not enough memory to read it")
        is_exhausted = True
    except Exception as error:  # noqa: BLE001 - a defect costs this file, and the daemon says which it is
        parts = protocol.encode_reason(f"{type(error).__name__}: {error}", failed=True)
    for part in protocol.framed(parts):
        channel.sendall(part)
    return not is_exhausted


if __name__ == "__main__":
    serve(sys.argv[1:])
