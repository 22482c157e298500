"""Call what takes another process's mmap_lock, which its owner can hold as long as they like.

    control thread ──► worker thread ──► /proc/PID/maps, map_files     no result in 0.1 s: it is looked at later
                       └─ another one for each call that was given up

/proc/PID/maps (before Linux 6.17) and map_files wait for the lock, and mmap of a FUSE file that is open for direct I/O
holds it while the server does not reply. The wait ends with this process (mmap_read_lock_killable), so a thread of its
own may do it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stapsdtd.errors import ObjectPendingError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SECONDS = 0.1
_MOST_SECONDS = 2.0
"""For a call that does not wait for the kernel: on a busy host its thread may not have had its turn."""
_OF_A_USER = 4
_OF_ALL = 32
"""Calls given up that did not end yet; beyond these, who has some is not looked at until one of them ends."""


@dataclass(slots=True, eq=False)
class _Call(Generic[_T]):
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
        """Wait for it."""
        deadline = time.monotonic() + most_seconds
        while not self.done.wait(min(seconds, most_seconds)):
            if time.monotonic() > deadline or (self.thread and _waits_for_the_kernel(self.thread)):
                return False
        return True


class LockedCalls:
    """`call` belongs to one thread. on_free: told in another one of processes that can be looked at again."""

    def __init__(self, seconds: float = _SECONDS, most_seconds: float = _MOST_SECONDS) -> None:
        self.on_free: Callable[[set[int]], None] = lambda _pids: None
        self._seconds = seconds
        self._most_seconds = most_seconds
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call[object] | None] | None = None
        self._late: dict[_Call[object], tuple[int, int]] = {}
        self._waiting: set[int] = set()

    def call(self, pid: int, work: Callable[[], _T], discard: Callable[[_T], None] = lambda _: None) -> _T:
        """Return what work returns. Raises what it raises, and ObjectPendingError where the process holds its lock.

        discard: what becomes of a result that comes too late.
        """
        user = _user_of(pid)
        with self._lock:
            if self._late and self._is_refused(pid, user):
                self._waiting.add(pid)
                raise ObjectPendingError
        call = _Call(work, discard)
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._calls,), name="stapsdtd-maps", daemon=True).start()
        self._calls.put(call)  # type: ignore[arg-type]
        if not call.has_result(self._seconds, self._most_seconds):
            with self._lock:
                if not call.done.is_set():
                    self._late[call] = pid, user  # type: ignore[index]
                    self._waiting.add(pid)
                    # the worker ends with this call
                    self._calls.put(None)
                    self._calls = None
                    _log.info("process %d of uid %d holds the lock of its memory map; it is looked at later", pid, user)
                    raise ObjectPendingError
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def _is_refused(self, pid: int, user: int) -> bool:
        late = list(self._late.values())
        of_user = Counter(each for _, each in late)[user]
        return any(each == pid for each, _ in late) or of_user >= _OF_A_USER or (of_user > 0 and len(late) >= _OF_ALL)

    def _serve(self, calls: queue.SimpleQueue[_Call[object] | None]) -> None:
        while (call := calls.get()) is not None:
            call.run()
            with self._lock:
                call.done.set()
                if self._late.pop(call, None) is None:
                    continue
                free, self._waiting = self._waiting, set()
            if call.error is None:
                call.discard(call.result)
            self.on_free(free)


def _waits_for_the_kernel(thread: int) -> bool:
    """As mmap_read_lock_killable does (TASK_KILLABLE, shown as D)."""
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
