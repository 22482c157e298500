"""The daemon's log format: a message for people, followed by key=value fields for programs.

2026-11-21 18:00:00,123 INFO stapsdtd.access: subscribe allowed client="uid 1000" role=user sites=3
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading

from stapsdtd.errors import StapsdtdError
from stapsdtd.runtime.text import escape

_log = logging.getLogger(__name__)
_MAX_DEFECTS = 1000

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""syslog priorities, which journald reads from the start of a line (sd-daemon(3))."""

_BARE = re.compile(r"[!#-<>-\[\]-~]+")


def set_up(level: str) -> None:
    """Log to standard error. For journald, which records times itself, prefix priorities instead."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Brevity())
    handler.setFormatter(Formatter("%(name)s: %(message)s" if _is_journal() else _WITH_TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_relevant)
    threading.excepthook = _log_of_thread


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
        if error is None or self._is_new_defect(error):
            return True
        is_expected = isinstance(error, StapsdtdError)
        if is_expected and record.levelno > logging.WARNING:
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        known = str(error) if is_expected else f"{type(error).__name__}: {error} (its traceback is above)"
        record.msg, record.args = "%s: %s", (record.getMessage(), known)
        record.exc_info = record.exc_text = None
        return True

    def _is_new_defect(self, error: BaseException) -> bool:
        if isinstance(error, StapsdtdError):
            return False
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        key = type(error), at.tb_frame.f_code.co_filename if at else "", at.tb_lineno if at else 0
        with self._lock:
            if key in self._known or len(self._known) == _MAX_DEFECTS:
                return False
            self._known.add(key)
        return True


def _is_relevant(record: logging.LogRecord) -> bool:
    """Drop gRPC's tracebacks about clients that disconnect just as their call ends."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


_WITH_TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` argument of a logging call that appends these fields to the message, except those of None."""
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
        return " ".join([escape(super().formatMessage(record)), *parts])

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._has_priority:
            return text
        priority = next(priority for level, priority in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _is_journal() -> bool:
    """Report whether standard error is connected to journald (systemd.exec(5), $JOURNAL_STREAM)."""
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
