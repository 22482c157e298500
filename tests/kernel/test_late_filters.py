"""Filters that no engine tests, on strings that make them take long, cost their client and no other."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Account, Clause, Client
from tests.kernel.test_access import client_of, daemon_with, of, ticker_of
from tests.support import Recorder, Ticker, compile_target, wait_for
from tests.users import ANNE, public_folder

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

CLAUSES, STRINGS, TICKS = 16, 1000, 200
SETS = "".join(f"[x{letter}]" for letter in string.ascii_letters)
HOSTILE = f'str(arg0) ~ "*{SETS}~"'


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


@pytest.fixture
def program(folder: Path) -> Path:
    return compile_target("ticker.c", folder / "ticker", "-ldl", "-pthread")


def account_of(client: Client) -> Account:
    """Of its only subscription."""
    (info,) = client.subscriptions()
    return info.account


@pytest.mark.parametrize("where", ["", 'str(arg2) ~ "t?ck"'], ids=["no filter", "another's filter"])
def test_events_of_others_all_arrive_beside_filters_that_take_long(folder: Path, program: Path, where: str) -> None:
    with (
        daemon_with(folder) as daemon,
        ticker_of(ANNE, program) as flooding,
        Ticker(program) as quiet,
        client_of(ANNE, daemon) as client,
        client.query(
            [Clause(tag=str(each), selectors=[of(program, "text(arg1)")], where=HOSTILE) for each in range(CLAUSES)]
        ) as hostile,
    ):
        with Recorder(daemon.target, of(program, "tick(arg0)"), pids=[quiet.pid], where=where) as recorder:
            for number in range(STRINGS):
                flooding.do(f"text {'x' * 4000}{number:06}")
            quiet.do(f"fire {TICKS}")
            wait_for(lambda: len(recorder.events) == TICKS, "events")
            wait_for(lambda: account_of(client).fired == CLAUSES * STRINGS, "the kernel's counts")
            waiting = account_of(client)
        account = hostile.unsubscribe()
    assert [event.values[0] for event in recorder.events] == list(range(TICKS))
    assert recorder.account is not None
    assert (recorder.account.fired, recorder.account.delivered, recorder.account.lost) == (TICKS, TICKS, 0)
    # what took long was not waited for
    assert waiting.in_flight > 0
    assert account.fired == account.filtered + account.lost
    assert account.lost_filter > 0
    assert account.fired == CLAUSES * STRINGS
