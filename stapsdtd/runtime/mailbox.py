"""Hand work to a reader thread and wait until it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from stapsdtd.errors import StapsdtdError


class ThreadEndedError(StapsdtdError):
    """The thread that should do the work has ended."""

    def __init__(self) -> None:
        super().__init__("the thread that reads events ended; restart the daemon")


class Mailbox:
    """A queue of jobs for one thread. fileno is readable while there are any."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], None], Future[None]]] = []
        self._is_abandoned = False

    def fileno(self) -> int:
        return self._wake

    def call(self, job: Callable[[], None]) -> None:
        """Have the thread run a job, and wait for it. Raises what the job raises, or ThreadEndedError."""
        self.post(job).result()

    def post(self, job: Callable[[], None]) -> Future[None]:
        """Like call, but return a future instead of waiting."""
        done: Future[None] = Future()
        with self._lock:
            if self._is_abandoned:
                done.set_exception(ThreadEndedError())
                return done
            self._waiting.append((job, done))
            os.eventfd_write(self._wake, 1)
        return done

    def ask(self) -> Future[None]:
        """Return a future that is done once the thread gets to it; ThreadEndedError if the thread has ended."""
        return self.post(lambda: None)

    def abandon(self) -> None:
        """Fail pending and later jobs with ThreadEndedError, since the thread is ending."""
        with self._lock:
            self._is_abandoned = True
            jobs, self._waiting = self._waiting, []
        for _, done in jobs:
            done.set_exception(ThreadEndedError())

    def run(self) -> None:
        """Run the pending jobs in order of posting."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        with self._lock:
            jobs, self._waiting = self._waiting, []
        for job, done in jobs:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)
            else:
                done.set_result(None)

    def close(self) -> None:
        os.close(self._wake)
