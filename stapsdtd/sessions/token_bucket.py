"""Token buckets that hold one second's worth of tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

_MAX_BUCKETS = 1000


class TokenBucket:
    """Full at first. Safe for use by several threads. clock: in seconds, as time.monotonic."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(per_second)
        self._filled_at = clock()

    def take(self, wanted: int) -> int:
        """Take up to that many tokens. Return how many were granted."""
        with self._lock:
            self._fill()
            granted = min(wanted, int(self._tokens))
            self._tokens -= granted
        return granted

    @property
    def is_full(self) -> bool:
        """Report whether nobody has taken any for a while."""
        with self._lock:
            self._fill()
            return self._tokens >= self.per_second

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self.per_second, self._tokens + (now - self._filled_at) * self.per_second)
        self._filled_at = now


class TokenBuckets:
    """A bucket for each key that took tokens lately. Called from one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[Hashable, TokenBucket] = {}

    def take(self, key: Hashable, per_second: float, wanted: int = 1) -> bool:
        """Take tokens from a key's bucket, which holds that many. Report whether it had them all."""
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full}
        bucket = self._buckets.get(key)
        if bucket is None or bucket.per_second != per_second:
            bucket = self._buckets[key] = TokenBucket(per_second, self._clock)
        return bucket.take(wanted) == wanted
