"""The daemon's ends of the sandbox's processes: the zygote, and the workers that are forked from it.

Both raise `WorkerGoneError` where a process ended, and TimeoutError where it hangs. What they say to each other is in
`worker` and `protocol`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from stapsdtd.kernel.host_calls import MAKE_DESCRIPTOR, START_PROCESS, host_call
from stapsdtd.sandbox import protocol
from stapsdtd.sandbox.lockdown import Measure
from stapsdtd.sandbox.protocol import RefusedError
from stapsdtd.sandbox.worker import IDLE, PID

_log = logging.getLogger(__name__)

USER = "stapsdt-parse"
"""As systemd/stapsdtd.sysusers.conf makes it: a user of the workers' own, so that nobody else may send them signals."""

NOBODY = 65534

COMMAND = (sys.executable, "-I", "-m", "stapsdtd.sandbox.worker")
IDLE_COMMAND = (*COMMAND, IDLE)
"""At idle priority, which may take its time on a busy host."""

_START_SECONDS = 30.0
_ZYGOTE_SECONDS = 5.0

_RECEIVED_BYTES = 1 << 16


class WorkerGoneError(Exception):
    """It closed its end, or what is at the other end of a socket says nothing."""


class Zygote:
    """The process that workers are forked from.

    ids: of the user and group they become where this process may change its own; without it, worker_ids. command: what
    becomes the zygote when a socket's descriptor and both ids are added. slowness: how many times as long as usual it
    may take.
    """

    def __init__(
        self, *, ids: tuple[int, int] | None = None, command: Sequence[str] = COMMAND, slowness: float = 1
    ) -> None:
        user, group = ids or worker_ids()
        with host_call(MAKE_DESCRIPTOR, "a socket pair"):
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                with host_call(START_PROCESS, command[0]):
                    self._process = subprocess.Popen(
                        [*command, str(theirs.fileno()), str(user), str(group)],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env=_environment(),
                        start_new_session=True,
                    )
            except BaseException:
                self._control.close()
                raise
        self._seconds = slowness * _START_SECONDS
        self._fork_seconds = slowness * _ZYGOTE_SECONDS

    def fork(self) -> Worker:
        """Return a new worker. Raises OSError with ENOMEM where no process can be forked."""
        with host_call(MAKE_DESCRIPTOR, "a socket pair"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                pid = self._ask(b"F", [theirs.fileno()])
            self._seconds = self._fork_seconds
            return Worker(pid, ours, _missing(pid, ours, self._fork_seconds))
        except BaseException:
            ours.close()
            raise

    def end(self, pid: int) -> int:
        """Kill a worker, and return its wait status."""
        return self._ask(PID.pack(pid))

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int:
        self._control.settimeout(self._seconds)
        try:
            socket.send_fds(self._control, [message], descriptors)
            answer = self._control.recv(PID.size)
        except ConnectionError as error:
            raise WorkerGoneError("its process ended") from error
        if len(answer) != PID.size:
            raise WorkerGoneError("its process ended")
        number: int = PID.unpack(answer)[0]
        return number

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """It ends its workers and itself when the socket is closed."""
        self._control.close()
        for seconds in (_ZYGOTE_SECONDS, 1.0):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                # where it has another user, it takes CAP_KILL, which the unit does not have
                with contextlib.suppress(PermissionError):
                    self._process.kill()
                _log.warning("the sandbox's process %d does not end, and is left behind", self._process.pid)
            else:
                break


class Worker:
    """A process that parses files. missing: what its sandbox lacks. files: how many it has parsed."""

    def __init__(self, pid: int, channel: socket.socket, missing: Measure) -> None:
        self.pid = pid
        self.missing = missing
        self.files = 0
        self._channel = channel

    def ask(self, descriptors: Sequence[int], seconds: float) -> bytearray:
        """Return the answer. Raises RefusedError where it cannot be one."""
        deadline = time.monotonic() + seconds
        try:
            self._channel.settimeout(seconds)
            socket.send_fds(self._channel, [protocol.REQUEST], descriptors)
            begin = bytearray()
            while len(begin) < protocol.LENGTH.size:
                begin += self._receive(deadline)
            length = protocol.length_of(bytes(begin[: protocol.LENGTH.size]))
            if len(begin) - protocol.LENGTH.size > length:
                raise RefusedError("an answer longer than it says")
            answer = begin[protocol.LENGTH.size :]
            while len(answer) < length:
                answer += self._receive(deadline, length - len(answer))
        except (ConnectionError, BrokenPipeError) as error:
            raise WorkerGoneError("the connection broke") from error
        return answer

    def _receive(self, deadline: float, most: int = _RECEIVED_BYTES) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)
        data = self._channel.recv(min(most, 1 << 20))
        if not data:
            raise WorkerGoneError("it ended")
        return data

    def close(self) -> None:
        self._channel.close()


def worker_ids() -> tuple[int, int]:
    """Return USER's user and group id, where the host has it, else NOBODY's."""
    try:
        found = pwd.getpwnam(USER)
    except KeyError:
        return NOBODY, NOBODY
    return found.pw_uid, found.pw_gid


def _missing(pid: int, channel: socket.socket, seconds: float) -> Measure:
    """Return what a new worker says first. pid: negative where there is none."""
    if pid < 0:
        raise START_PROCESS.refused("the parser", -pid)
    channel.settimeout(seconds)
    said = channel.recv(1)
    if not said:
        raise WorkerGoneError("a process to parse with could not give up its rights")
    return Measure(said[0])


def _environment() -> dict[str, str]:
    """Nothing of the daemon's but where libraries are; numpy's is not to start threads."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **kept}
