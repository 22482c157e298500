"""Which hits a subscription wants, by their arguments and by whose they are, on the real kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stapsdtd.client import Account, SiteState
from stapsdtd.kernel import cgroups
from tests.support import TICKER, Daemon, Recorder, Ticker, require, stapsdt, wait_for

pytestmark = pytest.mark.kernel


def of(program: Path, probe: str) -> str:
    """The probe in this very program: another developer's tests may run one of the same name."""
    return f"{TICKER}:{program}::{probe}"


def accounted(account: Account) -> tuple[int, int, int]:
    assert account.lost == 0
    assert account.fired == account.delivered + account.filtered
    return account.fired, account.delivered, account.filtered


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        pytest.param("arg0 == 3", [3], marks=pytest.mark.vm),
        ("arg0 != 3", [*range(3), *range(4, 20)]),
        ("arg0 < 3", [0, 1, 2]),
        ("3 >= arg0", [0, 1, 2, 3]),
        ("arg0 > 17", [18, 19]),
        ("arg0 >= 17", [17, 18, 19]),
        pytest.param("arg1 < -17", [18, 19], marks=pytest.mark.vm),
        ("arg1 >= -1", [0, 1]),
        ("arg1 == -5", [5]),
        ("arg1 == 4294967291", []),
        ("arg0", list(range(1, 20))),
        ("!arg0", [0]),
        ("arg0 & 0x10", [16, 17, 18, 19]),
        pytest.param("(arg0 & 3) == 3", [3, 7, 11, 15, 19], marks=pytest.mark.vm),
        ("arg1 & 0xff == 0xfe", [2]),
        ("arg1 & -1 > 18446744073709551613", [1, 2]),
        ("arg0 == 1 || arg1 == -2 && arg0 == 2 || arg0 == 5 && arg1 == 5", [1, 2]),
        ("!(arg0 < 5 || arg0 > 7)", [5, 6, 7]),
        pytest.param("arg0 > 2 && (arg0 < 5 || !(arg1 > -18))", [3, 4, 18, 19], marks=pytest.mark.vm),
        pytest.param("ntohs(arg0) >= 0x1100 && ntohl(arg1) != 0xedffffff", [17, 18], marks=pytest.mark.vm),
        ("ntohll(arg0) == 3 << 56", [3]),
        ("arg2 == 0", []),
        ("arg0 < 0 || arg1 > 2147483647", []),
    ],
)
def test_arguments(daemon: Daemon, ticker: Ticker, ticker_program: Path, where: str, wanted: Sequence[int]) -> None:
    with Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) as recorder:
        ticker.do("fire 20")
    assert recorder.values() == [(number,) for number in wanted]
    assert accounted(recorder.finish()) == (20, len(wanted), 20 - len(wanted))
    assert [event.seq for event in recorder.events] == list(range(1, len(wanted) + 1))


VALUES = (-8, 0xF8, -1600, 0xF916, -320000, 0xFFFFFF32, -(1 << 63), (1 << 64) - 1, 77, -77)


@pytest.mark.parametrize("index", range(len(VALUES)))
def test_every_width_and_sign(daemon: Daemon, ticker: Ticker, ticker_program: Path, index: int) -> None:
    value = VALUES[index]
    outcomes = {
        f"arg{index} == {value}": True,
        f"arg{index} != {value}": False,
        f"arg{index} >= {value}": True,
        f"arg{index} > {value}": False,
        f"arg{index} < 0": value < 0,
        f"arg{index} & 0xff == {value & 0xFF}": True,
        f"arg{index} & 0x8000000000000000": value & (1 << 63) != 0,
    }
    recorders = {where: Recorder(daemon.target, of(ticker_program, "values(arg9)"), where=where) for where in outcomes}
    ticker.do("values")
    accounts = {where: accounted(recorder.finish()) for where, recorder in recorders.items()}
    assert accounts == {where: (1, 1, 0) if holds else (1, 0, 1) for where, holds in outcomes.items()}


@pytest.mark.vm
def test_process_thread_and_command_name(daemon: Daemon, ticker: Ticker, ticker_program: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "a name of more than 15 bytes"
    os.link(ticker_program, renamed)
    with Ticker(renamed) as other:
        wheres = {
            f"pid == {ticker.pid}": {ticker.pid},
            f"tid != {ticker.pid}": {other.pid},
            'execname == "ticker"': {ticker.pid},
            'comm == "a name of more "': {other.pid},
            'execname != "ticker" && execname != "a name of more "': set(),
            f'pid > {max(ticker.pid, other.pid)} || "ticker" == execname': {ticker.pid},
        }
        recorders = {where: Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) for where in wheres}
        ticker.do("fire 3")
        other.do("fire 4")
        for where, pids in wheres.items():
            account = accounted(recorders[where].finish())
            assert {event.pid for event in recorders[where].events} == pids, where
            delivered = 3 * (ticker.pid in pids) + 4 * (other.pid in pids)
            assert account == (7, delivered, 7 - delivered), where


