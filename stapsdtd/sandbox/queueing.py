"""Parses quick files at once, and slow ones in threads of their own, so that no caller waits for them.

file ──► parse for a moment ──too slow──► queue of the file's owner ──► thread ──► on_done
(root's have a thread of their own)
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from stapsdtd.errors import ObjectPendingError, ObjectUnreadableError
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import SandboxedParser, TooSlowError

_PATIENCE_SECONDS = 0.25
_LITTLE_PATIENCE_SECONDS = 0.02
"""For an owner who had a file that took longer, ..."""
_IMPATIENT_SECONDS = 10.0
"""... for so long."""
_MAX_WAITING_PER_OWNER = 64
_MAX_RESULTS = 64
_ROOT = 0

_Key = tuple[int, int, int, int]
_Result = ParsedObject | ObjectUnreadableError | OSError


@dataclass(slots=True)
class _Job:
    """pid: of a process that maps the file. pids: those to be looked at again when it is parsed."""

    key: _Key
    descriptor: int
    pid: int
    pids: set[int]


class QueueingParser:
    """All methods may be called from any thread. on_done: called in another one with the processes that map what has
    been parsed.
    """

    def __init__(self, parser: SandboxedParser) -> None:
        self._parser = parser
        self._parsing = threading.Lock()
        self.on_done: Callable[[set[int]], None] = lambda _pids: None
        self._lock = threading.Lock()
        self._jobs: dict[_Key, _Job] = {}
        self._results: OrderedDict[_Key, _Result] = OrderedDict()
        self._impatient_until: dict[int, float] = {}
        self._root = _SlowParser(self._finish)
        self._others = _SlowParser(self._finish)

    def parse(self, descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        """As `SandboxedParser.parse`, and raises ObjectPendingError for what takes longer; ask again then.

        owner: whose the file is, where that is not the open file's own.
        """
        status = os.fstat(descriptor)
        owner = status.st_uid if owner is None else owner
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        queue = self._root if owner == _ROOT else self._others
        with self._lock:
            result = self._results.pop(key, None)
            if result is None and (job := self._jobs.get(key) or queue.last_of_many(owner)):
                job.pids.add(pid)
                raise ObjectPendingError
            patience = self._patience(owner)
        if isinstance(result, Exception):
            raise result
        if result is not None:
            return result
        if self._parsing.acquire(timeout=patience):
            try:
                return self._parser.parse(descriptor, pid, patience)
            except TooSlowError:
                with self._lock:
                    self._impatient_until[owner] = time.monotonic() + _IMPATIENT_SECONDS
            finally:
                self._parsing.release()
        with self._lock:
            if key not in self._jobs:
                self._jobs[key] = _Job(key, os.dup(descriptor), pid, {pid})
                queue.put(owner, self._jobs[key])
            self._jobs[key].pids.add(pid)
        raise ObjectPendingError

    def _patience(self, owner: int) -> float:
        now = time.monotonic()
        self._impatient_until = {each: until for each, until in self._impatient_until.items() if until > now}
        return _LITTLE_PATIENCE_SECONDS if owner in self._impatient_until else _PATIENCE_SECONDS

    def root_parsed(self) -> Future[None]:
        """Return a future that is done when root's files that are queued now have been parsed, which may be waited for:
        whoever can write those can stop the daemon anyway.
        """
        return self._root.idle()

    def _finish(self, job: _Job, result: _Result) -> None:
        with self._lock:
            del self._jobs[job.key]
            self._results[job.key] = result
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
        os.close(job.descriptor)
        self.on_done(job.pids)

    def close(self) -> None:
        for queue in (self._root, self._others):
            queue.close()
        for job in self._jobs.values():
            os.close(job.descriptor)
        self._parser.close()


class _SlowParser:
    """Parses files in a thread, and a sandbox, that are begun with the first. Owners take turns."""

    def __init__(self, finish: Callable[[_Job, _Result], None]) -> None:
        self._finish = finish
        self._changed = threading.Condition()
        self._queues: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._parser: SandboxedParser | None = None
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._idle: list[Future[None]] = []
        self._is_closing = False

    def last_of_many(self, owner: int) -> _Job | None:
        """Return what is to be parsed before an owner's queue takes more; None if it does."""
        with self._changed:
            queue = self._queues.get(owner)
            return queue[-1] if queue and len(queue) >= _MAX_WAITING_PER_OWNER else None

    def put(self, owner: int, job: _Job) -> None:
        with self._changed:
            self._queues.setdefault(owner, deque()).append(job)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stapsdtd-parser", daemon=True)
            self._thread.start()

    def idle(self) -> Future[None]:
        """Return a future that is done when nothing is queued."""
        idle: Future[None] = Future()
        idle.set_running_or_notify_cancel()
        with self._changed:
            if self._queues or self._is_busy:
                self._idle.append(idle)
            else:
                idle.set_result(None)
        return idle

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            if self._parser is not None:
                self._parser.abort()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            self._parser = SandboxedParser()
        while (job := self._next()) is not None:
            self._finish(job, self._parse(job))
        self._parser.close()

    def _next(self) -> _Job | None:
        with self._changed:
            self._is_busy = False
            while not self._queues and not self._is_closing:
                idle, self._idle = self._idle, []
                for done in idle:
                    done.set_result(None)
                self._changed.wait()
            if self._is_closing:
                return None
            self._is_busy = True
            owner, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[owner] = queue
            return job

    def _parse(self, job: _Job) -> _Result:
        assert self._parser is not None  # noqa: S101 - made before the first job is taken
        try:
            return self._parser.parse(job.descriptor, job.pid)
        except (ObjectUnreadableError, OSError) as error:
            return error
