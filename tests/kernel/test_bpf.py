"""What the BPF engine does and the other cannot, and that both deliver the same where both can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stapsdtd.capture.bpf.fingerprint import fingerprint
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.client import Account, Client, SiteState, SubscribeOptions
from stapsdtd.errors import KernelFeatureError
from tests.support import Daemon, Recorder, Ticker, compile_target, mapped_bytes, running_daemon, wait_for
from tests.unit.test_bpf_layout import OBJECT

pytestmark = pytest.mark.kernel

NOP, BREAKPOINT = b"\x90", b"\xcc"


@pytest.fixture
def engine() -> str:
    return "bpf"


@pytest.fixture(scope="session")
def operands_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("operands.c", tmp_path_factory.mktemp("targets") / "operands")


@pytest.fixture
def operands(operands_program: Path) -> Iterator[Ticker]:
    with Ticker(operands_program) as running:
        yield running


def test_object_of_another_build_is_refused(tmp_path: Path) -> None:
    mark = fingerprint().to_bytes(8, sys.byteorder)
    built = OBJECT.read_bytes()
    assert built.count(mark) == 1
    other = tmp_path / OBJECT.name
    other.write_bytes(built.replace(mark, bytes(8)))
    with pytest.raises(KernelFeatureError, match=r"another version of stapsdtd; .*run \./dev setup"):
        Loaded(str(other))


def in_program(program: Path, name: str, captures: str = "") -> str:
    """A selector for the probe in this very program: another's tests may run one of the same name."""
    return f":{program}::{name}{captures}"


def code_at(pid: int, program: Path, daemon: Daemon, name: str) -> bytes:
    """The byte that a process has at a probe's site."""
    with Client(daemon.target) as client:
        (probe,) = client.list_probes([in_program(program, name)]).probes
    return mapped_bytes(pid, probe.path, probe.sites[0].offset, 1, "x")


def ring_kib(pid: int) -> int:
    """What a process has mapped of BPF maps."""
    sizes = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("anon_inode:bpf-map"):
            begin, _, end = line.split()[0].partition("-")
            sizes.append(int(end, 16) - int(begin, 16))
    return sum(sizes) // 1024


def lost(account: Account) -> int:
    return account.lost_kernel_buffer + account.lost_queue + account.lost_decode


def test_both_engines_deliver_the_same(tmp_path: Path, ticker_program: Path) -> None:
    texts = ["", "SELECT 1", "naïve ☃", "x" * 700]
    folders = {name: tmp_path / name for name in ("bpf", "ftrace")}
    with ExitStack() as stack, Ticker(ticker_program) as ticker:
        recorders = []
        for name, folder in folders.items():
            folder.mkdir()
            daemon = stack.enter_context(running_daemon(folder, "--engine", name))
            selectors = [
                in_program(ticker_program, "tick"),
                in_program(ticker_program, "values"),
                in_program(ticker_program, "text", "(arg0:str[600], arg1)"),
            ]
            recorders.append(Recorder(daemon.target, *selectors, where="arg0 != 3"))
        ticker.do("fire 100")
        ticker.do("threads 3 50")
        ticker.do("values")
        for text in texts:
            ticker.do(f"text {text}")
        accounts = [recorder.finish() for recorder in recorders]
    bpf, ftrace = (
        sorted(
            (event.probe.name, event.pid, event.tid, event.comm, event.site.offset, event.values)
            for event in recorder.events
        )
        for recorder in recorders
    )
    assert bpf == ftrace
    assert len(bpf) == 99 + 3 * 49 + 1 + len(texts)
    assert accounts[0].fired == accounts[1].fired == 100 + 3 * 50 + 1 + len(texts)
    assert [account.filtered for account in accounts] == [4, 4]


@pytest.mark.vm
def test_string_in_memory_that_was_never_touched(
    daemon: Daemon, operands: Ticker, operands_program: Path, tmp_path: Path
) -> None:
    """It costs that value and no other, since a hit never waits; tests/kernel/test_cold.py has the rest."""
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_text("SELECT 1")
    long.write_text("y" * 5000)
    with Recorder(daemon.target, in_program(operands_program, "text", "(arg0:str, arg1)")) as recorder:
        operands.do(f"cold {short}")
        operands.do(f"cold {long}")
    assert recorder.values() == [(None, 8), (None, 5000)]


@pytest.mark.vm
def test_twelve_arguments_and_two_of_them_twice(daemon: Daemon, operands: Ticker, operands_program: Path) -> None:
    expected = tuple(number if number % 2 else -number for number in range(1, 13))
    with (
        Recorder(daemon.target, in_program(operands_program, "twelve")) as everything,
        Recorder(daemon.target, in_program(operands_program, "twelve", "(arg11, arg0, arg11)")) as some,
    ):
        operands.do("twelve")
    assert everything.values() == [expected]
    assert some.values() == [(-12, 1, -12)]


