"""Fields of events that are computed, on the real kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stapsdtd.client import Client, Span, SubscribeOptions
from tests.support import TICKER, Daemon, Ticker, compile_target, stapsdt

pytestmark = pytest.mark.kernel

FIELDS = ["arg0 * 2 + 1", "str(arg2, 2)", "arg0 % 2 == 0", 'arg0 > 3 ? "late" : "early"', "tid - pid", "60 / arg1"]


@pytest.mark.vm
def test_events_tell_what_is_computed_of_them(daemon: Daemon, ticker: Ticker) -> None:
    options = SubscribeOptions(fields=FIELDS, where="arg0 + arg1 == 0 && arg0 != 2")
    with Client(daemon.target) as client, client.subscribe(f"{TICKER}:tick(arg0)", options) as subscription:
        ticker.do("fire 6")
        subscription.unsubscribe()
        events = list(subscription.events())
    assert [event.values for event in events] == [
        (
            number,
            2 * number + 1,
            "ti",
            number % 2 == 0,
            "late" if number > 3 else "early",
            0,
            -60 // number if number else None,
        )
        for number in (0, 1, 3, 4, 5)
    ]


def test_pairs_tell_what_is_computed_of_them(daemon: Daemon, tmp_path: Path) -> None:
    provider = TICKER.replace("ticker", "spanned")
    program = compile_target("spanner.c", tmp_path / "spanned", f"-DPROVIDER={provider}", "-lpthread")
    span = Span(start_selectors=[f"{provider}:begin(arg1)"])
    options = SubscribeOptions(fields=["elapsed / 1000", "arg1 * 10"])
    with (
        Ticker(program) as spanner,
        Client(daemon.target) as client,
        client.subscribe(f"{provider}:end(arg1)", options, span) as subscription,
    ):
        spanner.do("pairs 20")
        subscription.unsubscribe()
        events = list(subscription.events())
    for number, event in enumerate(events):
        end, start, elapsed, microseconds, tenfold = event.values
        assert isinstance(elapsed, int)
        assert (end, start, microseconds, tenfold) == (number, number, elapsed // 1000, number * 10)
    assert len(events) == 20


def test_the_command_prints_them(daemon: Daemon, ticker_program: Path) -> None:
    done = stapsdt(
        daemon.target, "trace", f"{TICKER}:tick(arg0)", "--fields", "arg0 * 2,str(arg2, 2)", "--json",
        "--file", str(ticker_program), "--", str(ticker_program), "3",
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seq"')]
    assert [(event["args"], event["arg0 * 2"], event["str(arg2, 2)"]) for event in events] == [
        ([number], number * 2, "ti") for number in range(3)
    ]
