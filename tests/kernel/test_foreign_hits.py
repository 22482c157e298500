"""What a user's probes cost other users' processes is bounded, told, and nobody else's loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState
from tests.kernel.test_access import copied, daemon_with, of, recorder, ticker_of
from tests.support import Recorder, Ticker, mapped_bytes, wait_for
from tests.users import ANNE, BERT, public_folder

pytestmark = pytest.mark.kernel

BOUND = "[roles.user]\nmax_foreign_hits_per_second = 20000\n"
FLAT_OUT = "fire 2000000000"


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


def semaphore_of(client: Client, ticker: Ticker, program: Path) -> int:
    """From outside, while it is busy."""
    (probe,) = client.list_probes(of(program, "tick"))
    offset = probe.sites[0].semaphore_offset
    assert offset is not None
    return int.from_bytes(mapped_bytes(ticker.pid, str(program), offset, 2, "w"), sys.byteorder)


def test_what_costs_strangers_too_much_is_confined_to_own_processes_and_told(
    folder: Path, ticker_program: Path
) -> None:
    shared = copied(ticker_program, folder / "shared")
    with (
        daemon_with(folder, BOUND) as daemon,
        Client(daemon.target) as client,
        ticker_of(ANNE, shared) as own,
        ticker_of(BERT, shared) as stranger,
    ):
        with recorder(ANNE, daemon, shared) as costly:
            own.do("fire 5")
            stranger.begin(FLAT_OUT)
            wait_for(lambda: semaphore_of(client, stranger, shared) == 0, "the stranger to be left alone")
            told = wait_for(lambda: [each for each in costly.statuses if each.reason], "a reason")
            assert [status.state for status in told] == [SiteState.ARMED]
            assert "your role allows 20,000; armed in those again after 30 s" in told[0].reason
            assert semaphore_of(client, own, shared) == 1
            own.do("fire 5")
            with ticker_of(ANNE, shared) as later:
                wait_for(lambda: semaphore_of(client, later, shared) == 1, "a process that began meanwhile")
                later.do("fire 5")
                wait_for(lambda: len(costly.events) == 15, "events of her own processes")
            # to ask anew does not help
            with recorder(ANNE, daemon, shared) as again:
                assert [status.state for status in again.sites] == [SiteState.ARMED]
                own.do("fire 5")
                wait_for(lambda: len(again.events) == 5, "events of her own process")
                assert semaphore_of(client, stranger, shared) == 0
        account = costly.account
        assert account is not None
        assert (account.fired, account.lost) == (20, 0)


def test_what_costs_strangers_too_much_is_disarmed_if_it_is_nowhere_else(folder: Path, ticker_program: Path) -> None:
    shared, other = (copied(ticker_program, folder / name) for name in ("shared", "other"))
    with (
        daemon_with(folder, BOUND) as daemon,
        Client(daemon.target) as client,
        ticker_of(ANNE, shared) as gone,
        ticker_of(ANNE, other) as slow,
        ticker_of(BERT, shared) as stranger,
    ):
        with recorder(ANNE, daemon, shared) as costly, recorder(ANNE, daemon, other) as cheap:
            assert len(costly.armed()) == 1
            gone.kill()
            assert semaphore_of(client, stranger, shared) == 1
            stranger.begin(FLAT_OUT)
            wait_for(lambda: semaphore_of(client, stranger, shared) == 0, "the stranger to be left alone")
            told = wait_for(
                lambda: [status for status in costly.statuses if status.state is SiteState.REFUSED], "a reason"
            )
            assert "cost other users' processes" in told[0].reason
            assert "your role allows 20,000" in told[0].reason
            (line,) = [line for line in daemon.log().splitlines() if "cost other users' processes" in line]
            assert f'client="uid {ANNE.uid}"' in line
            # to ask anew does not help
            with ticker_of(ANNE, shared), recorder(ANNE, daemon, shared) as again:
                assert [status.state for status in again.sites] == [SiteState.ARMED]
                assert semaphore_of(client, stranger, shared) == 0
            slow.do("fire 5")
            wait_for(lambda: len(cheap.events) == 5, "events of what costs nobody else")
        account = costly.account
        assert account is not None
        assert account.fired == account.lost == 0


def test_what_an_operator_wants_too_costs_nobody_more(folder: Path, ticker_program: Path) -> None:
    shared = copied(ticker_program, folder / "shared")
    with (
        daemon_with(folder, BOUND) as daemon,
        Client(daemon.target) as client,
        ticker_of(ANNE, shared),
        ticker_of(BERT, shared) as stranger,
    ):
        hers = recorder(ANNE, daemon, shared)
        with Recorder(daemon.target, of(shared, "tick"), where="arg0 < 0") as everybodys:
            stranger.begin(FLAT_OUT)
            filtered = 200_000
            wait_for(
                lambda: max(each.account.filtered for each in client.subscriptions()) > filtered, "many hits to happen"
            )
            assert semaphore_of(client, stranger, shared) > 0
            assert [status.state for status in hers.statuses] == [SiteState.ARMED]
        # from now on it is for her alone
        wait_for(lambda: semaphore_of(client, stranger, shared) == 0, "the stranger to be left alone")
        assert everybodys.account is not None
        assert everybodys.account.lost == 0
        hers.finish()
