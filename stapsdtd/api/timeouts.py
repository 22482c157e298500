"""Time limits for clients that connect and send nothing, or only trickle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stapsdtd.api.frames import FrameReader


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Limits in seconds, after which a client is disconnected.

    handshake_seconds: for the TLS handshake.
    greeting_seconds: for HTTP/2's preface and SETTINGS, after the handshake.
    request_seconds: for the headers of the first request, after the handshake. A request may take at least as long, and
    at most twice as long, from its first byte to its last.
    """

    handshake_seconds: float = 10.0
    greeting_seconds: float = 10.0
    request_seconds: float = 60.0


DEFAULT_TIMEOUTS = ClientTimeouts()


@contextmanager
def enforced(timeouts: ClientTimeouts, frames: FrameReader, time_out: Callable[[str], None]) -> Iterator[None]:
    """Call time_out, within the context, if the client exceeds a limit, with the reason."""

    def waited(awaited: str, seconds: float) -> None:
        time_out(f"timed out after {seconds:g} s waiting for {awaited}")

    def check(awaited: str, seconds: float, has_arrived: Callable[[], bool]) -> None:
        if not has_arrived():
            waited(awaited, seconds)

    def check_requests(unfinished: frozenset[int]) -> None:
        if unfinished & frames.unfinished:
            waited("the end of a request", timeouts.request_seconds)
            return
        timers[-1] = loop.call_later(timeouts.request_seconds, check_requests, frozenset(frames.unfinished))

    loop = asyncio.get_running_loop()
    checks = (
        ("the HTTP/2 preface and settings", timeouts.greeting_seconds, lambda: frames.is_greeting_over),
        ("a first request", timeouts.request_seconds, lambda: frames.is_over),
    )
    timers = [
        loop.call_later(seconds, check, awaited, seconds, has_arrived) for awaited, seconds, has_arrived in checks
    ]
    timers.append(loop.call_later(timeouts.request_seconds, check_requests, frozenset[int]()))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
