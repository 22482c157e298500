"""Filters that engines cannot test, on the real kernel: the events are those that Python selects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stapsdtd.client import Aggregate, Client, SiteState, SubscribeOptions
from stapsdtd.kernel import cgroups
from tests.kernel.test_where import accounted, of
from tests.support import Daemon, Recorder, Ticker, require

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("arg0 + arg1 == 0", lambda _: True),
        ("arg0 * 3 % 7 == 2", lambda number: number * 3 % 7 == 2),
        ("arg0 > 4 && (arg0 - 10) / 3 == 0", lambda number: number in {10, 11, 12}),
        ("arg1 / 4 == -2", lambda number: number // 4 == 2),
        ("100 / arg0 > 10", lambda number: 0 < number < 10),
        ("(arg0 < 10 ? arg0 : arg1 + 25) >= 8", lambda number: (number if number < 10 else 25 - number) >= 8),
        ("arg0 ? arg0 == 3 : arg1 == 0", lambda number: number in {0, 3}),
        ("arg0 << 60 >> 60 == 1 || arg0 ^ 3 == 1", lambda number: number in {1, 2, 17}),
        ("-arg1 == arg0 && ~arg0 & 1", lambda number: number % 2 == 0),
        ("arg0 >= 3 && arg0 * arg0 < 50 && name == 'tick'", lambda number: 3 <= number <= 7),
    ],
)
def test_arithmetic(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, where: str, wanted: Callable[[int], bool]
) -> None:
    with Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) as recorder:
        ticker.do("fire 20")
    numbers = [number for number in range(20) if wanted(number)]
    assert recorder.values() == [(number,) for number in numbers]
    assert accounted(recorder.finish()) == (20, len(numbers), 20 - len(numbers))


TEXTS = ("SELECT 1", "SELECT 22", "INSERT", "select", "S")


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ('str(arg0) == "INSERT"', ["INSERT"]),
        ('str(arg0) != "INSERT" && arg1 > 6', ["SELECT 1", "SELECT 22"]),
        ('str(arg0) ~ "SELECT*"', ["SELECT 1", "SELECT 22"]),
        ('!str(arg0) ~ "S*" || arg1 == 1', ["INSERT", "select", "S"]),
        ('str(arg0) ~ "*[0-9]" && !(str(arg0) ~ "* 2?")', ["SELECT 1"]),
        ('str(arg0, 3) == "SEL"', ["SELECT 1", "SELECT 22"]),
        ('str(arg0, arg1 - 2) == "SELECT"', ["SELECT 1"]),
        ('execname ~ "tick*" && str(arg0) ~ "s*"', ["select"]),
    ],
)
def test_strings(daemon: Daemon, ticker: Ticker, ticker_program: Path, where: str, wanted: list[str]) -> None:
    with Recorder(daemon.target, of(ticker_program, "text(arg0:str, arg1)"), where=where) as recorder:
        for text in TEXTS:
            ticker.do(f"text {text}")
    assert recorder.values() == [(text, len(text)) for text in wanted]
    assert accounted(recorder.finish()) == (len(TEXTS), len(wanted), len(TEXTS) - len(wanted))


def test_what_is_captured_for_the_filter_alone_is_not_delivered(
    daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    """Also if events of several probes come in one batch, whose values have the same types with it."""
    probes = of(ticker_program, "t*(arg0:hex)")
    with Recorder(daemon.target, probes, where='name == "tick" ? arg0 + arg1 == 0 : arg1 * 2 == 8') as recorder:
        ticker.do("fire 2")
        ticker.do("text four")
        ticker.do("text three")
    assert [(event.probe.name, len(event.values)) for event in recorder.events] == [
        ("tick", 1),
        ("tick", 1),
        ("text", 1),
    ]
    assert accounted(recorder.finish()) == (4, 3, 1)


def test_site_that_lacks_what_the_filter_needs_is_refused(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(daemon.target, of(ticker_program, "*"), where='str(arg2) ~ "ti*"') as recorder:
        ticker.do("text hello")
        ticker.do("fire 2")
    states = {status.name: (status.state, status.reason) for status in recorder.statuses}
    assert states["text"] == (SiteState.REFUSED, "it has 2 arguments, so there is no arg2")
    assert states["tick"] == (SiteState.ARMED, "")
    assert states["values"][0] is SiteState.REFUSED
    assert [event.probe.name for event in recorder.events] == ["tick", "tick"]


@pytest.mark.vm
def test_nothing_is_lost_or_counted_twice_in_a_flood(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    with Recorder(
        daemon.target, of(ticker_program, "tick(arg0)"), where="arg0 % 8 == 5 && arg0 & 1", kernel_buffer_kib=16384
    ) as recorder:
        ticker.do("threads 4 20000")
    assert accounted(recorder.finish()) == (80_000, 10_000, 70_000)
    assert {value % 8 for (value,) in recorder.values() if isinstance(value, int)} == {5}


@pytest.mark.parametrize(
    ("where", "is_wanted"),
    [
        ('cgroup ~ "/*" && uid * 2 + gid == 0', True),
        ('container ~ "?*" || container == cgroup', False),
        ('cgroup == "/" && cpu < 1024 && timestamp > 0', True),
        ('cgroup != "/" || pid != tid', False),
        ("uid + 1 == 1 ? gid - 1 == 0 : gid == 0", False),
    ],
)
def test_what_is_known_of_the_thread(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, engine: str, where: str, *, is_wanted: bool
) -> None:
    require(cgroups.find("/"), "cgroup2")
    with Recorder(daemon.target, of(ticker_program, "tick(arg0)"), where=where) as recorder:
        ticker.do("fire 3")
    if engine == "ftrace":
        (status,) = recorder.sites
        assert (status.state, "the ftrace engine cannot" in status.reason) == (SiteState.REFUSED, True)
    else:
        assert accounted(recorder.finish()) == (3, 3 * is_wanted, 3 - 3 * is_wanted)


def test_aggregation_of_what_only_the_daemon_can_filter(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """The kernel adds nothing up then, and the captures of the filter are not those of the rows."""
    wants = Aggregate(functions=("count", "sum"), value="arg0", by=["execname"])
    options = SubscribeOptions(where='arg0 % 3 == 1 && str(arg2) ~ "t?ck"')
    with Client(daemon.target) as client:
        subscription = client.aggregate(of(ticker_program, "tick"), wants, options)
        ticker.do("fire 20")
        subscription.unsubscribe()
        rows = [row for snapshot in subscription.snapshots() for row in snapshot.rows]
    assert [(row.key, row.values) for row in rows] == [(("ticker",), {"count": 7, "sum": 70})]
