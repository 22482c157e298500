"""Streams of the blocking client; see `streaming.py`."""

from __future__ import annotations

import functools
import math
import threading
from contextlib import closing
from typing import TYPE_CHECKING, ParamSpec, Self, TypeAlias, TypeVar

import grpc

from stapsdtd.client.idle import IdleLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")
Groups: TypeAlias = "Generator[Iterable[_T], None, None]"
"""Yields items in groups, which `one_by_one` takes apart."""


def one_by_one(
    method: Callable[_P, Groups[_T]],
) -> Callable[_P, Generator[_T, None, None]]:
    """Decorate a generator of groups, which are iterated lazily, so that it yields their items."""

    @functools.wraps(method)
    def call(*args: _P.args, **parameters: _P.kwargs) -> Generator[_T, None, None]:
        with closing(method(*args, **parameters)) as groups:
            for group in groups:
                yield from group

    return call


class IdleTimer(IdleLimit):
    """Limits for how long a stream may be idle. A context manager."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds_left < math.inf:
            threading.Thread(target=self._look, name="idle-timer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()

    def _look(self) -> None:
        while not self.is_over() and not self._is_closed.wait(max(self.seconds_left, 0)):
            self.check()

    def limited(self, call: Iterable[_T]) -> Iterator[_T]:
        """Yield a call's responses, until its end or until it is over."""
        try:
            for response in call:
                self.pause()
                yield response
                self.resume()
        except grpc.RpcError:
            if not self.is_over():
                raise