@pytest.mark.vm
def test_value_of_an_odd_size_comes_as_its_bytes(daemon: Daemon, operands: Ticker, operands_program: Path) -> None:
    with Recorder(daemon.target, in_program(operands_program, "bytes")) as recorder:
        operands.do("bytes")
    assert recorder.values() == [(b"ABCDEFGHIJK\0", 7)]


@pytest.mark.vm
def test_one_process_alone_is_patched(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Ticker(ticker_program) as other:
        assert code_at(other.pid, ticker_program, daemon, "tick") == NOP
        with Recorder(daemon.target, in_program(ticker_program, "tick", "(arg0)"), pids=[ticker.pid]) as recorder:
            assert code_at(ticker.pid, ticker_program, daemon, "tick") == BREAKPOINT
            assert code_at(other.pid, ticker_program, daemon, "tick") == NOP
            assert other.do("fire 5") == 0
            assert ticker.do("fire 2") == 1
            with Recorder(daemon.target, in_program(ticker_program, "tick", "(arg0)")) as everybody:
                assert other.do("fire 3") == 1
                assert ticker.do("fire 1") == 1
            assert code_at(other.pid, ticker_program, daemon, "tick") == NOP
            assert other.semaphore == 0
            assert ticker.do("fire 1") == 1
        account = recorder.account
        assert code_at(ticker.pid, ticker_program, daemon, "tick") == NOP
    assert recorder.values() == [(0,), (1,), (0,), (0,)]
    assert account is not None
    # what the other process fired while it was patched for somebody else
    assert (account.fired, account.delivered, account.filtered) == (7, 4, 3)
    assert sorted(event.values for event in everybody.events) == [(0,), (0,), (1,), (2,)]


@pytest.mark.vm
def test_second_process_of_a_scope_is_patched_too(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Ticker(ticker_program) as second, Ticker(ticker_program) as third:
        with (
            Recorder(daemon.target, in_program(ticker_program, "tick"), pids=[ticker.pid]) as first,
            Recorder(daemon.target, in_program(ticker_program, "tick"), pids=[ticker.pid, second.pid]) as both,
        ):
            assert [each.do("fire 1") for each in (ticker, second, third)] == [1, 1, 0]
        assert [each.semaphore for each in (ticker, second, third)] == [0, 0, 0]
    assert [event.pid for event in first.events] == [ticker.pid]
    assert [event.pid for event in both.events] == [ticker.pid, second.pid]


@pytest.mark.vm
def test_many_wishes_on_one_site_are_told_apart(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with ExitStack() as stack:
        recorders = [
            stack.enter_context(
                Recorder(daemon.target, in_program(ticker_program, "tick", "(arg0)"), where=f"arg0 & 15 == {number}")
            )
            for number in range(16)
        ]
        ticker.do("fire 160")
    for number, recorder in enumerate(recorders):
        assert recorder.values() == [(value,) for value in range(number, 160, 16)]
        assert recorder.account is not None
        assert (recorder.account.fired, recorder.account.filtered) == (160, 150)


def test_a_full_ring_is_accounted_for_exactly_to_everybody(own_daemon: Daemon, ticker_program: Path) -> None:
    """Two processes overrun a ring of 8 KiB; one subscription wants all of it, one a part, one nearly nothing."""
    selector = in_program(ticker_program, "tick", "(arg0)")
    programs = [Ticker(ticker_program) for _ in range(2)]
    wheres = ["", "arg0 & 1 == 1", "arg0 == 5 || arg0 == 19999"]
    with ExitStack() as stack:
        recorders = [
            stack.enter_context(Recorder(own_daemon.target, selector, where=where, kernel_buffer_kib=4))
            for where in wheres
        ]
        for program in programs:
            program.begin("threads 4 20000")
        for program in programs:
            program.finish()
        accounts = [recorder.finish() for recorder in recorders]
    for program in programs:
        program.kill()
    fired = 2 * 4 * 20000
    wanted = [fired, fired // 2, 2 * 4 * 2]
    for account, recorder, count in zip(accounts, recorders, wanted, strict=True):
        assert account.fired == fired == account.delivered + account.filtered + lost(account)
        assert account.filtered == fired - count
        assert len(recorder.events) == account.delivered
        assert account.lost_decode == account.lost_queue == 0
    assert accounts[0].lost_kernel_buffer > 0


@pytest.mark.vm
def test_hits_count_from_the_moment_a_site_is_patched(daemon: Daemon, tmp_path: Path) -> None:
    program = compile_target("eager.c", tmp_path / "eager", "-no-pie")
    for _ in range(5):
        with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as eager:
            assert eager.stdout is not None
            assert eager.stdout.readline() == "ready\n"
            with Recorder(daemon.target, in_program(program, "hit")) as recorder:
                assert eager.communicate(timeout=60)[0] == "1000\n"
            assert recorder.finish().fired == 1000


def test_others_may_come_and_go_while_it_fires(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """A site that moves to another group neither loses nor doubles its events."""
    selector = in_program(ticker_program, "tick", "(arg0)")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with Recorder(daemon.target, in_program(ticker_program, "*")):
                pass
            with Recorder(daemon.target, selector, where="arg0 == 7"):
                pass

    with Recorder(daemon.target, selector, kernel_buffer_kib=16384, queue_bytes=64 << 20) as recorder:
        others = threading.Thread(target=come_and_go)
        others.start()
        ticker.do("fire 300000")
        stop.set()
        others.join()
    account = recorder.account
    assert account is not None
    assert lost(account) == 0
    values = [value for (value,) in recorder.values()]
    assert len(set(values)) == len(values)
    # between two stores a hit may fall that neither group counts
    assert 300_000 - 3 <= len(values) == account.fired <= 300_000


def test_requests_do_not_starve_the_reader(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """A third of a second's events fill the ring; requests keep the daemon busy without a pause meanwhile.

    A host that gives the daemon no time for so long has it lose some too, but not each time.
    """
    stop = threading.Event()

    def ask() -> None:
        with Client(daemon.target) as client:
            while not stop.is_set():
                client.list_probes(details=True)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    lost_in_ring: list[int] = []
    for asker in askers:
        asker.start()
    try:
        while 0 not in lost_in_ring and len(lost_in_ring) < 3:
            with Recorder(
                daemon.target, in_program(ticker_program, "tick", "(arg0)"), kernel_buffer_kib=16384
            ) as recorder:
                ticker.do("fire 1000000")
            assert recorder.account is not None
            assert recorder.account.fired == 1_000_000
            lost_in_ring.append(recorder.account.lost_kernel_buffer)
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert 0 in lost_in_ring, lost_in_ring


@pytest.mark.vm
def test_sites_that_nobody_wants_any_more_are_unpatched(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(daemon.target, in_program(ticker_program, "tick")) as one:
        with Recorder(daemon.target, in_program(ticker_program, "*")) as all_of_it:
            assert {status.state for status in all_of_it.sites} == {SiteState.ARMED}
            assert code_at(ticker.pid, ticker_program, daemon, "values") == BREAKPOINT
        assert code_at(ticker.pid, ticker_program, daemon, "values") == NOP
        assert ticker.do("fire 2") == 1
    assert len(one.events) == 2
    assert code_at(ticker.pid, ticker_program, daemon, "tick") == NOP


def test_nobody_waits_while_anothers_sites_are_disarmed(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, tmp_path: Path
) -> None:
    copies = [Path(shutil.copy(ticker_program, tmp_path / f"copy{number}")) for number in range(60)]
    with ExitStack() as stack:
        tickers = [stack.enter_context(Ticker(copy)) for copy in copies]
        client = stack.enter_context(Client(daemon.target))
        many = client.subscribe(f":{tmp_path}/copy*::tick")
        assert len(many.sites) == len(copies)
        leaving = threading.Thread(target=many.unsubscribe)
        leaving.start()
        wait_for(lambda: not client.subscriptions(), "the subscription to end")
        with Recorder(daemon.target, in_program(ticker_program, "tick")) as recorder:
            assert leaving.is_alive()
            ticker.do("fire 3")
        assert recorder.account is not None
        assert recorder.account.fired == 3
        # Unsubscribe waits for some seconds, and the kernel may take longer for so many
        leaving.join()
        wait_for(lambda: not any(each.semaphore for each in tickers), "all sites to be disarmed")


def test_large_rings_are_given_back_with_the_last_subscription(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    large_kib = 32 * 1024
    for _ in range(2):
        with Recorder(
            own_daemon.target, in_program(ticker_program, "tick", "(arg0)"), kernel_buffer_kib=large_kib
        ) as recorder:
            ticker.do("fire 3")
            assert ring_kib(own_daemon.pid) > large_kib
        assert len(recorder.events) == 3
        wait_for(lambda: ring_kib(own_daemon.pid) < large_kib, "the ring to go")


def test_client_that_stalls_loses_its_own_events_only(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    selector = in_program(ticker_program, "tick", "(arg0)")
    with Client(daemon.target) as client:
        stalled = client.subscribe(selector, SubscribeOptions(queue_bytes=1 << 20, exclude_pids=[os.getpid()]))
        with Recorder(daemon.target, selector, kernel_buffer_kib=16384) as recorder:
            ticker.do("fire 200000")
        assert len(recorder.events) == 200_000
        (account,) = wait_for(
            lambda: [held.account for held in client.subscriptions() if held.account.fired == 200_000],
            "all events to reach the queue",
        )
        assert account.lost_queue > 0
        assert account.lost_queue + account.in_flight == 200_000
        stalled.unsubscribe()
