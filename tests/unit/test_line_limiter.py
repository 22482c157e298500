"""A user writes one line of a kind a minute, and the count tells of the rest."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest

from stapsdtd.runtime.line_limiter import SECONDS, SHARED_LINES, LineLimiter
from stapsdtd.runtime.logs import Formatter, LogHandler, fields


class Log:
    """A handler whose clock and timers a test plays."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self._written = io.StringIO()
        self.handler = LogHandler(self._written, LineLimiter(lambda: self.now), self._timer)
        self.handler.setFormatter(Formatter("%(message)s"))

    def _timer(self, seconds: float, work: Callable[[], None]) -> Log:
        self.timers.append((self.now + seconds, work))
        return self

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def tell(self, message: str, *arguments: object, level: int = logging.WARNING, **values: object) -> None:
        record = logging.LogRecord("stapsdtd.x", level, f"{message}.py", 1, message, arguments, None)
        vars(record).update(fields(**values))
        self.handler.handle(record)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            self.timers.pop(0)[1]()

    @property
    def lines(self) -> list[str]:
        return [line.split(">", 1)[1] for line in self._written.getvalue().splitlines()]


def test_a_users_second_line_of_a_kind_waits_for_the_minute_and_has_the_count() -> None:
    log = Log()
    for number in range(1000):
        log.tell("no %s", number, client="uid 7")
    assert log.lines == ['no 0 client="uid 7"']
    log.pass_time(SECONDS - 1)
    assert len(log.lines) == 1
    log.pass_time(1)
    assert log.lines[1:] == ['no 999 client="uid 7" times=999']


def test_a_flood_is_a_line_a_minute() -> None:
    log = Log()
    for _ in range(600):
        log.tell("no", client="uid 7")
        log.pass_time(1)
    assert len(log.lines) == 11
    told = sum(int(line.rpartition("times=")[2]) for line in log.lines[1:])
    assert told == 599


def test_after_a_quiet_minute_a_line_is_written_at_once() -> None:
    log = Log()
    log.tell("no", uid=7)
    log.pass_time(SECONDS)
    log.tell("no", uid=7)
    assert log.lines == ["no uid=7"] * 2
    assert not log.timers


def test_users_and_kinds_do_not_hide_each_other() -> None:
    log = Log()
    for _ in range(3):
        log.tell("no", client="uid 7")
        log.tell("no", client="uid 8")
        log.tell("never", client="uid 7")
    assert len(log.lines) == 3


@pytest.mark.parametrize(("level", "values"), [(logging.INFO, {"client": "uid 7"}), (logging.WARNING, {})])
def test_decisions_and_what_concerns_no_user_have_some_lines_more(level: int, values: dict[str, str]) -> None:
    log = Log()
    for _ in range(100):
        log.tell("it is", level=level, **values)
    assert len(log.lines) == SHARED_LINES
    log.pass_time(SECONDS)
    assert log.lines[-1].endswith(f"times={100 - SHARED_LINES}")
    assert len(log.lines) == SHARED_LINES + 1


def test_debugging_is_not_limited() -> None:
    log = Log()
    for _ in range(100):
        log.tell("it is", level=logging.DEBUG)
    assert len(log.lines) == 100


def test_the_end_tells_what_was_left_out() -> None:
    log = Log()
    for number in range(3):
        log.tell("no %s", number, client="uid 7")
    log.handler.close()
    assert log.lines == ['no 0 client="uid 7"', 'no 2 client="uid 7" times=2']


def test_many_users_are_as_one() -> None:
    log = Log()
    for uid in range(100_000):
        log.tell("no", uid=uid)
    assert 1000 <= len(log.lines) <= 1000 + SHARED_LINES


def test_different_defects_are_not_alike() -> None:
    log = Log()

    def fail(error: type[Exception]) -> None:
        record = logging.LogRecord("stapsdtd.x", logging.ERROR, "x.py", 1, "it failed", (), None)
        try:
            raise error("so")  # noqa: TRY301
        except error as raised:
            record.exc_info = (error, raised, raised.__traceback__)
        vars(record).update(fields(client="uid 7"))
        log.handler.handle(record)

    for error in (ValueError, KeyError, ValueError):
        fail(error)
    assert sum("Traceback" in line for line in log.lines) == 2
    log.pass_time(SECONDS)
    assert log.lines[-1] == 'it failed: ValueError: so (its traceback is above) client="uid 7" times=1'
