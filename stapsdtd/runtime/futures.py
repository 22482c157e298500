"""Futures that are done already, of several futures, and of a future's future."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from typing import TypeVar

_T = TypeVar("_T")


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


def followed_by(done: Future[None], result: Callable[[], _T]) -> Future[_T]:
    """Return a future that is done when another one is, with a result that is made then, or with that one's error."""
    following: Future[_T] = Future()
    following.set_running_or_notify_cancel()

    def follow(followed: Future[None]) -> None:
        if followed.cancelled():
            following.set_exception(CancelledError())
        elif error := followed.exception():
            following.set_exception(error)
        else:
            following.set_result(result())

    once_done(done, follow)
    return following


def once_done(future: Future[_T], call: Callable[[Future[_T]], object]) -> None:
    """Call something, in any thread, when a future is done, and let go of it then.

    A future keeps its callbacks. One that refers to what has the future would be a cycle, of which only a garbage
    collection disposes: that stops every thread for 0.3 s where a client's subscriptions had 50,000 sites.
    """
    calls = [call]

    def on_done(done: Future[_T]) -> None:
        calls.pop()(done)

    future.add_done_callback(on_done)


def all_done(futures: Collection[Future[_T]]) -> Future[None]:
    """Return a future that is done when all of these are, whatever became of them."""
    if not futures:
        return finished()
    done = unfinished()
    left = itertools.count(len(futures) - 1, -1)

    def on_one(_: Future[_T]) -> None:
        # next() is atomic, and the futures are other threads'
        if next(left) == 0:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(on_one)
    return done


def pass_on(done: Future[_T], other: Future[_T]) -> None:
    """Settle another future as one that is done."""
    if done.cancelled():
        other.set_exception(CancelledError())
    elif error := done.exception():
        other.set_exception(error)
    else:
        other.set_result(done.result())


def when_done(outer: Future[Future[None]], work: Callable[[], object]) -> None:
    """Do work, in any thread, when the future that a future yields is done, or there will be none."""

    def on_outer(done: Future[Future[None]]) -> None:
        if done.cancelled() or done.exception() is not None:
            work()
        else:
            done.result().add_done_callback(lambda _: work())

    outer.add_done_callback(on_outer)
