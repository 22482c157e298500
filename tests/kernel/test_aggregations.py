"""What programs' hits come to, on the real kernel: counted as the programs count them themselves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Aggregate, Client, CutText, Snapshot, SubscribeOptions, Subscription
from tests.support import TICKER, Daemon, Ticker, stapsdt, stapsdt_command, wait_for
from tests.terminal import run_on_terminal

pytestmark = pytest.mark.kernel


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as connected:
        yield connected


def of(program: Path, probe: str) -> str:
    """The probe in this very program: another developer's tests may run one of the same name."""
    return f"{TICKER}:{program}::{probe}"


def check_account(snapshot: Snapshot) -> None:
    account = snapshot.account
    assert account.fired == account.aggregated + account.filtered + account.lost + account.in_flight


def finished(client: Client, selector: str, wanted: Aggregate, ticker: Ticker, *commands: str) -> Snapshot:
    """The only snapshot, of what the commands have the program do."""
    with client.aggregate(selector, wanted) as subscription:
        for command in commands:
            ticker.do(command)
        account = subscription.unsubscribe()
        (snapshot,) = subscription.snapshots()
    assert snapshot.account.in_flight == account.lost == 0
    check_account(snapshot)
    return snapshot


@pytest.mark.vm
def test_functions_of_a_value(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    functions = ["count", "sum", "min", "max", "avg", "stddev", "quantize"]
    wanted = Aggregate(functions=functions, value="arg1", by=["arg2:str", "execname", "pid"])
    snapshot = finished(client, of(ticker_program, "tick"), wanted, ticker, "fire 1000")
    (row,) = snapshot.rows
    assert row.key == ("tick", ticker_program.name[:15], ticker.pid)
    values = [-number for number in range(1000)]
    assert row.values == {
        "count": 1000, "sum": sum(values), "min": -999, "max": 0, "avg": -499.5,
        "stddev": pytest.approx(statistics.pstdev(values)),
    }  # fmt: skip
    assert [(each.low, each.high, each.count) for each in row.buckets] == [
        (-1023, -512, 488), *((-(2 << bit) + 1, -(1 << bit), 1 << bit) for bit in range(8, -1, -1)), (0, 0, 1),
    ]  # fmt: skip


def test_threads_by_themselves(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    """Each argument is fired once by each of 8 threads."""
    wanted = Aggregate(functions=["count", "sum", "values"], value="arg0", by=["tid"])
    snapshot = finished(client, of(ticker_program, "tick"), wanted, ticker, "threads 8 2000")
    assert len(snapshot.rows) == 8
    assert {tuple(row.values.values()) for row in snapshot.rows} == {(2000, sum(range(2000)), 2000)}
    wanted = Aggregate(by=["arg0"])
    snapshot = finished(client, of(ticker_program, "tick"), wanted, ticker, "threads 8 2000")
    assert {row.key: row.values["count"] for row in snapshot.rows} == {(number,): 8 for number in range(2000)}


def test_intervals_add_up_while_the_program_fires(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    wanted = Aggregate(functions=["count", "sum"], value="arg0", by=["name"], interval_ms=20)
    total: Counter[str] = Counter()
    intervals = 0
    with client.aggregate(of(ticker_program, "tick"), wanted) as subscription:
        snapshots = subscription.snapshots()
        for _ in range(20):
            ticker.begin("threads 2 500")
            snapshot = next(snapshots)
            intervals += bool(snapshot.rows)
            total.update(added(snapshot, total["count"]))
            ticker.finish()
        subscription.unsubscribe()
        for snapshot in snapshots:
            total.update(added(snapshot, total["count"]))
        account = subscription.account
    assert account is not None
    assert account.lost == 0
    assert total == {"count": 20_000, "sum": 40 * sum(range(500))}
    assert intervals > 1


def added(snapshot: Snapshot, before: int) -> dict[str, int]:
    """What an interval adds; its account says the same."""
    check_account(snapshot)
    counts = {name: sum(int(row.values[name] or 0) for row in snapshot.rows) for name in ("count", "sum")}
    assert snapshot.account.aggregated == before + counts["count"]
    return counts


@pytest.mark.vm
def test_filters_and_scope_apply(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    with Ticker(ticker_program) as other:
        options = SubscribeOptions(where="arg0 >= 90", pids=[ticker.pid])
        with client.aggregate(of(ticker_program, "tick"), Aggregate(), options) as subscription:
            ticker.do("fire 100")
            other.do("fire 100")
            account = subscription.unsubscribe()
            (snapshot,) = subscription.snapshots()
    assert [row.values for row in snapshot.rows] == [{"count": 10}]
    assert (account.aggregated, account.lost) == (10, 0)
    assert account.fired == 10 + account.filtered


def test_events_and_aggregations_of_one_site(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    selector = of(ticker_program, "tick")
    with client.subscribe(f"{selector}(arg0)") as events:
        snapshot = finished(client, selector, Aggregate(by=["arg0"]), ticker, "fire 50")
        events.unsubscribe()
        assert [event.values[0] for event in events.events()] == list(range(50))
    assert len(snapshot.rows) == 50


def test_commands(daemon: Daemon, ticker_program: Path) -> None:
    """Of a command, so that everything is known beforehand."""
    run = ["--", str(ticker_program), "1000"]
    selector = of(ticker_program, "tick")
    counted = stapsdt(daemon.target, "count", selector, "--by", "arg2:str,name", *run)
    assert counted.stdout == "COUNT  arg2:str  name\n1,000  tick      tick\n"
    assert "1000 events aggregated, 0 filtered, 0 lost, 1 site" in counted.stderr
    stats = stapsdt(daemon.target, "stats", selector, "arg0", "--unit", "us", *run)
    assert stats.stdout == "COUNT     AVG   MIN     MAX     SUM\n1,000  500 us  0 ns  999 us  500 ms\n"
    hist = stapsdt(daemon.target, "hist", selector, "arg0", "--linear", "0", "1000", "500", *run)
    assert hist.stdout == (
        "1,000 values  p50 499  p90 999  p99 999  max 999\n"
        f"      [0, 500)  500  {'█' * 40}\n"
        f"  [500, 1,000)  500  {'█' * 40}\n"
    )
    found = stapsdt(daemon.target, "hist", selector, "arg0", "--linear", "0", "1000", "500", "--json", *run)
    assert json.loads(found.stdout) == {
        "key": [],
        "count": 1000,
        "max": 999,
        "buckets": [[0, 499, 500], [500, 999, 500]],
    }
    assert json.loads(found.stderr.splitlines()[-1])["aggregated"] == 1000


@pytest.mark.vm
def test_keys_and_values_that_are_expressions(
    daemon: Daemon, client: Client, ticker: Ticker, ticker_program: Path
) -> None:
    """Of a probe that is fired with a number, the same negated, and its name."""
    selector = of(ticker_program, "tick")
    by = ["arg0 / 300", 'arg0 >= 900 ? "late" : str(arg2)', "arg0 == 7", "str(arg2, arg0 % 3)", "arg0 / 500.0 > 1.0"]
    wanted = Aggregate(functions=["count", "sum"], value="arg0 - arg1 * 2", by=by)
    snapshot = finished(client, selector, wanted, ticker, "fire 1000")
    expected: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in range(1000):
        text = "late" if number >= 900 else "tick"
        expected[number // 300, text, int(number == 7), "tick"[: number % 3], int(number > 500)].append(3 * number)
    assert {row.key: (row.values["count"], row.values["sum"]) for row in snapshot.rows} == {
        key: (len(values), sum(values)) for key, values in expected.items()
    }
    with client.aggregate(selector, wanted) as subscription:
        (reason,) = subscription.added_late
        assert subscription.added_late == {reason: 1}
        (held,) = client.subscriptions()
        assert held.added_late == subscription.added_late
        shown = stapsdt(daemon.target, "info").stdout
        assert f"each hit of 1 site is sent to the server, which adds them up: {reason}" in " ".join(shown.split())
    with client.aggregate(selector, Aggregate(by=["str(arg2)", "arg0", "pid", "uid"])) as subscription:
        short = subscription.added_late
    on_bpf = subscription.engine == "bpf"
    of_kernel = (
        'the kernel does not calculate (arg0 >= 900) ? "late" : str(arg2, 255): '
        "engines test and calculate integers, no strings, bytes or floating-point numbers"
    )
    assert reason == (of_kernel if on_bpf else "the ftrace engine adds nothing up")
    assert short == ({} if on_bpf else {reason: 1})


@pytest.mark.parametrize(
    ("where", "by", "value"),
    [
        ("", "arg0 / 300", "arg0 - arg1 * 2"),
        ("arg0 % 3 != arg1 % 2", "arg0 % 7 < 3, arg0 & 12", "arg0 ? 1000 / arg0 : arg1"),
        ("", "str(arg2), -arg0 >> 8", "100 / (arg0 % 5)"),
        ("arg0 < 500 || -arg1 == 777", "arg0 - arg1 > 500 ? 1 : 100 % arg0, pid == tid", "arg1"),
    ],
)
def test_keys_and_values_that_are_integers(
    client: Client, ticker: Ticker, ticker_program: Path, *, where: str, by: str, value: str
) -> None:
    """The kernel calculates as the daemon does, which adds events up if a key is a floating-point number."""
    selector, functions, keys = of(ticker_program, "tick"), ["count", "sum", "min", "max"], by.split(", ")
    wanted, wanted_late = (
        Aggregate(functions=functions, value=value, by=each) for each in (keys, [*keys, "1.0 * pid"])
    )
    options = SubscribeOptions(where=where)
    with (
        client.aggregate(selector, wanted, options) as integers,
        client.aggregate(selector, wanted_late, options) as late,
    ):
        assert (integers.added_late == {}, len(late.added_late)) == (integers.engine == "bpf", 1)
        ticker.do("fire 1000")
        kernels, daemons = (rows_of(each) for each in (integers, late))
    assert len(kernels) == len(daemons), f"keys differ in the process: {sorted(daemons, key=str)}"
    assert kernels == {key[:-1]: values for key, values in daemons.items()}
    assert len(kernels) > 1


def rows_of(subscription: Subscription) -> dict[tuple[object, ...], dict[str, object]]:
    """The rows of a subscription, which ends and has lost nothing."""
    assert subscription.unsubscribe().lost == 0
    return {row.key: dict(row.values) for snapshot in subscription.snapshots() for row in snapshot.rows}


def test_values_of_the_process(client: Client, ticker: Ticker, ticker_program: Path) -> None:
    selector = of(ticker_program, "tick")
    functions = ["count", "min", "max", "sum"]
    by_pid = finished(client, selector, Aggregate(functions=functions, value="pid"), ticker, "fire 10")
    assert [tuple(row.values.values()) for row in by_pid.rows] == [(10, ticker.pid, ticker.pid, 10 * ticker.pid)]
    by_share = finished(client, selector, Aggregate(functions=["avg"], value="arg0 < 4"), ticker, "fire 10")
    assert [dict(row.values) for row in by_share.rows] == [{"avg": 0.4}]


def test_values_that_the_kernel_knows_of_the_thread(
    client: Client, engine: str, ticker: Ticker, ticker_program: Path
) -> None:
    """The ftrace engine does not tell."""
    wanted = Aggregate(functions=["count", "min", "max", "sum"], value="uid")
    snapshot = finished(client, of(ticker_program, "tick"), wanted, ticker, "fire 10")
    uid = os.getuid()
    expected = (10, uid, uid, 10 * uid) if engine == "bpf" else (10, None, None, None)
    assert [tuple(row.values.values()) for row in snapshot.rows] == [expected]


@pytest.mark.parametrize("is_json", [False, True])
def test_commands_with_expressions(daemon: Daemon, ticker_program: Path, *, is_json: bool) -> None:
    run = [*(["--json"] if is_json else []), "--", str(ticker_program), "1000"]
    selector = of(ticker_program, "tick")
    by = 'arg0 > 100 ? "big, (very)" : "small", str(arg2, 2)'
    counted = stapsdt(daemon.target, "count", selector, "--by", by, *run)
    hist = stapsdt(daemon.target, "hist", selector, "arg0 - arg1", "--linear", "0", "2000", "1000", *run)
    if is_json:
        rows = [json.loads(line) for line in counted.stdout.splitlines()]
        cut = {"truncated": ["str(arg2, 2)"]}
        assert rows == [
            {"key": ["big, (very)", "ti"], "count": 899} | cut, {"key": ["small", "ti"], "count": 101} | cut,
        ]  # fmt: skip
        assert list(json.loads(counted.stderr.splitlines()[0])["added_late"].values()) == [1]
        assert json.loads(hist.stdout)["buckets"] == [[0, 999, 500], [1000, 1999, 500]]
    else:
        head, big, small = counted.stdout.splitlines()
        assert head.split(maxsplit=1) == ["COUNT", 'arg0 > 100 ? "big, (very)" : "small"  str(arg2, 2)']
        assert (big.split(), small.split()) == (["899", "big,", "(very)", "ti…"], ["101", "small", "ti…"])
        assert counted.stderr.count("each hit of 1 site is sent to the server, which adds them up: ") == 1
        assert hist.stdout.startswith("1,000 values  p50 999  p90 1,998  p99 1,998  max 1,998\n")


def test_limit_and_intervals(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    selector = of(ticker_program, "tick")
    limited = stapsdt(daemon.target, "count", selector, "--by", "arg0", "--limit", "3", "--", str(ticker_program), "5")
    assert limited.stdout == "COUNT  arg0\n    1  0\n    1  1\n    1  2\nand 2 more keys\n"
    shown = stapsdt(daemon.target, "count", selector, "--interval", "0.1", "--count", "2", "--json")
    assert ticker.semaphore == 0
    assert shown.stdout == ""
    wrong = stapsdt(daemon.target, "count", selector, "--count", "2", check=False)
    assert (wrong.returncode, "give --interval, too" in wrong.stderr) == (2, True)


def test_terminal_is_redrawn_and_has_everything_at_the_end(
    daemon: Daemon, client: Client, ticker: Ticker, ticker_program: Path
) -> None:
    command = shlex.join(stapsdt_command(daemon.target, "count", of(ticker_program, "tick"), "--by", "arg0"))

    def fire_and_interrupt(process: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: ticker.semaphore, "the site to be armed")
        ticker.do("fire 70")
        wait_for(lambda: [each.account.aggregated for each in client.subscriptions()] == [70], "the hits to be counted")
        os.killpg(process.pid, signal.SIGINT)

    environment = os.environ | {"TERM": "xterm"}
    shown = run_on_terminal(f"exec {command}", environment, fire_and_interrupt, lines=10)
    assert "\x1b[?25l" in shown
    whole = shown.rpartition("\x1b[H")[2].splitlines()
    assert whole[0] == "COUNT  arg0"
    assert len(whole) == 1 + 70 + 1
    assert "70 events aggregated" in whole[-1]


def test_strings_as_long_as_those_of_d_are_keys_in_the_kernel(
    client: Client, ticker: Ticker, ticker_program: Path
) -> None:
    longest = "x" * 254
    with client.aggregate(of(ticker_program, "text"), Aggregate(by=["str(arg0, 255)"])) as subscription:
        assert subscription.added_late == {} or subscription.engine == "ftrace"
        for text in (longest + "a", longest + "b", longest + "bc", ""):
            ticker.do(f"text {text}")
        subscription.unsubscribe()
        *_, snapshot = subscription.snapshots()
        rows = [(row.key, row.values) for row in snapshot.rows]
    # of which there is more is another key
    counts = {(*key, isinstance(key[0], CutText)): row["count"] for key, row in rows}
    assert counts == {(longest + "a", False): 1, (longest + "b", False): 1, (longest + "b", True): 1, ("", False): 1}
