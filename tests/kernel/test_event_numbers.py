"""What `seq` counts: events that entered the queue, whatever was filtered, and gaps where the queue discarded some."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stapsdtd.client import Client, SubscribeOptions
from tests.support import TICKER, Daemon, Ticker

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    "where",
    [
        "arg0 % 2 == 1",  # evaluated at the hit, or by the daemon where the engine cannot
        'str(arg2) == "tick" && arg0 % 2 == 1',  # partly later, with bpf as well
    ],
)
def test_what_is_filtered_has_no_number(daemon: Daemon, ticker: Ticker, where: str) -> None:
    options = SubscribeOptions(where=where)
    with Client(daemon.target) as client, client.subscribe(f"{TICKER}:tick(arg0)", options) as subscription:
        ticker.do("fire 10")
        account = subscription.unsubscribe()
        events = list(subscription.events())
    assert [event.values[0] for event in events] == [1, 3, 5, 7, 9]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert (account.fired, account.filtered, account.lost) == (10, 5, 0)


def lost_with(daemon: Daemon, queue_bytes: int, fire: Callable[[], object]) -> tuple[int, int]:
    """Return how many numbers are missing, and how many events were lost in the queue, while nobody reads it."""
    options = SubscribeOptions(queue_bytes=queue_bytes)
    with Client(daemon.target) as client, client.subscribe(f"{TICKER}:tick(arg0)", options) as subscription:
        fire()
        subscription.unsubscribe()
        seqs = [event.seq for event in subscription.events()]
        account = subscription.account
    assert account is not None
    assert seqs == sorted(seqs)
    assert account.delivered == len(seqs)
    assert account.fired == account.lost_queue + account.lost_kernel_buffer + account.delivered
    return seqs[-1] - len(seqs), account.lost_queue


def test_what_finds_no_room_has_no_number(daemon: Daemon, ticker: Ticker) -> None:
    missing, lost = lost_with(daemon, 64 << 10, lambda: ticker.do("fire 20000"))
    assert missing == 0
    assert lost > 0


@pytest.mark.usefixtures("ticker")
def test_gaps_are_what_the_queue_discarded(daemon: Daemon, ticker_program: Path) -> None:
    """There is always room for some events of each process, even if older ones are discarded."""

    def fire() -> None:
        for _ in range(60):
            subprocess.run([ticker_program, "16"], check=True)

    missing, lost = lost_with(daemon, 8 << 10, fire)
    assert 0 < missing <= lost
