"""Parses what is parsed quickly at once, and what is not in a thread of its own, so that nobody waits for it.

    file ──► is it root's? ──yes──► parse
                 └─no─► parse for a moment ──too slow──► wait in the line of the file's owner ──► thread ──► told

Root's files are parsed at once however long it takes: who can write those can stop the daemon anyway.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from stapsdtd.errors import ObjectPendingError, ObjectUnreadableError
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import SandboxedParser, TooSlowError

_PATIENCE_SECONDS = 0.25
_LITTLE_PATIENCE_SECONDS = 0.02
"""For an owner who had a file that took longer, ..."""
_IMPATIENT_SECONDS = 10.0
"""... for so long."""
_WAITING_OF_AN_OWNER = 64
_ANSWERS_KEPT = 64
_ROOT = 0

_Key = tuple[int, int, int, int]
_Answer = ParsedObject | ObjectUnreadableError | OSError


@dataclass(slots=True)
class _Job:
    """pid: of a process that maps the file. pids: who is told when it is done."""

    key: _Key
    descriptor: int
    pid: int
    pids: set[int]


class QueueingParser:
    """`parse` and `close` belong to one thread. on_done: told in another one which processes map what is parsed now."""

    def __init__(self, parser: SandboxedParser) -> None:
        self._parser = parser
        self.on_done: Callable[[set[int]], None] = lambda _pids: None
        self._lock = threading.Condition()
        self._lines: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._jobs: dict[_Key, _Job] = {}
        self._answers: OrderedDict[_Key, _Answer] = OrderedDict()
        self._impatient_until: dict[int, float] = {}
        self._slow: SandboxedParser | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def parse(self, descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        """As `SandboxedParser.parse`, and raises ObjectPendingError for what takes longer; ask again then.

        owner: whose the file is, where that is not the open file's own.
        """
        status = os.fstat(descriptor)
        owner = status.st_uid if owner is None else owner
        if owner == _ROOT:
            return self._parser.parse(descriptor, pid)
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        with self._lock:
            answer = self._answers.pop(key, None)
            if answer is None and (job := self._jobs.get(key) or self._last_of_many(owner)):
                job.pids.add(pid)
                raise ObjectPendingError
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        try:
            return self._parser.parse(descriptor, pid, self._patience(owner))
        except TooSlowError:
            self._impatient_until[owner] = time.monotonic() + _IMPATIENT_SECONDS
            self._wait_in_line(_Job(key, os.dup(descriptor), pid, {pid}), owner)
        raise ObjectPendingError

    def _patience(self, owner: int) -> float:
        now = time.monotonic()
        self._impatient_until = {each: until for each, until in self._impatient_until.items() if until > now}
        return _LITTLE_PATIENCE_SECONDS if owner in self._impatient_until else _PATIENCE_SECONDS

    def _last_of_many(self, owner: int) -> _Job | None:
        """What is to be done before an owner's line takes more; None where it does."""
        line = self._lines.get(owner)
        return line[-1] if line and len(line) >= _WAITING_OF_AN_OWNER else None

    def _wait_in_line(self, job: _Job, owner: int) -> None:
        with self._lock:
            self._lines.setdefault(owner, deque()).append(job)
            self._jobs[job.key] = job
            self._lock.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stapsdtd-parser", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._lock.notify()
            if self._slow is not None:
                self._slow.abort()
        if self._thread is not None:
            self._thread.join()
        for job in self._jobs.values():
            os.close(job.descriptor)
        self._parser.close()

    def _run(self) -> None:
        with self._lock:
            self._slow = SandboxedParser()
        while (job := self._next()) is not None:
            answer = self._answer(job)
            with self._lock:
                del self._jobs[job.key]
                self._answers[job.key] = answer
                while len(self._answers) > _ANSWERS_KEPT:
                    self._answers.popitem(last=False)
            os.close(job.descriptor)
            self.on_done(job.pids)
        self._slow.close()

    def _next(self) -> _Job | None:
        """The owners take turns."""
        with self._lock:
            while not self._lines and not self._is_closing:
                self._lock.wait()
            if self._is_closing:
                return None
            owner, line = self._lines.popitem(last=False)
            job = line.popleft()
            if line:
                self._lines[owner] = line
            return job

    def _answer(self, job: _Job) -> _Answer:
        assert self._slow is not None  # noqa: S101 - made before the first job is taken
        try:
            return self._slow.parse(job.descriptor, job.pid)
        except (ObjectUnreadableError, OSError) as error:
            return error
