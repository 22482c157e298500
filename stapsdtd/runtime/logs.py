"""The daemon's log format: a message for people, followed by key=value fields for programs.

2026-11-21 18:00:00,123 INFO stapsdtd.access: subscribe allowed client="uid 1000" role=user sites=3

Whatever others choose, be it a path, a program's name or how often something fails, makes no line of its own, no long
line, and only so many lines.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, TextIO

from stapsdtd.errors import StapsdtdError
from stapsdtd.runtime.line_limiter import LineLimiter
from stapsdtd.runtime.text import escape

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_log = logging.getLogger(__name__)
_MAX_DEFECTS = 1000
_MAX_MESSAGE_CHARACTERS, _MAX_FIELD_CHARACTERS = 8192, 2048
"""A path has up to 4,096 characters, and more once it is escaped."""
_INDENT = "  "
"""Before each line of a traceback, whose error may have lines that look like records."""

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""syslog priorities, which journald reads from the start of a line (sd-daemon(3))."""

_BARE = re.compile(r"[!#-<>-\[\]-~]+")


def set_up(level: str) -> None:
    """Log to standard error. For journald, which records times itself, prefix priorities instead.

    Call this before gRPC is imported.
    """
    # what it writes to standard error by itself is about clients, whose number of lines nobody limits
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = LogHandler(sys.stderr)
    handler.setFormatter(Formatter("%(name)s: %(message)s" if _is_journal() else _WITH_TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_relevant)
    threading.excepthook = _log_of_thread


class _Timer(Protocol):
    def start(self) -> None: ...

    def cancel(self) -> None: ...


def _timer(seconds: float, work: Callable[[], None]) -> _Timer:
    timer = threading.Timer(seconds, work)
    timer.name, timer.daemon = "stapsdtd-log", True
    return timer


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes what its limiter admits, and how many lines were left out once their minute is over."""

    def __init__(
        self,
        stream: TextIO,
        limiter: LineLimiter | None = None,
        make_timer: Callable[[float, Callable[[], None]], _Timer] = _timer,
    ) -> None:
        super().__init__(stream)
        self.addFilter(Brevity())
        self._limiter = limiter or LineLimiter()
        self._make_timer = make_timer
        self._timer: _Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        self._write(self._limiter.due())
        if self._limiter.admits(record):
            super().emit(record)
        else:
            self._wake_up_later()

    def close(self) -> None:
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
            self._write(self._limiter.rest())
        super().close()

    def _wake_up_later(self) -> None:
        seconds = self._limiter.seconds_left
        if self._timer is None and seconds is not None:
            self._timer = self._make_timer(seconds, self._wake_up)
            self._timer.start()

    def _wake_up(self) -> None:
        with self._locked():
            self._timer = None
            self._write(self._limiter.due())
            self._wake_up_later()

    def _write(self, records: Iterable[logging.LogRecord]) -> None:
        for record in records:
            super().emit(record)

    def _locked(self) -> threading.RLock:
        assert self.lock is not None  # noqa: S101 - logging.Handler makes it
        return self.lock


def _log_of_thread(arguments: threading.ExceptHookArgs) -> None:
    """Log what ended a thread, which would be written to standard error as it is."""
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = arguments.thread.name if arguments.thread else "a thread"
        _log.error("%s ended", name, exc_info=arguments.exc_value)


class Brevity(logging.Filter):
    """Leaves tracebacks to defects, each of which has one.

    What the host refuses is expected, and tells what to do: a warning of one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._known: set[tuple[type[BaseException], str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or self._is_new_defect(error, record):
            return True
        is_expected = isinstance(error, StapsdtdError)
        if is_expected and record.levelno > logging.WARNING:
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        known = str(error) if is_expected else f"{type(error).__name__}: {error} (its traceback is above)"
        record.msg, record.args = "%s: %s", (record.getMessage(), known)
        record.exc_info = record.exc_text = None
        return True

    def _is_new_defect(self, error: BaseException, record: logging.LogRecord) -> bool:
        if isinstance(error, StapsdtdError):
            return False
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        key = type(error), at.tb_frame.f_code.co_filename if at else "", at.tb_lineno if at else 0
        # lines of different defects are not alike
        vars(record)["defect"] = key
        with self._lock:
            if key in self._known or len(self._known) == _MAX_DEFECTS:
                return False
            self._known.add(key)
        return True


def _is_relevant(record: logging.LogRecord) -> bool:
    """Drop gRPC's tracebacks about clients: disconnected just as their call ended, or sent metadata that is no text."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ not in {"ExecuteBatchError", "UnicodeDecodeError"}


_WITH_TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` argument of a logging call that appends these fields to the message, except those of None.

    client or uid: the user whom the line concerns, by whom lines are limited.
    """
    return {"fields": values}


class Formatter(logging.Formatter):
    """Keeps a message on one line and appends its fields. Layouts other than _WITH_TIME get journald's priorities."""

    def __init__(self, layout: str) -> None:
        super().__init__(layout)
        self._has_priority = layout != _WITH_TIME

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        values: dict[str, object] = getattr(record, "fields", {})
        parts = [f"{name}={_quoted(value)}" for name, value in values.items() if value is not None]
        # a path may contain a newline, followed by what looks like another record
        message = _shortened(escape(super().formatMessage(record)), _MAX_MESSAGE_CHARACTERS)
        return " ".join([message, *parts])

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 - the standard library's name
        return "\n".join(_INDENT + escape(line) for line in super().formatException(ei).split("\n"))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._has_priority:
            return text
        priority = next(priority for level, priority in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def _quoted(value: object) -> str:
    text = _shortened(str(value), _MAX_FIELD_CHARACTERS)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}[{len(text) - most} characters more]"


def _is_journal() -> bool:
    """Report whether standard error is connected to journald (systemd.exec(5), $JOURNAL_STREAM)."""
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
