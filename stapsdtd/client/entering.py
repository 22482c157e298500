"""Lets a coroutine's result be entered without awaiting it first: `async with client.subscribe(…)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

_P = ParamSpec("_P")
_T = TypeVar("_T", bound="AbstractAsyncContextManager[object]")


class Entering(Coroutine[object, None, _T], Generic[_T]):
    """A coroutine whose result is an async context manager, and that is one itself: entering it awaits it."""

    def __init__(self, coroutine: Coroutine[object, None, _T]) -> None:
        self._coroutine = coroutine
        self._entered = AsyncExitStack()

    def send(self, value: None) -> object:
        return self._coroutine.send(value)

    def throw(self, *error: object) -> object:
        return self._coroutine.throw(*error)  # type: ignore[call-overload]

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[object, None, _T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> _T:
        result = await self._coroutine
        await self._entered.enter_async_context(result)
        return result

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._entered.__aexit__(kind, error, trace)


def entering(method: Callable[_P, Coroutine[object, None, _T]]) -> Callable[_P, Entering[_T]]:
    """Decorate an asynchronous method whose result is a context manager."""

    @functools.wraps(method)
    def call(*args: _P.args, **parameters: _P.kwargs) -> Entering[_T]:
        return Entering(method(*args, **parameters))

    return call
