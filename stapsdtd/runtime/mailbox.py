"""Work for a reader thread: handed over by another thread, which waits until it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from stapsdtd.errors import StapsdtdError


class ThreadEndedError(StapsdtdError):
    """The thread that should do it is no more."""

    def __init__(self) -> None:
        super().__init__("the thread that reads events ended; restart the daemon")


class Mailbox:
    """fileno is readable while there is work."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], None], Future[None]]] = []
        self._is_abandoned = False

    def fileno(self) -> int:
        return self._wake

    def call(self, job: Callable[[], None]) -> None:
        """Have a job done by the thread that runs them; raises what it raises, and ThreadEndedError."""
        self.post(job).result()

    def post(self, job: Callable[[], None]) -> Future[None]:
        """The same without waiting for it."""
        done: Future[None] = Future()
        with self._lock:
            if self._is_abandoned:
                done.set_exception(ThreadEndedError())
                return done
            self._waiting.append((job, done))
            os.eventfd_write(self._wake, 1)
        return done

    def ask(self) -> Future[None]:
        """Answer what is done when the thread comes round to it; it has a ThreadEndedError where there is none."""
        return self.post(lambda: None)

    def abandon(self) -> None:
        """Run nothing any more, since the thread ends: who waits, or comes later, is told so."""
        with self._lock:
            self._is_abandoned = True
            jobs, self._waiting = self._waiting, []
        for _, done in jobs:
            done.set_exception(ThreadEndedError())

    def run(self) -> None:
        """Do what is waiting, in the order of the calls."""
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
