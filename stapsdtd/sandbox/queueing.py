"""Parses quick files at once, and slow ones in threads of their own, so that no caller waits for them.

    root's file     ──► parse for a moment ──too slow──► thread for root's ───────────────────┬──► on_done
    another user's  ──► parse for a moment ──too slow──► thread for others', owners in turn ──┘

The caller waits for a moment's parsing of root's files, and hardly for that of others', whose owners could make all
wait. A sandbox that is slow to start counts as too slow.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from stapsdtd.errors import ObjectPendingError, ObjectUnreadableError
from stapsdtd.kernel.host_calls import PARSE
from stapsdtd.model import ParsedObject
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.futures import all_done, unfinished
from stapsdtd.sandbox.parser import SandboxedParser, TooSlowError

_log = logging.getLogger(__name__)

_MOMENT_SECONDS = 0.25
_ROOT_MOMENT_SECONDS = 1.0
_SHORT_MOMENT_SECONDS = 0.02
"""For an owner who had a file that took longer, ..."""
_IMPATIENT_SECONDS = 10.0
"""... for so long."""
_MOST_WAITING_SECONDS = 0.005
"""Of the caller, for what is not root's."""
_MAX_WAITING_PER_OWNER = 64
_MAX_RESULTS = 64
_ROOT = 0

_Key = tuple[int, int, int, int]
_Result = ParsedObject | ObjectUnreadableError | OSError


@dataclass(slots=True)
class _Job:
    """pid: of a process that maps the file. pids: those to be looked at again when it is parsed. is_awaited: by the
    thread that asked. is_tried: while that waited; result is None if it takes longer.
    """

    key: _Key
    owner: int
    descriptor: int
    pid: int
    pids: set[int]
    is_awaited: bool = True
    is_tried: bool = False
    result: _Result | None = None
    done: Future[None] = field(default_factory=unfinished)


