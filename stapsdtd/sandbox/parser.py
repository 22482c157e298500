"""The daemon's side of the sandbox: a file's descriptor goes in, a `model.ParsedObject` comes out.

A worker reads many files, but of one owner on one file system: what a file can do to a worker reaches none but other
files of whoever made it. Files that others may write to, or that have no name, are read by a worker for the process
that maps them: what it does to that worker reaches none but others that it maps.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.kernel.debug_files import debug_file
from stapsdtd.kernel.host_calls import START_PROCESS
from stapsdtd.model import ParsedObject
from stapsdtd.runtime.latency import Latency
from stapsdtd.runtime.logs import fields
from stapsdtd.sandbox import protocol
from stapsdtd.sandbox.lockdown import Measure
from stapsdtd.sandbox.processes import Worker, WorkerGoneError, Zygote
from stapsdtd.sandbox.protocol import ParserFailedError, RefusedError

_log = logging.getLogger(__name__)

_WORKERS = 2
_FILES_OF_A_WORKER = 1000
_PAUSE_SECONDS = 5.0
"""After a failure to start; the file is looked at again anyway."""

FailureReason = Literal["file", "worker"]
"""The file is none that can be read; or the worker failed, ended, hung or said nonsense."""

_Owner = tuple[int, int]
_NO_DEVICE = -1


class TooSlowError(ObjectUnreadableError):
    """It was not parsed in the seconds that were given."""


class ParserLostError(ObjectUnreadableError):
    """The process that parsed it ended, hung or said nonsense: the file may be readable all the same."""


class SandboxedParser:
    """Parses in processes without rights. `close` leaves none behind; all calls come from one thread.

    parsing, failures, starts: how long files took, how often one could not be parsed and how often the sandbox was
    started, which may be read anywhere.

    start_zygote: starts the process that workers are forked from, and another one when that is lost. deadline_seconds:
    for a file. slow_seconds: a file that took longer has filled the worker's memory, or used much of its CPU time: the
    next one gets another worker.
    """

    def __init__(
        self,
        start_zygote: Callable[[], Zygote] = Zygote,
        *,
        deadline_seconds: float = 10.0,
        slow_seconds: float = 1.0,
    ) -> None:
        self._make_zygote = start_zygote
        self._deadline_seconds = deadline_seconds
        self._slow_seconds = slow_seconds
        self._workers: OrderedDict[_Owner, Worker] = OrderedDict()
        self.parsing = Latency()
        self.failures: Counter[FailureReason] = Counter()
        self.starts = 0
        self._missing: Measure | None = None
        self._next_start = 0.0
        # it starts while the daemon does other things
        self._zygote: Zygote | None = self._start_zygote()

    def parse(self, descriptor: int, pid: int, seconds: float | None = None) -> ParsedObject:
        """Read the file that is open there, for reading only, and that a process maps; with its debug file where it
        was stripped of symbols that its notes name.

        Raises ObjectUnreadableError where the file is why it cannot be read, which says nothing of files to come; and
        OSError where there is no process to read it: with ENOMEM, after which it is worth to try again later. Where
        seconds are given, TooSlowError says that it takes longer.
        """
        with self.parsing.measured():
            return self._parse_with_symbols(descriptor, pid, seconds)

    def abort(self) -> None:
        """Have what is going on in its thread fail, and all that begins later. For any thread."""
        self._next_start = float("inf")
        if self._zygote is not None:
            self._zygote.abort()

    def _parse_with_symbols(self, descriptor: int, pid: int, seconds: float | None) -> ParsedObject:
        parsed = self._parse([descriptor], pid, seconds)
        if parsed.lacks_symbols and parsed.build_id:
            with contextlib.suppress(ObjectUnreadableError), debug_file(parsed.build_id) as found:
                if found is not None:
                    parsed = self._parse([descriptor, found], pid, seconds)
        parsed.prepare()
        return parsed

    def _parse(self, descriptors: Sequence[int], pid: int, seconds: float | None) -> ParsedObject:
        descriptor = descriptors[0]
        status = os.fstat(descriptor)
        is_private = status.st_nlink > 0 and not status.st_mode & 0o022
        owner = (status.st_dev, status.st_uid) if is_private else (_NO_DEVICE, pid)
        for is_last in (False, True):
            worker = self._worker(owner)
            was_new = not worker.files
            begin = time.monotonic()
            try:
                answer = worker.ask(descriptors, seconds or self._deadline_seconds)
                # it may have grown while it was read
                parsed = protocol.decode(answer, max(status.st_size, os.fstat(descriptor).st_size))
            except ObjectUnreadableError as error:
                self._keep(worker, owner, begin)
                self.failures["worker" if isinstance(error, ParserFailedError) else "file"] += 1
                if isinstance(error, ParserFailedError):
                    _log.warning("%r cannot be parsed: %s", _name(descriptor), error, extra=fields(uid=status.st_uid))
                raise
            except (RefusedError, TimeoutError, WorkerGoneError) as error:
                what = self._end(worker, error)
                if seconds and isinstance(error, TimeoutError):
                    raise TooSlowError(f"parsing it takes longer than {seconds:g} s") from error
                self.failures["worker"] += 1
                # a worker that had read other files may have been at fault, or whoever ended it
                if is_last or isinstance(error, TimeoutError) or (was_new and isinstance(error, RefusedError)):
                    _log.warning("%r cannot be parsed: %s", _name(descriptor), what, extra=fields(uid=status.st_uid))
                    raise ParserLostError(what) from error
            except BaseException:
                self._end(worker, None)
                raise
            else:
                self._keep(worker, owner, begin)
                return parsed
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End all processes; the parser is of no use after that."""
        self._next_start = float("inf")
        self._lose_zygote()

    def _worker(self, owner: _Owner) -> Worker:
        """Return one that may read files of the owner, which is nobody else's until it is kept."""
        if known := self._workers.pop(owner, None):
            return known
        for is_last in (False, True):
            try:
                zygote = self._zygote = self._zygote or self._start_zygote()
                worker = zygote.fork()
            except (WorkerGoneError, TimeoutError, ValueError) as error:
                self._lose_zygote()
                if is_last:
                    self._next_start = time.monotonic() + _PAUSE_SECONDS
                    raise START_PROCESS.refused(
                        "the parser", errno.ENOMEM, f"its sandbox does not start: {error}"
                    ) from error
            else:
                self._tell(worker.missing)
                return worker
        raise AssertionError("unreachable")

    def _start_zygote(self) -> Zygote:
        if time.monotonic() < self._next_start:
            raise START_PROCESS.refused("the parser", errno.ENOMEM, "its sandbox does not start, as a moment ago")
        self.starts += 1
        return self._make_zygote()

    def _lose_zygote(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None

    def _tell(self, missing: Measure) -> None:
        if missing and missing != self._missing:
            names = ", ".join(str(measure.name).lower().replace("_", " ") for measure in Measure if measure in missing)
            _log.warning("the parser's sandbox lacks what is unavailable on this host: %s", names)
        self._missing = missing

    def _keep(self, worker: Worker, owner: _Owner, begin: float) -> None:
        worker.files += 1
        if worker.files >= _FILES_OF_A_WORKER or time.monotonic() - begin > self._slow_seconds:
            self._end(worker, None)
            return
        self._workers[owner] = worker
        if len(self._workers) > _WORKERS:
            self._end(self._workers.popitem(last=False)[1], None)

    def _end(self, worker: Worker, error: Exception | None) -> str:
        """End a worker, and return what an error means in a user's words."""
        worker.close()
        status = None
        if self._zygote is not None:
            try:
                status = self._zygote.end(worker.pid)
            except (WorkerGoneError, TimeoutError):
                self._lose_zygote()
        if isinstance(error, TimeoutError):
            return f"parsing it took longer than {self._deadline_seconds:g} s"
        if isinstance(error, RefusedError):
            return f"the process that parsed it said nonsense: {error}"
        return f"the process that parsed it {_ended(status)}"


def _ended(status: int | None) -> str:
    if status is None or not os.WIFSIGNALED(status):
        return "ended"
    number = os.WTERMSIG(status)
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"was ended by signal {number}"


def _name(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "a file"
