"""When a stream has been idle for so long that it is to end; no I/O."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


FromSeq: TypeAlias = "int | Mapping[str, int] | None"
"""Where to begin: at this number, in all clauses or by their tag; None to go on."""


class Waiting(TypedDict, total=False):
    """For how long iterating over a stream goes on, and after what.

    idle_seconds: end, without an error, once nothing of what is yielded came for so long; another call goes on.
    resubscribe: subscribe again if the server was restarted, which is waited for, for two minutes at most.
        `restarts` of the subscription has the times in between, and messages() yields each one as `Resubscribed`.
        Cumulative snapshots go on from the last one before.
    """

    idle_seconds: float | None
    resubscribe: bool


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class IdleLimit:
    """Ends a stream of which nothing came for so many seconds; None for no limit. What the reader does in between does
    not count.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = math.inf if seconds is None else seconds
        self._deadline = clock() + self._seconds
        self._left: float | None = None
        self._call: Cancellable | None = None
        self._is_over = False

    @property
    def seconds_left(self) -> float:
        """How long to wait before `check` at least; less than `seconds` only if the stream is waited for."""
        return min(self._seconds, self._deadline - self._clock())

    def is_over(self) -> bool:
        """Report whether that is so."""
        return self._is_over

    def pause(self) -> None:
        """The reader has something to do."""
        self._left, self._deadline = self._deadline - self._clock(), math.inf

    def heard(self) -> None:
        """What the reader waits for came."""
        self._left = self._seconds

    def resume(self) -> None:
        """The reader waits again."""
        self._deadline = self._clock() + (self._seconds if self._left is None else self._left)

    def watch(self, call: Cancellable) -> None:
        """Cancel this call when it is over."""
        self._call = call
        if self._is_over:
            call.cancel()

    def check(self) -> None:
        if self._clock() >= self._deadline:
            self._is_over = True
            if self._call is not None:
                self._call.cancel()
