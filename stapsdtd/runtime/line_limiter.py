"""Bounds the lines that clients and traced programs can make the daemon log.

Lines are alike if they are of one kind, from one place in the code, and concern one user. The first ones are written at
once. Those that follow within a minute are counted, and the last of them is written when the minute is over, with their
number: `times=5120`. That begins another minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

SECONDS = 60.0
SHARED_LINES = 20
"""Written at once of lines that concern no user, since everybody's are alike, and of decisions in a client's favour."""
_USERS_LINES = 1
_MAX_WINDOWS = 1000
"""Beyond it, users' lines count as nobody's."""


@dataclass(slots=True)
class _Window:
    """A minute of lines that are alike. left: how many may still be written. last: the last one that was not."""

    ends_at: float
    left: int
    times: int = 0
    last: logging.LogRecord | None = None


class LineLimiter:
    """Not thread-safe. clock: in seconds, as time.monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # in the order in which they end, since all are equally long
        self._windows: dict[Hashable, _Window] = {}

    def admits(self, record: logging.LogRecord) -> bool:
        """Report whether to write a record now; if not, it is counted. Call `due` first."""
        if record.levelno <= logging.DEBUG:
            return True
        user, kind = user_of(record), _kind_of(record)
        key = user, kind
        if key not in self._windows and len(self._windows) >= _MAX_WINDOWS:
            user = None
            key = user, kind
        window = self._windows.get(key)
        if window is None:
            is_first_only = user is not None and record.levelno > logging.INFO
            lines = _USERS_LINES if is_first_only else SHARED_LINES
            window = self._windows[key] = _Window(self._clock() + SECONDS, lines)
        if window.left:
            window.left -= 1
            return True
        window.times += 1
        window.last = _detached(record)
        return False

    def due(self) -> Iterator[logging.LogRecord]:
        """Yield the records to write for minutes that are over."""
        now = self._clock()
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if window.ends_at > now:
                return
            del self._windows[key]
            if window.last is not None:
                self._windows[key] = _Window(now + SECONDS, 0)
                yield _counted(window.last, window.times)

    def rest(self) -> Iterator[logging.LogRecord]:
        """Yield the records to write for minutes that are not over yet."""
        windows, self._windows = self._windows, {}
        yield from (_counted(window.last, window.times) for window in windows.values() if window.last is not None)

    @property
    def seconds_left(self) -> float | None:
        """Return the time until a record is due; None if no line was left out."""
        ends = (window.ends_at for window in self._windows.values() if window.last is not None)
        end = next(ends, None)
        return None if end is None else max(end - self._clock(), 0.0)


def user_of(record: logging.LogRecord) -> object:
    """Return the user that a record concerns, by its fields; None if there is none."""
    values: dict[str, object] = getattr(record, "fields", {})
    return values.get("client", values.get("uid"))


def _kind_of(record: logging.LogRecord) -> Hashable:
    kind = getattr(record, "kind", (record.pathname, record.lineno, getattr(record, "defect", None)))
    return record.name, record.levelno, kind


def _detached(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy that refers to texts alone: an error would keep its frames for a minute, and others may change."""
    detached = logging.makeLogRecord(vars(record))
    detached.msg, detached.args, detached.exc_info = record.getMessage(), None, None
    values: dict[str, object] = getattr(record, "fields", {})
    vars(detached)["fields"] = {name: value if value is None else str(value) for name, value in values.items()}
    return detached


def _counted(record: logging.LogRecord, times: int) -> logging.LogRecord:
    values: dict[str, object] = getattr(record, "fields", {})
    counted = logging.makeLogRecord(vars(record))
    vars(counted)["fields"] = values | {"times": times}
    return counted
