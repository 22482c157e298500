"""Streams of the asyncio client: reading that was cancelled goes on, and a stream that is idle ends.

`blocking_streaming.py` has the same for the blocking client.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, ParamSpec, Self, TypeAlias, TypeVar

from stapsdtd.client.idle import IdleLimit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")
Groups: TypeAlias = "AsyncGenerator[Iterable[_T], None]"
"""Yields items in groups, which `one_by_one` takes apart."""


class Resumable(AsyncIterator[_T], Generic[_T]):
    """Iterates over the items of groups. Cancelling `anext()`, as `asyncio.wait_for` does, neither ends it nor loses an
    item: the next call goes on.
    """

    def __init__(self, groups: Groups[_T]) -> None:
        self._groups = groups
        self._items: Iterator[_T] = iter(())
        self._reading: asyncio.Task[Iterable[_T] | None] | None = None

    async def __anext__(self) -> _T:
        while True:
            for item in self._items:
                return item
            if self._reading is None:
                self._reading = asyncio.create_task(_next_of(self._groups))
            # unlike awaiting the task, this does not cancel it
            await asyncio.wait([self._reading])
            done, self._reading = self._reading, None
            group = done.result()
            if group is None:
                raise StopAsyncIteration
            self._items = iter(group)

    async def aclose(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])
            with suppress(asyncio.CancelledError):
                reading.exception()
        await self._groups.aclose()

    def __del__(self) -> None:
        reading = self._reading
        if reading is None:
            return
        if reading.done():
            # nobody wants it, which is no reason to complain
            if not reading.cancelled():
                reading.exception()
        elif not reading.get_loop().is_closed():
            reading.cancel()


async def _next_of(groups: Groups[_T]) -> Iterable[_T] | None:
    return await anext(groups, None)


def one_by_one(method: Callable[_P, Groups[_T]]) -> Callable[_P, Resumable[_T]]:
    """Decorate a generator of groups, which are iterated lazily, so that it yields their items."""

    @functools.wraps(method)
    def call(*args: _P.args, **parameters: _P.kwargs) -> Resumable[_T]:
        return Resumable(method(*args, **parameters))

    return call


class IdleTimer(IdleLimit):
    """Limits for how long a stream may be idle. A context manager."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self.seconds_left < math.inf:
            self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(max(self.seconds_left, 0), self._look)

    def _look(self) -> None:
        self.check()
        if not self.is_over():
            self._schedule()

    async def limited(self, call: AsyncIterable[_T]) -> AsyncIterator[_T]:
        """Yield a call's responses, until its end or until it is over."""
        try:
            async for response in call:
                self.pause()
                yield response
                self.resume()
        except asyncio.CancelledError:
            if not self.is_over():
                raise
