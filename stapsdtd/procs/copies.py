"""Copies files from file systems whose servers may not reply, so that the copies are parsed instead.

    mapping ──► one process per user copies into a memfd ──► parsed like any other file ──► listed
                                └─ no reply for 5 s: killed; that user's other such files wait until it has ended

A thread that waits for a FUSE server cannot be ended and would keep the daemon from exiting. Here the server holds up
a process that does nothing else, which the kernel ends when the server replies or goes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from stapsdtd.errors import ObjectGoneError, ObjectPendingError
from stapsdtd.kernel.host_calls import START_PROCESS, host_call
from stapsdtd.model import Mapping, ObjectKey
from stapsdtd.procs import copying
from stapsdtd.procs.objects import Copy
from stapsdtd.runtime.logs import fields

_log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-I", "-S", copying.__file__)

_SECONDS = 5.0
_PROCESSES = 4
"""At once, one for each user."""
_MAX_BYTES = 32 << 20
_KEPT = 4
_REFUSED_SECONDS = 30.0
"""Until a file that could not be copied is tried again, ..."""
_REFUSED_KEPT = 1000
"""... and how many such files are remembered."""

_OUTPUT_BYTES = 1000
_EXIT_SECONDS = 0.5

_File = tuple[int, int]
"""Device and inode."""


@dataclass(slots=True, eq=False)
class _Job:
    """pids: processes that map files waiting for this job. is_late: its process was killed and has not ended yet."""

    file: _File
    path: str
    user: int
    process: subprocess.Popen[bytes]
    pidfd: int
    target: int
    deadline: asyncio.TimerHandle
    pids: set[int] = field(default_factory=set)
    is_late: bool = False


class FileCopies:
    """See `procs.objects.Copies`. Runs on an event loop.

    on_done: called with the pids of processes that should be looked at again.
    """

    def __init__(self, seconds: float = _SECONDS, command: tuple[str, ...] = COMMAND) -> None:
        self.on_done: Callable[[Iterable[int]], None] = lambda _pids: None
        self._seconds = seconds
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _Job] = {}
        self._copies: OrderedDict[_File, Copy] = OrderedDict()
        self._refused: OrderedDict[_File, float] = OrderedDict()

    def take(self, pid: int, user: int, mapping: Mapping) -> Copy:
        """Return a file's copy. Raises ObjectPendingError until there is one, ObjectGoneError if there will be none."""
        file = mapping.dev, mapping.inode
        if file in self._copies:
            return self._copies[file]
        if any(self._refused.get(each, 0.0) > self._loop.time() for each in (file, _all_of(file))):
            raise ObjectGoneError(mapping.path)
        job = self._jobs.get(user)
        if job is None and len(self._jobs) == _PROCESSES:
            job = next(iter(self._jobs.values()))
        if job is None:
            job = self._jobs[user] = self._begin(pid, user, mapping)
        job.pids.add(pid)
        raise ObjectPendingError

    def drop(self, copy: Copy) -> None:
        """Close a copy that is not needed any more."""
        for file in [file for file, other in self._copies.items() if other is copy]:
            del self._copies[file]
            os.close(copy.descriptor)

    def close(self) -> None:
        """Kill the running jobs; one whose server holds it up is left to the kernel."""
        for job in self._jobs.values():
            job.deadline.cancel()
            self._loop.remove_reader(job.pidfd)
            _kill(job.process)
            self._release(job)
        self._jobs.clear()
        for copy in list(self._copies.values()):
            self.drop(copy)

    def _begin(self, pid: int, user: int, mapping: Mapping) -> _Job:
        """Raises HostRefusedError."""
        with host_call(START_PROCESS, self._command[0]), ExitStack() as undo:
            target = os.memfd_create("stapsdt-copy", os.MFD_CLOEXEC)
            undo.callback(os.close, target)
            path = f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
            process = subprocess.Popen(
                [*self._command, path, str(_MAX_BYTES)],
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.PIPE,
            )
            undo.callback(_close_output, process)
            undo.callback(_kill, process)
            pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        deadline = self._loop.call_later(self._seconds, self._give_up, user)
        job = _Job((mapping.dev, mapping.inode), mapping.path, user, process, pidfd, target, deadline)
        self._loop.add_reader(pidfd, self._end, job)
        return job

    def _give_up(self, user: int) -> None:
        job = self._jobs[user]
        job.is_late = True
        job.process.kill()
        _log.warning(
            "%s: its file system does not reply; until it does, the user's files on such file systems are not parsed",
            job.path,
            extra=fields(uid=user),
        )

    def _end(self, job: _Job) -> None:
        """Take the result of a job whose process has ended."""
        self._loop.remove_reader(job.pidfd)
        job.deadline.cancel()
        code = job.process.wait()
        assert job.process.stderr is not None  # noqa: S101 - it is a pipe
        output = job.process.stderr.read(_OUTPUT_BYTES).decode(errors="replace")
        del self._jobs[job.user]
        if code == 0 and not job.is_late:
            try:
                self._keep(job, output)
            except (OSError, ValueError) as error:
                _log.warning("%s is not parsed: cannot take its copy: %s", job.path, error, extra=fields(uid=job.user))
                self._refuse(job.file)
        elif not job.is_late and output.strip() != os.strerror(errno.ENOENT):
            # ENOENT: gone from that process, but another one may map it
            reason = output.strip() or f"exit code {code}"
            _log.info("%s is not parsed: cannot copy it: %s", job.path, reason, extra=fields(uid=job.user))
            # a server that denies root access to one file denies it to all
            self._refuse(_all_of(job.file) if output.strip() == os.strerror(errno.EACCES) else job.file)
        self._release(job)
        self.on_done(job.pids)

    def _keep(self, job: _Job, output: str) -> None:
        """output: the copied file's key. Raises OSError if there is no descriptor left, ValueError if it is no key."""
        device, inode, size, mtime_ns = map(int, output.split())
        self._copies[job.file] = Copy(os.dup(job.target), ObjectKey(device, inode, size, mtime_ns))
        if len(self._copies) > _KEPT:
            self.drop(next(iter(self._copies.values())))

    def _refuse(self, file: _File) -> None:
        self._refused[file] = self._loop.time() + _REFUSED_SECONDS
        while len(self._refused) > _REFUSED_KEPT:
            self._refused.popitem(last=False)

    def _release(self, job: _Job) -> None:
        _close_output(job.process)
        os.close(job.pidfd)
        os.close(job.target)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for a moment; one that its server holds up ends later."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS)


def _close_output(process: subprocess.Popen[bytes]) -> None:
    if process.stderr is not None:
        process.stderr.close()


def _all_of(file: _File) -> _File:
    """Return a key for all files of a device, with an inode that no file has."""
    return file[0], 0
