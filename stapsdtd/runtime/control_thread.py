"""The thread that owns the subscriptions and what is armed for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stapsdtd.runtime.slices import MeasuredLoop

_T = TypeVar("_T")


class ControlThread:
    """An event loop in its own thread. slices: see `runtime.slices`; any thread may read them.

    Once the daemon serves, neither it nor the API's loop blocks on the other.
    """

    def __init__(self) -> None:
        self._loop = MeasuredLoop()
        self.slices = self._loop.slices
        self._thread = threading.Thread(target=self._loop.run_forever, name="stapsdtd-control", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], _T]) -> _T:
        """Do work in the thread, and block until it is done: for making what belongs to its loop."""

        async def within() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(within(), self._loop).result()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Do work in the thread. Return what it returns, or raise what it raises."""
        done: Future[_T] = Future()

        async def within() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        asyncio.run_coroutine_threadsafe(within(), self._loop)
        outcome = asyncio.wrap_future(done)
        # a caller that gave up does not care how it ended
        outcome.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(outcome)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self) -> Future[None]:
        """Return a future that is done once the thread has finished everything submitted before."""

        async def nothing() -> None:
            pass

        return asyncio.run_coroutine_threadsafe(nothing(), self._loop)
