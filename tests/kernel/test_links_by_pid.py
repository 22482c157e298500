"""Scopes by pid where the kernel gives the daemon no perf events: exact links to uprobes, on the kernel itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client, SubscribeOptions
from stapsdtd.elf import parse_object
from stapsdtd.kernel import uprobe_links
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import definitions, links
from tests.kernel import test_scoped_processes as scoped
from tests.kernel.recovery import BREAKPOINT, NOP
from tests.refusing import refusing
from tests.support import TICKER, Daemon, Recorder, Ticker, compile_target, mapped_bytes, running_daemon

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.vm,
    pytest.mark.skipif(not uprobe_links.are_supported(), reason="links to uprobes are there since Linux 6.6"),
]

# what is true of perf events is true of links
test_another_process_with_the_pid_is_not_traced = scoped.test_another_process_with_the_pid_is_not_traced
test_stream_ends_with_its_process = scoped.test_stream_ends_with_its_process_after_all_that_it_fired
test_process_outlives_its_main_thread = scoped.test_process_outlives_its_main_thread
test_another_thread_executes_a_program = scoped.test_another_thread_executes_a_program
reborn = scoped.reborn


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("links"), prefix=refusing("perf_event_open")) as daemon:
        yield daemon


@pytest.fixture
def engine() -> str:
    return "bpf"


def options(*tickers: Ticker) -> SubscribeOptions:
    return SubscribeOptions(pids=[each.pid for each in tickers])


def test_daemon_says_what_it_uses(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        info = client.info()
    assert info.engine == "bpf"
    (found,) = [feature for feature in info.features if feature.name == "bpf programs"]
    assert found.available
    assert found.detail.endswith("sites of single processes are attached by links")


def test_hits_of_the_process_are_exact_and_another_is_untouched(
    daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    with open(ticker_program, "rb") as file:
        offset = next(site.site_offset for site in parse_object(file).sites if site.name == "tick")
    with Ticker(ticker_program) as other:
        with Recorder(daemon.target, scoped.tick(ticker_program), pids=[ticker.pid]) as recorder:
            assert [each.semaphore for each in (ticker, other)] == [1, 0]
            codes = [mapped_bytes(each.pid, str(ticker_program), offset, 1, "x") for each in (ticker, other)]
            assert codes == [BREAKPOINT, NOP]
            assert len(links(daemon.pid)) == 1
            other.do("fire 50")
            ticker.do("threads 4 250")
            ticker.do("fire 1000")
            other.do("fire 50")
        account = recorder.account
        assert account is not None
        assert (account.fired, account.delivered, account.filtered) == (2000, 2000, 0)
        assert [each.semaphore for each in (ticker, other)] == [0, 0]


def test_no_hit_is_missed_or_doubled_while_scopes_change(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """Each change adds links, or replaces the group that all of them are in."""
    count = 300_000
    selector = scoped.tick(ticker_program)
    with Ticker(ticker_program) as other, Client(daemon.target) as client:
        kept = client.subscribe(selector, options(ticker))
        ticker.begin(f"fire {count}")
        for _ in range(3):
            wider = client.subscribe(selector, options(ticker, other))
            everybody = client.subscribe(selector)
            wider.unsubscribe()
            single = client.subscribe(selector, options(other))
            everybody.unsubscribe()
            single.unsubscribe()
        assert ticker.finish() == 1
        assert other.semaphore == 0
        account = kept.unsubscribe()
        assert account.fired == count
        assert ticker.semaphore == 0


def test_child_stays_patched_until_the_link_is_closed(daemon: Daemon, tmp_path: Path) -> None:
    """Unlike with perf events, which ask the kernel to unpatch a child at its first hit."""
    program = compile_target("family.c", tmp_path / "family")
    with Ticker(program) as family, Client(daemon.target) as client:
        subscription = client.subscribe(f"family:{program}::tick", SubscribeOptions(pids=[family.pid]))
        assert family.do("fork 100") == 1
        child = family.do("stay")
        assert bytes_of(child, program) == BREAKPOINT
        assert subscription.unsubscribe().fired == 0
        assert family.semaphore == 0
        assert bytes_of(child, program) == NOP


def bytes_of(pid: int, program: Path) -> bytes:
    with open(program, "rb") as file:
        (site,) = parse_object(file).sites
    return mapped_bytes(pid, str(program), site.site_offset, 1, "x")


def test_many_processes_have_a_link_each_and_leave_nothing(daemon: Daemon, ticker_program: Path) -> None:
    tickers = [Ticker(ticker_program) for _ in range(20)]
    try:
        with Client(daemon.target) as client:
            subscription = client.subscribe(scoped.tick(ticker_program), options(*tickers))
            assert len(links(daemon.pid)) == 20
            for each in tickers:
                assert each.do("fire 7") == 1
            assert subscription.unsubscribe().fired == 140
            assert links(daemon.pid) == []
            assert {each.semaphore for each in tickers} == {0}
    finally:
        for each in tickers:
            each.kill()


def test_no_event_is_made(daemon: Daemon, tracefs: Tracefs, ticker: Ticker) -> None:
    with Client(daemon.target) as client:
        subscription = client.subscribe(f"{TICKER}:tick", options(ticker))
        assert definitions(tracefs, daemon.pid) == []
        subscription.unsubscribe()