class QueueingParser:
    """All methods may be called from any thread. on_done: called in another one with the processes that map what has
    been parsed.

    parser: for quick files. start_parser: begins the sandboxes of the threads for slow ones.
    """

    def __init__(
        self, parser: SandboxedParser, *, start_parser: Callable[[], SandboxedParser] = SandboxedParser
    ) -> None:
        self._parser = parser
        # starting the sandbox may take long, too: it forks, which the kernel can hold up
        self._quick = FairThread("stapsdtd-parsing")
        self._is_stuck = False
        self.on_done: Callable[[set[int]], None] = lambda _pids: None
        self._lock = threading.Lock()
        self._jobs: dict[_Key, _Job] = {}
        self._jobs_of: dict[int, dict[_Key, _Job]] = {}
        self._results: OrderedDict[_Key, _Result] = OrderedDict()
        self._impatient_until: dict[int, float] = {}
        self._root = _SlowParser(start_parser, self._finish)
        self._others = _SlowParser(start_parser, self._finish)

    def parse(self, descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        """As `SandboxedParser.parse`, and raises ObjectPendingError for what takes longer; ask again then.

        owner: whose the file is, where that is not the open file's own.
        """
        status = os.fstat(descriptor)
        owner = status.st_uid if owner is None else owner
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        found = self._result_or_job(key, owner, descriptor, pid)
        result = self._parse_quickly(found) if isinstance(found, _Job) else found
        if isinstance(result, Exception):
            raise result
        return result

    def _result_or_job(self, key: _Key, owner: int, descriptor: int, pid: int) -> _Result | _Job:
        """Return a result that waits, or a new job. Raises ObjectPendingError."""
        with self._lock:
            if key in self._results:
                return self._results.pop(key)
            if waiting := self._jobs.get(key) or self._last_of_many(owner):
                waiting.pids.add(pid)
                raise ObjectPendingError
            job = self._jobs[key] = _Job(key, owner, os.dup(descriptor), pid, {pid})
            self._jobs_of.setdefault(owner, {})[key] = job
            return job

    def _parse_quickly(self, job: _Job) -> _Result:
        """Raises ObjectPendingError, and has the job done in the background."""
        with self._lock:
            is_stuck, moment = self._is_stuck, self._moment(job.owner)
        is_root = job.owner == _ROOT
        trying = None if is_stuck else self._quick.submit(Queue(str(job.owner)), partial(self._try, job, moment))
        if trying is not None:
            wait([trying], moment if is_root else _MOST_WAITING_SECONDS)
        with self._lock:
            job.is_awaited = False
            if job.result is not None:
                self._remove(job)
            elif job.is_tried or trying is None or (is_root and trying.cancel()):
                self._slow(job.owner).put(job)
            elif is_root:
                # it is the start of the sandbox that takes so long
                self._is_stuck = True
            others = job.pids - {job.pid}
        if job.result is None:
            raise ObjectPendingError
        os.close(job.descriptor)
        if others:
            self.on_done(others)
        job.done.set_result(None)
        return job.result

    def _try(self, job: _Job, seconds: float) -> None:
        try:
            result = _parsed(self._parser, job, seconds)
        except TooSlowError:
            result = None
        with self._lock:
            if result is None:
                self._impatient_until[job.owner] = time.monotonic() + _IMPATIENT_SECONDS
            if job.is_awaited:
                job.is_tried, job.result = True, result
                return
            self._is_stuck = False
            if result is None:
                self._slow(job.owner).put(job)
        if result is not None:
            self._finish(job, result)

    def _last_of_many(self, owner: int) -> _Job | None:
        """Return what is to be parsed before an owner may have more; None if he may."""
        of_owner = self._jobs_of.get(owner, {})
        return next(reversed(of_owner.values())) if len(of_owner) >= _MAX_WAITING_PER_OWNER else None

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.key]
        of_owner = self._jobs_of[job.owner]
        del of_owner[job.key]
        if not of_owner:
            del self._jobs_of[job.owner]

    def _slow(self, owner: int) -> _SlowParser:
        return self._root if owner == _ROOT else self._others

    def _moment(self, owner: int) -> float:
        """Return for how long an owner's file is parsed before it counts as slow."""
        now = time.monotonic()
        self._impatient_until = {each: until for each, until in self._impatient_until.items() if until > now}
        if owner in self._impatient_until:
            return _SHORT_MOMENT_SECONDS
        return _ROOT_MOMENT_SECONDS if owner == _ROOT else _MOMENT_SECONDS

    def parsed(self, owners: Container[int]) -> Future[None]:
        """Return a future that is done when these owners' files that are pending now have been parsed."""
        with self._lock:
            return all_done([job.done for job in self._jobs.values() if job.owner in owners])

    def _finish(self, job: _Job, result: _Result) -> None:
        with self._lock:
            self._remove(job)
            self._results[job.key] = result
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
        os.close(job.descriptor)
        self.on_done(job.pids)
        job.done.set_result(None)

    def close(self) -> None:
        self._parser.abort()
        self._quick.stop()
        for queue in (self._root, self._others):
            queue.close()
        for job in self._jobs.values():
            os.close(job.descriptor)
        self._parser.close()


class _SlowParser:
    """Parses files in a thread, and a sandbox, that are begun with the first. Owners take turns."""

    def __init__(self, start_parser: Callable[[], SandboxedParser], finish: Callable[[_Job, _Result], None]) -> None:
        self._start_parser = start_parser
        self._finish = finish
        self._changed = threading.Condition()
        self._queues: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._parser: SandboxedParser | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def put(self, job: _Job) -> None:
        with self._changed:
            self._queues.setdefault(job.owner, deque()).append(job)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stapsdtd-parser", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            if self._parser is not None:
                self._parser.abort()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._finish(job, self._parse(job))
        if self._parser is not None:
            self._parser.close()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._queues and not self._is_closing:
                self._changed.wait()
            if self._is_closing:
                return None
            owner, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[owner] = queue
            return job

    def _parse(self, job: _Job) -> _Result:
        try:
            with self._changed:
                self._parser = self._parser or self._start_parser()
        except OSError as error:
            return error
        return _parsed(self._parser, job, None)


def _parsed(parser: SandboxedParser, job: _Job, seconds: float | None) -> _Result:
    """Raises TooSlowError."""
    try:
        return parser.parse(job.descriptor, job.pid, seconds)
    except TooSlowError:
        raise
    except (ObjectUnreadableError, OSError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - the other files are to be parsed as well
        _log.exception("the parser failed")
        return PARSE.refused("a file", errno.EIO, f"the parser failed: {error}")
