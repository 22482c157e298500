"""Work for a reader thread: handed over by another thread, which waits until it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Jobs:
    """fileno is readable while there is work."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], None], Future[None]]] = []

    def fileno(self) -> int:
        return self._wake

    def call(self, job: Callable[[], None]) -> None:
        """Have a job done by the thread that runs them; raises what it raises."""
        done: Future[None] = Future()
        with self._lock:
            self._waiting.append((job, done))
        os.eventfd_write(self._wake, 1)
        done.result()

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
