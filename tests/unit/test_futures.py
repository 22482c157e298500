"""Futures of several and of others."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from stapsdtd.runtime.futures import all_done, finished, unfinished, when_done


def test_all_done_waits_for_each_whatever_becomes_of_it() -> None:
    assert all_done([]).done()
    futures: list[Future[int]] = [Future() for _ in range(3)]
    done = all_done(futures)
    futures[1].set_result(1)
    assert futures[0].cancel()
    assert not done.done()
    futures[2].set_exception(ZeroDivisionError())
    assert done.result(0) is None


def test_all_done_of_many_threads() -> None:
    futures = [unfinished() for _ in range(50)]
    done = all_done(futures)
    threads = [threading.Thread(target=future.set_result, args=(None,)) for future in futures]
    for thread in threads:
        thread.start()
    done.result(20)
    for thread in threads:
        thread.join()


def test_when_done() -> None:
    told: list[str] = []
    outer: Future[Future[None]] = Future()
    inner = unfinished()
    when_done(outer, lambda: told.append("inner"))
    outer.set_result(inner)
    assert told == []
    inner.set_result(None)
    failed: Future[Future[None]] = Future()
    when_done(failed, lambda: told.append("failed"))
    failed.set_exception(ZeroDivisionError())
    cancelled: Future[Future[None]] = Future()
    when_done(cancelled, lambda: told.append("cancelled"))
    cancelled.cancel()
    assert told == ["inner", "failed", "cancelled"]
    assert finished().done()


def test_waiters_cannot_cancel_what_others_wait_for() -> None:
    assert not unfinished().cancel()
