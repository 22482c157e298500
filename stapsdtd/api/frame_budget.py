"""How many frames, requests and bytes of headers a client may send a second, over all of its connections.

The role's requests a second are answered, further ones with RESOURCE_EXHAUSTED, up to a multiple of them. Whoever sends
more than that is disconnected: refusing a request costs the daemon a tenth of a millisecond, too.
"""

from __future__ import annotations

from collections.abc import Callable

from stapsdtd.api.http2 import ErrorCode, Http2Error
from stapsdtd.runtime.shares import Shares
from stapsdtd.sessions.token_bucket import TokenBucket, TokenBuckets

CONNECTION_FRAMES, CLIENT_FRAMES = 5000, 10_000
"""A second. A client that streams 250 MB/s sends 190; gRPC takes up to 3 us for one."""
REQUESTS_FACTOR, LEAST_REQUESTS = 4, 200
"""Requests a second: for each that the role allows, and whatever it allows."""
HEADER_BYTES_A_REQUEST = 1024
"""Both as sent and as fields. Clients send 100 to 700; decoding takes up to 0.1 us for one."""


class FrameBudget:
    """What one connection may send. Runs on the API's event loop.

    requests: how many a second the client's role allows; None for no limit, on frames and headers neither.
    shared: the buckets of all clients.
    """

    def __init__(
        self, client: str, requests: int | None, shared: TokenBuckets, shares: Shares, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._shares = shares
        self._requests = None if requests is None else max(requests * REQUESTS_FACTOR, LEAST_REQUESTS)
        self._shared = shared
        self._frames = TokenBucket(CONNECTION_FRAMES, clock)

    def take_frames(self, count: int) -> None:
        """Charge frames. Raises Http2Error, like the others, if the client sends more than it may."""
        self._shares.count_frames(self._client, count)
        if self._requests is not None:
            if self._frames.take(count) < count:
                raise _calm(f"one connection of {self._client}", CONNECTION_FRAMES, "frames")
            self._take("frames", CLIENT_FRAMES, count)

    def take_request(self) -> None:
        if self._requests is not None:
            self._take("requests", self._requests, 1)

    def take_header_bytes(self, count: int) -> None:
        if self._requests is not None:
            self._take("bytes of headers", self._requests * HEADER_BYTES_A_REQUEST, count)

    def _take(self, what: str, per_second: int, count: int) -> None:
        if not self._shared.take((self._client, what), per_second, count):
            raise _calm(self._client, per_second, what)


def _calm(who: str, per_second: int, what: str) -> Http2Error:
    return Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{who} sends more than {per_second} {what} a second")