def test_scope_and_expression_have_both_to_be_met(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with (
        Ticker(ticker_program) as other,
        Recorder(
            daemon.target,
            of(ticker_program, "tick(arg0)"),
            pids=[ticker.pid],
            execnames=["ticker", "psql"],
            where="arg0 < 2",
        ) as recorder,
        Recorder(daemon.target, of(ticker_program, "tick(arg0)"), execnames=["psql"]) as nobody,
    ):
        ticker.do("fire 3")
        other.do("fire 4")
    assert [(event.pid, event.values) for event in recorder.events] == [(ticker.pid, (0,)), (ticker.pid, (1,))]
    # an engine may leave other processes' probes unarmed, and then these do not fire
    assert accounted(recorder.finish())[1] == 2
    assert accounted(nobody.finish()) == (7, 0, 7)


def test_captures_are_those_that_were_asked_for(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(daemon.target, of(ticker_program, "text(arg0:str)"), where="arg1 == 5 && arg0 != 0") as recorder:
        for text in ("three", "four", "seven"):
            ticker.do(f"text {text}")
    assert recorder.values() == [("three",), ("seven",)]
    assert accounted(recorder.finish()) == (3, 2, 1)


@pytest.mark.vm
@pytest.mark.parametrize(
    ("where", "wanted", "undecided"),
    [
        ("12 / arg0 > 3", [1, 2, 3], 1),
        ("arg0 == 0 || 12 % (arg0 - 4) == 0", [0, 5], 1),
        # what is not evaluated divides by nothing
        ("arg0 == 0 || 12 / arg0 > 3", [0, 1, 2, 3], 0),
        ("arg0 > 2 && 12 / (arg0 - 3) > 5", [4, 5], 1),
        ("!(12 / arg0 > 3)", [4, 5], 1),
        # evaluated by the server
        ('12 / arg0 > 3 && str(arg2) == "tick"', [1, 2, 3], 1),
        ('str(arg2) == "tick" && (str(arg2) == "x" || 12 / arg0 > 3)', [1, 2, 3], 1),
    ],
)
def test_hits_that_divide_by_0_are_told(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, where: str, *, wanted: Sequence[int], undecided: int
) -> None:
    with Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) as recorder:
        ticker.do("fire 6")
    assert recorder.values() == [(number,) for number in wanted]
    account = recorder.finish()
    assert accounted(account) == (6, len(wanted), 6 - len(wanted))
    assert account.undecided == undecided


def test_a_summary_tells_of_divisions_by_0(daemon: Daemon, ticker_program: Path) -> None:
    arguments = ("count", f"{TICKER}:tick", "--where", "12 / arg0 > 3")
    done = stapsdt(daemon.target, *arguments, "--", str(ticker_program), "6")
    assert "3 filtered (1 since --where divides by 0, or needs what could not be read)" in done.stderr
    done = stapsdt(daemon.target, *arguments, "--json", "--", str(ticker_program), "6")
    assert json.loads((done.stdout + done.stderr).splitlines()[-1])["undecided"] == 1


@pytest.mark.parametrize("command", ["stats", "hist"])
@pytest.mark.parametrize(
    ("value", "valueless"),
    [
        ("12 / arg0", 1),
        ("12 % (arg0 & 1)", 3),
        ("arg0 ? 12 / arg0 : 0", 0),
        # computed by the server
        ('str(arg2) == "tick" ? 12 / arg0 : 0', 1),
    ],
)
def test_a_summary_tells_of_values_that_divide_by_0(
    daemon: Daemon, ticker_program: Path, command: str, value: str, valueless: int
) -> None:
    arguments = (command, f"{TICKER}:tick", value)
    done = stapsdt(daemon.target, *arguments, "--", str(ticker_program), "6")
    told = f" ({valueless} without VALUE, which divides by 0, or needs what could not be read)" if valueless else ""
    assert f"6 events aggregated{told}, 0 filtered" in done.stderr
    done = stapsdt(daemon.target, *arguments, "--json", "--", str(ticker_program), "6")
    assert json.loads((done.stdout + done.stderr).splitlines()[-1]).get("valueless", 0) == valueless


def test_nothing_is_lost_or_counted_twice_in_a_flood(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(
        daemon.target, of(ticker_program, "tick(arg0)"), where="(arg0 & 7) == 5", kernel_buffer_kib=16384
    ) as recorder:
        ticker.do("threads 4 20000")
    assert accounted(recorder.finish()) == (80_000, 10_000, 70_000)
    assert len(recorder.events) == 10_000
    assert {value % 8 for (value,) in recorder.values() if isinstance(value, int)} == {5}


def test_site_without_the_argument_is_refused_and_the_others_are_armed(
    daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    with Recorder(daemon.target, of(ticker_program, "*"), where="arg2 != 1") as recorder:
        ticker.do("text hello")
        ticker.do("fire 1")
    states = {status.name: (status.state, status.reason) for status in recorder.statuses}
    assert states == {
        "text": (SiteState.REFUSED, "it has 2 arguments, so there is no arg2 to filter by"),
        "tick": (SiteState.ARMED, ""),
        "values": (SiteState.ARMED, ""),
    }
    assert [event.probe.name for event in recorder.events] == ["tick"]
    assert accounted(recorder.finish()) == (1, 1, 0)


def test_library_that_is_loaded_later_is_filtered_too(daemon: Daemon, ticker: Ticker, library: Path) -> None:
    with Recorder(daemon.target, f"library:{library}::", where=f"pid == {ticker.pid} && arg0 >= 8") as recorder:
        ticker.do(f"open {library}")
        wait_for(recorder.armed, "the library to be armed")
        ticker.do("call 10")
    assert accounted(recorder.finish())[1:] == (2, 8)


@pytest.fixture
def bpf_only(engine: str) -> None:
    if engine != "bpf":
        pytest.skip("only the bpf engine knows users and cgroups")


@pytest.fixture
def cgroup(ticker: Ticker) -> Iterator[str]:
    """A cgroup below one of its own, with the ticker in it."""
    roots = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    require(roots, "cgroup2")
    outer = Path(roots[0]) / f"stapsdtd_test_{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    home = Path(roots[0]) / Path(f"/proc/{ticker.pid}/cgroup").read_text().partition("0::/")[2].splitlines()[0]
    try:
        (inner / "cgroup.procs").write_text(str(ticker.pid))
        yield f"/{outer.name}"
    finally:
        (home / "cgroup.procs").write_text(str(ticker.pid))
        inner.rmdir()
        outer.rmdir()


@pytest.mark.vm
@pytest.mark.usefixtures("bpf_only")
def test_users(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    wheres = {"uid == 0": 5, "uid != 0": 0, "gid == 0 && uid < 1": 5, "uid == 65534": 0}
    recorders = {where: Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) for where in wheres}
    by_scope = Recorder(daemon.target, of(ticker_program, "tick(arg0)"), uids=[1000, 0])
    ticker.do("fire 5")
    assert {where: accounted(recorder.finish())[1] for where, recorder in recorders.items()} == wheres
    assert accounted(by_scope.finish()) == (5, 5, 0)


@pytest.mark.vm
@pytest.mark.usefixtures("bpf_only")
def test_cgroups(daemon: Daemon, ticker: Ticker, ticker_program: Path, cgroup: str) -> None:
    with (
        Ticker(ticker_program) as other,
        Recorder(daemon.target, of(ticker_program, "tick(arg0)"), cgroups=[cgroup]) as inside,
        Recorder(daemon.target, of(ticker_program, "tick(arg0)"), cgroups=[f"{cgroup}/inner", "/"]) as anywhere,
        Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=f'cgroup != "{cgroup}/inner"') as outside,
    ):
        ticker.do("fire 3")
        other.do("fire 4")
    assert accounted(inside.finish()) == (7, 3, 4)
    assert accounted(anywhere.finish()) == (7, 7, 0)
    assert accounted(outside.finish()) == (7, 4, 3)
    assert {event.pid for event in inside.events} == {ticker.pid}


@pytest.mark.parametrize("scope", [{"uids": [0]}, {"where": "gid == 0"}, {"cgroups": ["/"]}])
def test_ftrace_refuses_what_it_does_not_know(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, engine: str, scope: dict[str, list[str]]
) -> None:
    if engine != "ftrace":
        pytest.skip("the other engine knows it")
    if "cgroups" in scope:
        require(cgroups.find("/"), "cgroup2")
    recorder = Recorder(daemon.target, of(ticker_program, "tick"), **scope)  # type: ignore[arg-type]
    ticker.do("fire 2")
    (status,) = recorder.sites
    assert status.state is SiteState.REFUSED
    assert "the ftrace engine cannot filter by" in status.reason
    assert accounted(recorder.finish()) == (0, 0, 0)


@pytest.mark.usefixtures("ticker")
def test_command(daemon: Daemon, ticker_program: Path) -> None:
    wrong = stapsdt(daemon.target, "trace", f"{TICKER}:tick", "--where", "arg0 => 5", check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "stapsdt: --where: unexpected '='; write == (column 6)\n"
    nowhere = stapsdt(daemon.target, "trace", f"{TICKER}:tick", "--cgroup", "/no.slice", check=False)
    assert nowhere.returncode == 2
    assert "--cgroup: no such cgroup: '/no.slice'" in nowhere.stderr
    with Recorder(daemon.target, of(ticker_program, "tick"), where="arg0 == 7", execnames=["ticker"]):
        (held,) = json.loads(stapsdt(daemon.target, "info", "--json").stdout)["subscriptions"]
        assert (held["where"], held["scope"]["execnames"]) == ("arg0 == 7", ["ticker"])
        assert "execname ticker, where arg0 == 7" in stapsdt(daemon.target, "info").stdout
