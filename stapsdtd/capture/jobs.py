"""Work for a reader thread: handed over by another thread, which waits until it is done."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from stapsdtd.errors import StapsdtdError

_STALL_SECONDS = 15.0
"""Longer than what a thread of the daemon may have to do in one go: to parse a file takes 10 s at most."""


class ThreadEndedError(StapsdtdError):
    """The thread that should do it is no more."""

    def __init__(self) -> None:
        super().__init__("the thread that reads events ended; restart the daemon")


class Jobs:
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


class Pulse:
    """Whether a thread still does what it is asked for. Nobody waits for it here."""

    def __init__(self, name: str, ask: Callable[[], Future[None]], stall_seconds: float = _STALL_SECONDS) -> None:
        """ask: has the thread do nothing, and answers when it has."""
        self._name = name
        self._ask = ask
        self._stall_seconds = stall_seconds
        self._asked = 0.0
        self._answer: Future[None] | None = None

    def problem(self) -> str | None:
        """Answer what is wrong with it, the same as long as it is the same; to be called every now and then."""
        now = time.monotonic()
        if self._answer is None or self._answer.done():
            self._asked, self._answer = now, self._ask()
        if self._answer.done():
            error = self._answer.exception()
            return str(error) if error else None
        if now - self._asked > self._stall_seconds:
            return f"{self._name} has been busy or hanging for more than {self._stall_seconds:g} s"
        return None
