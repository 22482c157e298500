from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from stapsdtd.client import Account, Client, CutText, LossStage, SiteState, SubscribeOptions
from stapsdtd.kernel import uprobe_links
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import TICKER, Daemon, Recorder, Ticker, wait_for

pytestmark = pytest.mark.kernel


def lost(account: Account) -> int:
    return account.lost_kernel_buffer + account.lost_queue + account.lost_decode


@pytest.mark.vm
def test_semaphore_is_up_only_while_anybody_subscribes(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    assert ticker.semaphore == 0
    with Recorder(daemon.target, f"{TICKER}:tick"):
        # a slow machine may still be parsing the file, which no test before this one has run
        wait_for(lambda: ticker.semaphore == 1, "the semaphore to be up")
        with Recorder(daemon.target, f"{TICKER}:tick"), Ticker(ticker_program) as later:
            assert ticker.semaphore == 1
            assert later.semaphore == 1
        assert ticker.semaphore == 1
    assert ticker.semaphore == 0


@pytest.mark.vm
def test_different_wishes_on_one_site_are_both_served(daemon: Daemon, ticker: Ticker) -> None:
    with (
        Recorder(daemon.target, f"{TICKER}:tick(arg0)") as first,
        Recorder(daemon.target, f"{TICKER}:tick(arg2:str)") as second,
    ):
        ticker.do("fire 5")
    assert first.values() == [(number,) for number in range(5)]
    assert second.values() == [("tick",)] * 5
    assert ticker.semaphore == 0


@pytest.mark.vm
def test_values_of_every_width_and_sign(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:values") as recorder:
        ticker.do("values")
    assert recorder.values() == [
        (-8, 0xF8, -1600, 0xF916, -320000, 0xFFFFFF32, -(1 << 63), (1 << 64) - 1, 77, -77),
    ]


@pytest.mark.vm
@pytest.mark.parametrize("text", ["", "SELECT 1", "naïve ☃", "x" * 3000])
def test_strings(daemon: Daemon, ticker: Ticker, text: str) -> None:
    with Recorder(daemon.target, f"{TICKER}:text(arg0:str, arg1)") as recorder:
        ticker.do(f"text {text}")
    assert recorder.values() == [(text, len(text.encode()))]


@pytest.mark.vm
def test_string_bound_and_a_pointer_to_nowhere(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:text(arg0:str[4])", f"{TICKER}:tick(arg0:str)") as recorder:
        ticker.do("text abcdefgh")
        ticker.do("fire 1")
    bounded, nowhere = recorder.events
    assert bounded.values == ("abcd",)
    assert isinstance(bounded.values[0], CutText)
    assert nowhere.values == (None,)
    assert nowhere.unavailable == {0: "the memory it points to could not be read"}


@pytest.mark.vm
@pytest.mark.parametrize(("capture", "most"), [("str[8]", 8), ("str", 4096)])
def test_a_string_is_cut_only_if_there_is_more_of_it(
    daemon: Daemon, engine: str, ticker: Ticker, capture: str, most: int
) -> None:
    if engine == "ftrace" and most == 4096:
        # an event of ftrace's has no room for more
        capture, most = "str[2000]", 2000
    texts = ["a" * (most - 1), "b" * most, "c" * (most + 1)]
    with Recorder(daemon.target, f"{TICKER}:text(arg0:{capture})") as recorder:
        for text in texts:
            ticker.do(f"text {text}")
    values = [event.values[0] for event in recorder.events]
    assert values == [*texts[:2], "c" * most]
    assert [isinstance(value, CutText) for value in values] == [False, False, True]


@pytest.mark.vm
def test_event_tells_who_when_and_where(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick") as recorder:
        ticker.do("threads 2 3")
    assert [event.seq for event in recorder.events] == list(range(1, 7))
    assert {event.pid for event in recorder.events} == {ticker.pid}
    threads = {event.tid for event in recorder.events}
    assert len(threads) == 2
    assert ticker.pid not in threads
    assert {event.comm for event in recorder.events} == {"ticker"}
    times = [event.time_ns for event in recorder.events]
    assert times == sorted(times)
    assert recorder.events[0].probe.path == str(ticker_program)
    assert recorder.events[0].probe.name == "tick"


@pytest.mark.vm
def test_capture_beyond_the_arguments_is_refused_with_its_reason(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick(arg7)", f"{TICKER}:text(arg1)") as recorder:
        ticker.do("text hello")
    states = {status.name: (status.state, status.reason) for status in recorder.statuses}
    assert states["tick"] == (SiteState.REFUSED, "it has 3 arguments, so there is no arg7")
    assert states["text"][0] is SiteState.ARMED
    assert recorder.values() == [(5,)]


@pytest.mark.parametrize("is_scoped", [False, True])
@pytest.mark.parametrize("kernel_buffer_kib", [4, 16384])
def test_fired_is_delivered_and_lost_exactly(
    own_daemon: Daemon, engine: str, ticker_program: Path, tracefs: Tracefs, *, kernel_buffer_kib: int, is_scoped: bool
) -> None:
    programs = [Ticker(ticker_program) for _ in range(3)]
    pids = [program.pid for program in programs] if is_scoped else []
    with Recorder(own_daemon.target, f"{TICKER}:tick", pids=pids, kernel_buffer_kib=kernel_buffer_kib) as recorder:
        for program in programs:
            program.begin("threads 4 20000")
        for program in programs:
            program.finish()
        profile = tracefs.read("uprobe_profile")
        hits = sum(map(int, re.findall(rf"[eg]\d+_\d+_{own_daemon.pid}_\d+\s+(\d+)$", profile, re.MULTILINE)))
        account = recorder.finish()
    for program in programs:
        program.kill()
    assert account.fired == 3 * 4 * 20000
    # the kernel counts what tracefs events have, which links are not
    if engine == "ftrace" or is_scoped or not uprobe_links.are_supported():
        assert hits == account.fired
    assert account.fired == account.delivered + lost(account)
    assert len(recorder.events) == account.delivered
    if kernel_buffer_kib == 4:
        assert account.lost_kernel_buffer > 0
        told = sum(loss.count for loss in recorder.losses if loss.stage is LossStage.KERNEL_BUFFER)
        assert told == account.lost_kernel_buffer
    else:
        assert account.lost_kernel_buffer == 0


def test_account_adds_up_while_hits_are_under_way(daemon: Daemon, ticker: Ticker) -> None:
    with Client(daemon.target) as client, client.subscribe(f"{TICKER}{ticker.pid}:::tick") as subscription:

        def account() -> Account:
            (found,) = [each.account for each in client.subscriptions() if each.id == subscription.id]
            assert found.fired == found.delivered + found.filtered + lost(found) + found.in_flight
            return found

        assert account().fired == 0
        ticker.begin("fire 200000")
        seen = [account() for _ in range(50)]
        assert [each.fired for each in seen] == sorted(each.fired for each in seen)
        ticker.finish()
        # nobody reads, so what has come through the kernel waits in the queue
        wait_for(lambda: account().fired == 200_000 and account().in_flight == 200_000 - lost(account()), "all hits")
        ending = subscription.unsubscribe()
        assert (ending.fired, ending.delivered) == (200_000, 0)
        assert ending.in_flight == 200_000 - lost(ending)


def test_each_threads_events_arrive_in_order(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick(arg0)", kernel_buffer_kib=16384) as recorder:
        ticker.do("threads 8 5000")
    by_thread: dict[int, list[object]] = {}
    for event in recorder.events:
        by_thread.setdefault(event.tid, []).append(event.values[0])
    assert list(by_thread.values()) == [list(range(5000))] * 8


@pytest.mark.vm
def test_pid_limits_what_is_delivered(daemon: Daemon, engine: str, ticker_program: Path) -> None:
    """Another process counts as filtered where it is patched, which the bpf engine spares it."""
    with Ticker(ticker_program) as wanted, Ticker(ticker_program) as other:
        with (
            Recorder(daemon.target, f"{TICKER}:tick", pids=[wanted.pid]) as by_scope,
            Recorder(daemon.target, f"{TICKER}{wanted.pid}:::tick") as by_selector,
        ):
            wanted.do("fire 3")
            other.do("fire 4")
        for recorder in (by_scope, by_selector):
            assert {event.pid for event in recorder.events} == {wanted.pid}
            account = recorder.finish()
            filtered = 4 if engine == "ftrace" else 0
            assert (account.delivered, account.filtered, account.fired) == (3, filtered, 3 + filtered)


def test_single_event_is_seen_at_once(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick") as recorder:
        delays = []
        for seen in range(3):
            begin = time.monotonic()
            ticker.do("fire 1")
            wait_for(lambda: recorder.events[seen:], "the event")  # noqa: B023
            delays.append(time.monotonic() - begin)
    assert min(delays) < 2


def test_client_that_comes_back_goes_on_from_the_number_it_names(daemon: Daemon, ticker: Ticker) -> None:
    with Client(daemon.target) as client:
        subscription = client.subscribe([f"{TICKER}:tick(arg0)"], SubscribeOptions(lease_seconds=60))
        ticker.do("fire 10")
        first = []
        for event in subscription.events():
            first.append(event)
            if len(first) == 4:
                break
        ticker.do("fire 5")
        again = []
        for event in subscription.events(from_seq=3):
            again.append(event)
            if len(again) == 13:
                break
        subscription.unsubscribe()
    assert [event.seq for event in first] == [1, 2, 3, 4]
    assert [event.seq for event in again] == list(range(3, 16))
    assert [event.values[0] for event in again] == [*range(2, 10), *range(5)]


def test_lease_that_runs_out_disarms(daemon: Daemon, ticker: Ticker) -> None:
    with Client(daemon.target) as client:
        client.subscribe([f"{TICKER}:tick"], SubscribeOptions(lease_seconds=5))
        assert ticker.semaphore == 1
        wait_for(lambda: ticker.semaphore == 0, "the lease to run out")
        assert client.subscriptions() == ()
