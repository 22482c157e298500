"""Lines for people and journald."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.runtime import logs


@contextmanager
def logging_as_set_up(level: str) -> Iterator[None]:
    """As in a process that begins."""
    logger = logging.getLogger()
    handlers, before = logger.handlers, logger.level
    logger.handlers = []
    try:
        logs.set_up(level)
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(before)


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def connect_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard error, as this phase of the test has it, journald's."""
    status = os.fstat(sys.stderr.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")


def test_journald_gets_priorities_and_has_a_time_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    connect_journal(monkeypatch)
    with logging_as_set_up("debug"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logging.getLogger("stapsdtd.x").log(level, "it is %s", "so")
    assert lines(capfd) == [f"<{priority}>stapsdtd.x: it is so" for priority in (7, 6, 4, 3, 3)]


def test_each_line_of_a_traceback_has_its_priority(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    connect_journal(monkeypatch)
    with logging_as_set_up("info"):
        logging.getLogger("stapsdtd.x").error("it failed", exc_info=ValueError("no\nyes"))
    found = lines(capfd)
    assert found[0] == "<3>stapsdtd.x: it failed"
    # indented, so that the error's second line cannot pass for a record
    assert found[1:] == ["<3>  ValueError: no", "<3>  yes"]


def test_elsewhere_lines_have_time_and_level_and_fields_stand_behind(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    more = logs.fields(client="uid 1000", sites=3, role="user", pid=None, reason='a "b"\n\x1b[2J=')
    with logging_as_set_up("info"):
        logging.getLogger("stapsdtd.access").info("subscribe allowed", extra=more)
        logging.getLogger("stapsdtd.access").debug("not shown")
    (line,) = lines(capfd)
    when, _, text = line.partition(" INFO ")
    assert len(when) == len("2026-11-21 18:00:00,123")
    assert text == (
        'stapsdtd.access: subscribe allowed client="uid 1000" sites=3 role=user reason="a \\"b\\"\\n\\u001b[2J="'
    )


def shown(message: str, *arguments: object, **values: object) -> str:
    record = logging.LogRecord("stapsdtd.access", logging.INFO, "", 0, message, arguments, None)
    vars(record).update(logs.fields(**values))
    return logs.Formatter("%(message)s").format(record)


def test_file_name_cannot_make_a_line_of_its_own() -> None:
    forged = "/tmp/x\n2026-11-21 INFO stapsdtd.access: subscribe allowed\r\x1b[2J\u202e\u2028"
    assert shown("%s: refused", forged) == (
        r"<6>/tmp/x\n2026-11-21 INFO stapsdtd.access: subscribe allowed\r\x1b[2J\u202e\u2028: refused"
    )
    assert shown("%s", "/home/müller/日本") == "<6>/home/müller/日本"


def test_texts_of_a_traceback_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_as_set_up("info"):
        logging.getLogger("stapsdtd.x").error("it failed", exc_info=ValueError("\x1b[2J\u202e\r2026-11-25 INFO x"))
    assert lines(capfd)[1:] == [r"  ValueError: \x1b[2J\u202e\r2026-11-25 INFO x"]


def test_lines_are_not_as_long_as_others_like() -> None:
    found = shown("%s", "a" * 100_000, value="b" * 100_000)
    assert len(found) < 11_000
    assert "[91808 characters more] value=" in found


@given(st.text(), st.text())
def test_value_is_one_word_or_one_string(text: str, message: str) -> None:
    found = shown("%s", message, value=text)
    assert found.splitlines() == [found]
    assert found.isprintable()
    told = found.removeprefix(f"{shown('%s', message)} value=")
    assert (json.loads(told) if told.startswith('"') else told) == text
