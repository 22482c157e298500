from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.kernel import function_hooks
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import ROOT, TICKER, Daemon, Ticker, stapsdt, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def trace(daemon: Daemon, ticker: Ticker) -> Iterator[subprocess.Popen[str]]:
    """A `trace --json` of the ticker that is armed."""
    with subprocess.Popen(
        stapsdt_command(daemon.target, "trace", f"{TICKER}:tick(arg0, arg2:str)", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        yield process
        process.kill()


def test_list_has_the_promised_keys(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    lines = stapsdt(daemon.target, "list", f"{TICKER}:t*", "--json", "--pid", str(ticker.pid)).stdout.splitlines()
    probes = {probe["name"]: probe for probe in map(json.loads, lines)}
    assert set(probes) == {"tick", "text"}
    tick = probes["tick"]
    assert set(tick) == {"provider", "name", "selector", "path", "build_id", "pids", "sites"}
    assert tick["provider"] == TICKER
    assert tick["path"] == str(ticker_program)
    assert tick["pids"] == [ticker.pid]
    (site,) = tick["sites"]
    assert set(site) == {"offset", "semaphore_offset", "function", "args"}
    assert site["function"] is not None
    assert [argument["size"] for argument in site["args"]] == [8, 4, 8]


def test_trace_ends_with_its_account_on_sigint(trace: subprocess.Popen[str], ticker: Ticker) -> None:
    ticker.do("fire 3")
    assert trace.stdout is not None
    first = json.loads(trace.stdout.readline())
    assert set(first) == {
        "seq", "time_ns", "monotonic_ns", "pid", "tid", "cpu", "comm", "provider", "name", "path", "module", "function",
        "offset", "args",
    }  # fmt: skip
    assert (first["seq"], first["pid"], first["comm"]) == (1, ticker.pid, "ticker")
    assert first["args"] == [0, "tick"]
    trace.send_signal(signal.SIGINT)
    assert trace.stderr is not None
    out, err = trace.stdout.read(), trace.stderr.read()
    assert trace.wait(timeout=30) == 0
    assert [json.loads(line)["args"] for line in out.splitlines()] == [[1, "tick"], [2, "tick"]]
    assert json.loads(err.splitlines()[-1]) == {"delivered": 3, "filtered": 0, "lost": 0, "sites": 1}
    assert ticker.semaphore == 0


def test_trace_of_a_flood_accounts_for_everything(own_daemon: Daemon, ticker: Ticker) -> None:
    command = stapsdt_command(own_daemon.target, "trace", f"{TICKER}:tick", "--json", "--buffer", "16")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace:
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        ticker.do("threads 4 25000")
        trace.send_signal(signal.SIGTERM)
        out, err = trace.communicate(timeout=60)
    summary = json.loads(err.splitlines()[-1])
    assert summary["delivered"] == len(out.splitlines())
    assert summary["lost"] > 0
    assert summary["delivered"] + summary["filtered"] + summary["lost"] == 100_000


def test_one_more_ctrl_c_behind_the_account_is_no_traceback(trace: subprocess.Popen[str]) -> None:
    assert trace.stderr is not None
    trace.send_signal(signal.SIGINT)
    said = trace.stderr.readline()
    while '"delivered"' not in said:
        said = trace.stderr.readline()
    while trace.poll() is None:
        trace.send_signal(signal.SIGINT)
    assert trace.stderr.read() == ""


def test_count_and_duration_end_with_0(daemon: Daemon, ticker: Ticker) -> None:
    command = stapsdt_command(daemon.target, "trace", f"{TICKER}:tick", "--json", "--count", "2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace:
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        # which would leave with the second one, and the rest might not count any more
        trace.send_signal(signal.SIGSTOP)
        ticker.do("fire 5")
        trace.send_signal(signal.SIGCONT)
        out, err = trace.communicate(timeout=30)
    assert trace.returncode == 0
    assert len(out.splitlines()) == 2
    summary = json.loads(err.splitlines()[-1])
    assert (summary["delivered"], summary["lost"], summary["unread"]) == (2, 0, 3)
    ended = stapsdt(daemon.target, "trace", f"{TICKER}:tick", "--json", "--duration", "0.2")
    assert ended.returncode == 0
    assert json.loads(ended.stderr.splitlines()[-1])["delivered"] == 0


def test_kernel_refusal_is_told_in_its_own_words(daemon: Daemon, ticker: Ticker, tracefs: Tracefs) -> None:
    """Another tool armed one of three sites with another semaphore, which the kernel does not allow."""
    assert ticker.semaphore == 0
    (site,) = json.loads(stapsdt(daemon.target, "list", f"{TICKER}:tick", "--json").stdout)["sites"]
    group = "stapsdtest_refusal"
    path = f"/proc/{ticker.pid}/exe"
    tracefs.append_definition(f"p:{group}/other {path}:{site['offset']:#x}({site['semaphore_offset'] + 2:#x})")
    tracefs.write(f"events/{group}/other/enable", "1")
    try:
        ended = stapsdt(daemon.target, "trace", f"{TICKER}:*", "--duration", "0.2")
        assert "2 sites armed" in ended.stderr
        assert "1 site refused" in ended.stderr or "1 refused" in ended.stderr
        assert f"{TICKER}:tick" in ended.stderr
        assert "Invalid argument" in ended.stderr
    finally:
        tracefs.write(f"events/{group}/other/enable", "0")
        tracefs.append_definition(f"-:{group}/other")


def test_info_and_doctor(daemon: Daemon, engine: str) -> None:
    info = json.loads(stapsdt(daemon.target, "info", "--json").stdout)
    assert info["engine"] == engine
    assert all(feature["available"] for feature in info["features"] if feature["name"] not in function_hooks.NAMES)
    assert "bpf programs" in [feature["name"] for feature in info["features"]]
    assert stapsdt(daemon.target, "doctor").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["trace", "a:b(arg0"], 2, "closing parenthesis"),
        (["trace", "no-such-probe", "--no-wait"], 1, "no-such-probe: no such probe yet"),
        (["trace", f"{TICKER}:tick", "--pid", str(2**22 + 1)], 2, "there is no process 4194305"),
        (["trace", "a:b(arg0:float)"], 2, "arg0:float"),
        (["trace", "a:b", "--where", "arg0 > > 1"], 2, "--where: unexpected '>'"),
        (["nothing"], 2, "nothing"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(daemon: Daemon, arguments: list[str], code: int, said: str) -> None:
    ended = stapsdt(daemon.target, *arguments, check=False)
    assert ended.returncode == code
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr


def test_demo_shows_events_and_leaves_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "stapsdtd.demo"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "shop:request" in ended.stdout
    assert "shop_cache:lookup" in ended.stdout
    assert "fired = delivered + filtered + lost, and nothing is left" in ended.stdout
