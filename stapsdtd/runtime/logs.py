"""How the daemon logs: a line for people and journald, with fields behind it that programs can find.

2026-11-21 18:00:00,123 INFO stapsdtd.access: subscribe allowed client="uid 1000" role=user sites=3
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys

from stapsdtd.runtime.text import escape

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""syslog's, which journald reads from the begin of a line (sd-daemon(3))."""

_BARE = re.compile(r"[!#-<>-\[\]-~]+")


def set_up(level: str) -> None:
    """Log to standard error. journald has time and priority of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(name)s: %(message)s" if _is_journal() else _WITH_TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """A client that goes in the very moment in which its call ends is nothing to tell, let alone with a traceback."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


_WITH_TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def fields(**values: object) -> dict[str, dict[str, object]]:
    """What `extra` of a logging call has to be so that these stand behind the message; None stands for nothing."""
    return {"fields": values}


class _Formatter(logging.Formatter):
    def __init__(self, layout: str) -> None:
        super().__init__(layout)
        self._has_priority = layout != _WITH_TIME

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        values: dict[str, object] = getattr(record, "fields", {})
        parts = [f"{name}={_quoted(value)}" for name, value in values.items() if value is not None]
        # a path may have a line break in it, and what looks like a record behind that
        return " ".join([escape(super().formatMessage(record)), *parts])

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._has_priority:
            return text
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _is_journal() -> bool:
    """Whether standard error goes to journald (systemd.exec(5), $JOURNAL_STREAM)."""
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
