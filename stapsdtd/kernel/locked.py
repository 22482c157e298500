"""Make calls that take another process's mmap_lock, which that process can hold indefinitely.

    control thread ──► worker thread ──► /proc/PID/maps, map_files     no result soon: the process is retried, and a
                       │                                               late result may be kept for that
                       └─ replaced by a new one after each call that times out

/proc/PID/maps (before Linux 6.17) and map_files wait for the lock, and mmap of a FUSE file opened for direct I/O holds
it while the server does not reply. The wait ends when this process is killed (mmap_read_lock_killable), so a worker
thread can be left waiting.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from stapsdtd.errors import ObjectPendingError
from stapsdtd.runtime.logs import fields

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SECONDS = 0.1
_SECONDS_FOR_USERS = 0.02
"""For processes that are not root's: a user's memory map may be long."""
_MAX_KEPT = 32
_MAX_SECONDS = 2.0
"""Timeout while the call is not blocked in the kernel: on a busy host its thread may not have been scheduled yet."""
_MAX_LATE_PER_USER = 4
_MAX_LATE = 32
"""Calls that timed out and have not returned. Beyond these limits, users with any are refused until one returns."""


@dataclass(slots=True, eq=False)
class _Call(Generic[_T]):
    pid: int
    kind: str
    work: Callable[[], _T]
    discard: Callable[[_T], None]
    done: threading.Event = field(default_factory=threading.Event)
    thread: int = 0
    result: _T | None = None
    error: BaseException | None = None

    def run(self) -> None:
        self.thread = threading.get_native_id()
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self.error = error

    def has_result(self, seconds: float, most_seconds: float) -> bool:
        """Wait for the result and report whether it came in time."""
        deadline = time.monotonic() + most_seconds
        while not self.done.wait(min(seconds, most_seconds)):
            if time.monotonic() > deadline or (self.thread and _is_uninterruptible(self.thread)):
                return False
        return True


class LockedCalls:
    """Only one thread may use `call`. on_free is called from worker threads with the pids that can be retried."""

    def __init__(self, seconds: float = _SECONDS, most_seconds: float = _MAX_SECONDS) -> None:
        self.on_free: Callable[[set[int]], None] = lambda _pids: None
        self._seconds = seconds
        self._most_seconds = most_seconds
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call[object] | None] | None = None
        self._late: dict[_Call[object], tuple[int, int]] = {}
        self._waiting: set[int] = set()
        self._kept: OrderedDict[tuple[int, str], object] = OrderedDict()

    def call(
        self, pid: int, work: Callable[[], _T], discard: Callable[[_T], None] = lambda _: None, *, kept_as: str = ""
    ) -> _T:
        """Run work in a worker and return its result or raise its error; ObjectPendingError if process pid holds its
        lock, or the work takes long. kept_as: a kind of work whose result is for the next call of this kind if it comes
        too late; otherwise discard disposes of it.
        """
        user = _user_of(pid)
        with self._lock:
            if (pid, kept_as) in self._kept:
                return cast("_T", self._kept.pop((pid, kept_as)))
            if self._late and self._is_refused(pid, user):
                self._waiting.add(pid)
                raise ObjectPendingError
        call = _Call(pid, kept_as, work, discard)
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._calls,), name="stapsdtd-maps", daemon=True).start()
        self._calls.put(call)  # type: ignore[arg-type]
        most_seconds = min(self._most_seconds, _SECONDS_FOR_USERS) if user else self._most_seconds
        if not call.has_result(self._seconds, most_seconds):
            with self._lock:
                if not call.done.is_set():
                    self._late[call] = pid, user  # type: ignore[index]
                    self._waiting.add(pid)
                    # the worker exits after this call
                    self._calls.put(None)
                    self._calls = None
                    held = "process %d holds the lock of its memory map, which may be long; retrying later"
                    _log.info(held, pid, extra=fields(uid=user))
                    raise ObjectPendingError
        error, call.error = call.error, None
        if error is None:
            return call.result  # type: ignore[return-value]
        try:
            raise error
        finally:
            # it refers to this frame: a cycle, of which only a garbage collection would dispose
            del error

    def _is_refused(self, pid: int, user: int) -> bool:
        late = list(self._late.values())
        of_user = Counter(late_user for _, late_user in late)[user]
        return (
            any(late_pid == pid for late_pid, _ in late)
            or of_user >= _MAX_LATE_PER_USER
            or (of_user > 0 and len(late) >= _MAX_LATE)
        )

    def _serve(self, calls: queue.SimpleQueue[_Call[object] | None]) -> None:
        while (call := calls.get()) is not None:
            call.run()
            with self._lock:
                call.done.set()
                if self._late.pop(call, None) is None:
                    continue
                free, self._waiting = self._waiting, set()
                is_kept = bool(call.kind) and call.error is None
                if is_kept:
                    self._kept[call.pid, call.kind] = call.result
                    while len(self._kept) > _MAX_KEPT:
                        self._kept.popitem(last=False)
            if call.error is None and not is_kept:
                call.discard(call.result)
            self.on_free(free)


def _is_uninterruptible(thread: int) -> bool:
    """Report whether a thread is in state D, as in mmap_read_lock_killable (TASK_KILLABLE)."""
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].startswith(b"D")
    except OSError:
        return False


def _user_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return 0
