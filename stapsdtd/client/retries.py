"""When to repeat what failed; no I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from stapsdtd.client.errors import (
    Call,
    ClientError,
    LimitReachedError,
    RequestFailedError,
    ServerUnavailableError,
    StillSubscribedError,
    from_rpc_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 1.0
_UNSUBSCRIBE_SECONDS = 10.0
"""The quota is per second, so a client refused for this long shares it with others that use it up all the time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A stream that broke or ended. pause: seconds to wait before it is opened again. told: what to tell the caller.
    is_gone: there is no subscription any more.
    """

    pause: float = 0.0
    told: ClientError | None = None
    is_gone: bool = False


class StreamRetry:
    """Decides when to reopen a broken stream: for so many seconds, with growing pauses."""

    def __init__(self, call: Call, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self.seconds = seconds
        self._clock = clock
        self._deadline: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    def failed(self) -> None:
        """Note that the attempts begin now, unless they have begun before."""
        if self._deadline is None:
            self._deadline = self._clock() + self.seconds

    def succeeded(self) -> None:
        self._deadline = None
        self._pause = _FIRST_PAUSE_SECONDS

    def after(
        self, error: grpc.RpcError, *passing: type[RequestFailedError]
    ) -> tuple[float, RequestFailedError | None]:
        """Return the seconds to wait before the next attempt, and the error if it is the first since a success.

        passing: errors of which another attempt helps, besides unavailability.

        Raises the error as a ClientError if another attempt would not help.
        """
        cause = from_rpc_error(error, self._call)
        is_first = self._deadline is None
        self.failed()
        if not isinstance(cause, (ServerUnavailableError, *passing)) or self._clock() >= (self._deadline or 0):
            raise cause from error
        pause, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return pause, cause if is_first else None

    def no_more(self, error: grpc.RpcError) -> NoReturn:
        """Raises the error as a ClientError."""
        raise from_rpc_error(error, self._call) from error


class UnsubscribeRetry:
    """Decides when to repeat an Unsubscribe that exceeded the client's request quota; else the probes stay armed."""

    def __init__(self, call: Call, lease_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._deadline = clock() + min(_UNSUBSCRIBE_SECONDS, call.timeout_seconds or _UNSUBSCRIBE_SECONDS)
        self._pause = _FIRST_PAUSE_SECONDS

    def after(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises the error as a ClientError if another attempt would not help.
        """
        cause = from_rpc_error(error, self._call)
        if not isinstance(cause, LimitReachedError):
            raise cause from error
        if self._clock() + self._pause > self._deadline:
            lease = f"its lease expires, {self._lease_seconds} s after its stream closed"
            raise StillSubscribedError(cause.code, cause.details, f"{cause}; it stays armed until {lease}") from error
        pause, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return pause
