"""Futures that are done already, and futures of futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future


def finished() -> Future[None]:
    """Return a future that is done."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


def unfinished() -> Future[None]:
    """Return a future that its waiters cannot cancel: a caller that stops waiting must not stop the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def when_done(outer: Future[Future[None]], work: Callable[[], object]) -> None:
    """Do work, in any thread, when the future that a future yields is done, or there will be none."""

    def on_outer(done: Future[Future[None]]) -> None:
        if done.cancelled() or done.exception() is not None:
            work()
        else:
            done.result().add_done_callback(lambda _: work())

    outer.add_done_callback(on_outer)
