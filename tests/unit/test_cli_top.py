"""`stapsdt top`: what is added up from columns, and how that looks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stapsdtd.cli.top import without_values
from stapsdtd.cli.top_output import PipeOutput, TerminalOutput, frame, record
from stapsdtd.cli.top_rates import Interval, ProbeId, ProbeRow, ProcessRow, Rates
from stapsdtd.cli.unmatched import Hints
from stapsdtd.client import ColumnBatch, DescribedSite, Probe, ProtocolError, Site

QUIET = {"kernel_buffer": 0, "queue": 0}
SECOND_NS = 1_000_000_000


def described(site_id: int, name: str, path: str = "/usr/bin/app") -> DescribedSite:
    site = Site(site_id, 0x1000 + site_id, None, None, ())
    return DescribedSite(Probe("app", name, path, None, "x86-64", (), (site,)), site, ())


SITES = {1: described(1, "a"), 2: described(2, "a"), 3: described(3, "b"), 4: described(4, "a", "/opt/app")}


def batch(*events: tuple[int, int], tids: Sequence[int] | None = None, comm: bytes | Sequence[bytes] = b"app") -> Any:
    """Events by site_id and pid."""
    site_ids, pids = zip(*events, strict=True)
    count = len(events)
    numbers = np.arange(count)
    return ColumnBatch(
        count,
        numbers.astype("<u8"),
        numbers.astype("<i8"),
        np.array(pids, "<i4"),
        np.array(tids or pids, "<i4"),
        numbers.astype("<u2"),
        np.array([comm] * count if isinstance(comm, bytes) else comm, "S16"),
        np.array(site_ids, "<u4"),
        (),
        SITES,
    )


def take(rates: Rates, lost: dict[str, int] | None = None, seconds: float = 2.0) -> Interval:
    return rates.take(SECOND_NS, seconds, sites=3, refused=1, lost=QUIET if lost is None else lost)


A, A_ELSEWHERE, B = (
    ProbeId("app", "a", "/usr/bin/app"),
    ProbeId("app", "a", "/opt/app"),
    ProbeId("app", "b", "/usr/bin/app"),
)


class TestRates:
    def test_events_are_counted_by_probe_and_by_process(self) -> None:
        rates = Rates()
        rates.add(batch((1, 10), (2, 10), (1, 20), (3, 20), (4, 10)))
        rates.add(batch((1, 10), (1, 4_194_304)))
        assert take(rates) == Interval(
            SECOND_NS,
            2.0,
            7,
            7,
            (ProbeRow(A, 5, 5, 3), ProbeRow(A_ELSEWHERE, 1, 1, 1), ProbeRow(B, 1, 1, 1)),
            (ProcessRow(10, "app", 4, 4), ProcessRow(20, "app", 2, 2), ProcessRow(4_194_304, "app", 1, 1)),
            3,
            1,
            QUIET,
            {},
        )

    def test_next_interval_begins_at_0_and_totals_go_on(self) -> None:
        rates = Rates()
        rates.add(batch((1, 10), (1, 10), (3, 20)))
        take(rates)
        rates.add(batch((3, 20)))
        interval = take(rates, {"queue": 5})
        assert (interval.count, interval.total) == (1, 4)
        assert interval.probes == (ProbeRow(B, 1, 2, 1), ProbeRow(A, 0, 2, 0))
        assert interval.processes == (ProcessRow(20, "app", 1, 2), ProcessRow(10, "app", 0, 2))
        assert (interval.lost, interval.lost_before) == ({"queue": 5}, QUIET)
        assert take(rates).lost_before == {"queue": 5}

    def test_many_events_of_many_processes_are_all_counted(self) -> None:
        random = np.random.default_rng(5)
        sites, pids = random.integers(1, 5, 20_000), random.integers(1, 300, 20_000)
        rates = Rates()
        events = list(zip(sites.tolist(), pids.tolist(), strict=True))
        for start in range(0, len(events), 7_000):
            rates.add(batch(*events[start : start + 7_000]))
        interval = take(rates)
        assert {row.probe: row.count for row in interval.probes} == {
            A: int(np.isin(sites, [1, 2]).sum()), B: int((sites == 3).sum()), A_ELSEWHERE: int((sites == 4).sum()),
        }  # fmt: skip
        assert {row.pid: row.count for row in interval.processes} == {
            pid: int((pids == pid).sum()) for pid in set(pids.tolist())
        }
        assert [row.processes for row in interval.probes if row.probe == B] == [len(set(pids[sites == 3].tolist()))]

    def test_process_goes_by_its_first_threads_name_once_that_fires(self) -> None:
        rates = Rates()
        rates.add(batch((1, 10), tids=[11], comm=b"worker"))
        assert take(rates).processes[0].comm == "worker"
        rates.add(batch((1, 10), (3, 10), tids=[11, 10], comm=[b"worker", b"m\xffin"]))
        rates.add(batch((1, 10), tids=[12], comm=b"other"))
        assert take(rates).processes[0].comm == "m\\xffin"
        rates.add(batch((1, 10), comm=b"renamed"))
        assert take(rates).processes[0].comm == "renamed"

    def test_site_that_was_never_described(self) -> None:
        with pytest.raises(ProtocolError, match="site 99"):
            Rates().add(batch((99, 1)))

    def test_what_is_quiet_is_forgotten_where_there_is_too_much(self) -> None:
        rates = Rates(max_kept=2)
        rates.add(batch(*((1, pid) for pid in range(10)), (3, 1), (4, 2)))
        take(rates)
        rates.add(batch((1, 5)))
        interval = take(rates)
        assert (interval.count, interval.total) == (1, 13)
        assert len(interval.processes) == 10
        interval = take(rates)
        assert [(row.pid, row.total) for row in interval.processes] == [(5, 2)]
        assert [row.probe for row in interval.probes] == [A]


def interval(probes: int = 2, processes: int = 1, **more: Any) -> Interval:
    made = Interval(
        SECOND_NS,
        2.0,
        2469,
        1_234_567,
        tuple(ProbeRow(ProbeId("app", f"p{n}", "/usr/bin/app"), 1000 - n, 100_000, 3) for n in range(probes)),
        tuple(ProcessRow(1000 + n, "app", 50, 1000) for n in range(processes)),
        531,
        0,
        QUIET,
        QUIET,
    )
    return dataclasses.replace(made, **more)


class TestFrame:
    def test_at_a_glance(self) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(1))
        assert frame(interval(), rows=10, color=False) == [
            f"stapsdt top  {clock}  1,234 events/s  1,234,567 in all  531 sites",
            "lost: nothing",
            "",
            "     RATE/S            TOTAL  PROCESSES  PROBE (2)",
            "        500          100,000          3  app:p0  app",
            "        500          100,000          3  app:p1  app",
            "",
            "     RATE/S            TOTAL        PID  COMMAND (1)",
            "       25.0            1,000       1000  app",
        ]

    @pytest.mark.parametrize(
        ("probes", "processes", "shown"),
        [(0, 0, (0, 0)), (3, 2, (3, 2)), (40, 40, (9, 8)), (40, 2, (15, 2)), (2, 40, (2, 15)), (17, 0, (17, 0))],
    )
    def test_tables_share_the_room(self, probes: int, processes: int, shown: tuple[int, int]) -> None:
        lines = frame(interval(probes, processes), rows=17, width=80, color=False)
        assert len(lines) <= 23
        assert (
            sum("app:p" in line for line in lines),
            sum(line.endswith("  app") for line in lines if "app:" not in line),
        ) == shown
        among = [
            str(count) if count == seen else f"{seen} of {count}"
            for count, seen in zip((probes, processes), shown, strict=True)
        ]
        assert [line.rpartition("(")[2] for line in lines if "RATE/S" in line] == [f"{each})" for each in among]

    def test_lines_are_cut_to_the_width(self) -> None:
        wide = ProbeRow(ProbeId("app" * 40, "p", "/usr/bin/app"), 10**12, 10**14, 99_999)
        made = dataclasses.replace(interval(total=10**15, refused=10**6), probes=(wide,))
        lines = frame(made, rows=10, width=60, color=False)
        assert max(map(len, lines)) == 60

    def test_losses_are_told_by_stage(self) -> None:
        lost = interval(lost={"kernel_buffer": 1200, "queue": 0, "quota": 3}, lost_before={"kernel_buffer": 200})
        assert frame(lost, rows=4, color=False)[1] == ("LOST: 1,200 in kernel_buffer, 3 in quota (1,003 of them now)")
        assert frame(lost, rows=4, color=True)[1].startswith("\x1b[31mLOST: ")

    def test_refusals_and_waiting_are_told(self) -> None:
        assert frame(interval(refused=2), rows=4, color=False)[0].endswith("531 sites, 2 refused")
        waiting = interval(0, 0, sites=0, count=0, total=0)
        assert frame(waiting, rows=4, color=False)[1].startswith("no probe matches yet: waiting")
        assert frame(waiting, rows=4, color=False, notice="it \x1bbroke")[1] == "it \\x1bbroke"

    def test_what_strangers_named_reaches_no_terminal_unescaped(self) -> None:
        evil = "a\x1b[2J\n\u202e"
        lines = frame(
            dataclasses.replace(
                interval(),
                probes=(ProbeRow(ProbeId(evil, evil, f"/x/{evil}"), 1, 1, 1),),
                processes=(ProcessRow(1, evil, 1, 1),),
            ),
            rows=4,
            color=False,
        )
        assert all(line.isprintable() for line in lines)
        assert sum(r"\x1b[2J" in line for line in lines) == 2

    def test_interval_of_no_length_has_no_rate(self) -> None:
        assert "  0 events/s" in frame(interval(seconds=0.0, count=0), rows=4, color=False)[0]


def test_record_has_what_fired_in_the_interval() -> None:
    quiet = ProbeRow(ProbeId("app", "quiet", "/usr/bin/app"), 0, 7, 0)
    made = interval(1)
    found = record(dataclasses.replace(made, probes=(*made.probes, quiet), lost={"queue": 3}))
    assert found == {
        "time_ns": SECOND_NS,
        "seconds": 2.0,
        "count": 2469,
        "rate": 1234.5,
        "total": 1_234_567,
        "sites": 531,
        "refused": 0,
        "lost": {"queue": 3},
        "probes": [
            {
                "provider": "app", "name": "p0", "path": "/usr/bin/app",
                "count": 1000, "rate": 500.0, "total": 100_000, "processes": 3,
            }
        ],
        "processes": [{"pid": 1000, "comm": "app", "count": 50, "rate": 25.0, "total": 1000}],
    }  # fmt: skip


class TestTerminal:
    @pytest.fixture(autouse=True)
    def _size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("LINES", "24")

    def test_frame_is_written_over_the_last_one_and_never_scrolls(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = TerminalOutput()
        output.begin(Hints())
        assert capsys.readouterr().out.startswith("\x1b[?7l\x1b[?25l")
        for _ in range(2):
            output.show(interval(100, 100))
        shown = capsys.readouterr().out
        assert shown.count("\x1b[H") == 2
        assert [each.count("\n") for each in shown.split("\x1b[H")[1:]] == [23, 23]
        assert "\x1b[2J" not in shown
        assert shown.count("app:p") == 2 * 9
        assert shown.count("PROBE (9 of 100)") == shown.count("COMMAND (8 of 100)") == 2
        assert sum(line.startswith("       25.0") for line in shown.split("\n")) == 2 * 8
        output.close()
        assert capsys.readouterr().out == "\x1b[?7h\x1b[?25h"

    def test_small_terminal_does_not_scroll_either(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LINES", "5")
        TerminalOutput().show(interval(9, 9))
        assert capsys.readouterr().out.count("\n") == 4

    def test_news_are_told_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = TerminalOutput()
        output.interrupted("the stream broke")
        output.show(interval())
        output.show(interval())
        assert capsys.readouterr().out.count("the stream broke") == 1

    def test_pipe_gets_plain_tables_with_a_line_between(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = PipeOutput()
        output.show(interval(150, 1))
        output.show(interval(1, 1))
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert shown.count("app:p") == 151
        assert shown.count("\n\nstapsdt top  ") == 1


@pytest.mark.parametrize(
    ("given", "asked"), [("a:b", "a:b()"), ("a:b(arg0)", "a:b(arg0)"), ("a::f:b", "a::f:b()"), ("a:b(", "a:b(")]
)
def test_no_values_are_fetched_unless_a_selector_names_some(given: str, asked: str) -> None:
    assert without_values(given) == asked
