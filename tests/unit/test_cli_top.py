"""`stapsdt top`: what is added up from snapshots, and how that looks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from stapsdtd.cli.top import without_values
from stapsdtd.cli.top_output import PipeOutput, TerminalOutput, frame, record
from stapsdtd.cli.top_rates import Interval, ProbeId, ProbeRow, ProcessRow, Rates
from stapsdtd.cli.trace_output import Notice
from stapsdtd.cli.unmatched import Hints
from stapsdtd.client import Account, Snapshot, SnapshotRow

QUIET = {"kernel_buffer": 0, "queue": 0}
SECOND_NS = 1_000_000_000
NOTHING = Account(0, 0, 0, 0, 0, 0, 0, 0, 0)


def take(
    rates: Rates,
    rows: Mapping[tuple[ProbeId, int, str], int] = MappingProxyType({}),
    lost: dict[str, int] | None = None,
) -> Interval:
    """Take the interval of a snapshot. rows: counts by probe, pid and name."""
    counted = tuple(SnapshotRow((*probe, pid, comm), {"count": count}) for (probe, pid, comm), count in rows.items())
    snapshot = Snapshot(1, -SECOND_NS, SECOND_NS, counted, NOTHING)
    return rates.take(snapshot, sites=3, refused=1, lost=QUIET if lost is None else lost)


A, A_ELSEWHERE, B = (
    ProbeId("app", "a", "/usr/bin/app"),
    ProbeId("app", "a", "/opt/app"),
    ProbeId("app", "b", "/usr/bin/app"),
)


class TestRates:
    def test_hits_are_counted_by_probe_and_by_process(self) -> None:
        rows = {(A, 10, "app"): 3, (A, 20, "app"): 1, (B, 20, "app"): 1, (A_ELSEWHERE, 10, "app"): 1}
        assert take(Rates(), rows | {(A, 4_194_304, "app"): 1}) == Interval(
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
        take(rates, {(A, 10, "app"): 2, (B, 20, "app"): 1})
        interval = take(rates, {(B, 20, "app"): 1}, {"queue": 5})
        assert (interval.count, interval.total) == (1, 4)
        assert interval.probes == (ProbeRow(B, 1, 2, 1), ProbeRow(A, 0, 2, 0))
        assert interval.processes == (ProcessRow(20, "app", 1, 2), ProcessRow(10, "app", 0, 2))
        assert (interval.lost, interval.lost_before) == ({"queue": 5}, QUIET)
        assert take(rates).lost_before == {"queue": 5}

    def test_process_goes_by_the_name_that_most_of_its_hits_had(self) -> None:
        rates = Rates()
        rows = {(A, 10, "worker"): 1, (A, 10, "main"): 1, (B, 10, "main"): 1}
        assert [(row.comm, row.count) for row in take(rates, rows).processes] == [("main", 3)]
        assert take(rates, {(A, 10, "renamed"): 1}).processes[0].comm == "renamed"
        assert take(rates).processes[0].comm == "renamed"

    def test_what_is_quiet_is_forgotten_where_there_is_too_much(self) -> None:
        rates = Rates(max_kept=2)
        rows = {(A, pid, "app"): 1 for pid in range(10)}
        take(rates, rows | {(B, 1, "app"): 1, (A_ELSEWHERE, 2, "app"): 1})
        interval = take(rates, {(A, 5, "app"): 1})
        assert (interval.count, interval.total) == (1, 13)
        interval = take(rates)
        assert [(row.pid, row.total) for row in interval.processes] == [(5, 2)]
        assert [row.probe for row in interval.probes] == [A]

    def test_rates_are_of_the_servers_time(self) -> None:
        """Whenever a snapshot is read: after a pause of the terminal, several may come at once."""
        rates = Rates()
        for seconds in (1, 5):
            row = SnapshotRow((*A, 10, "app"), {"count": 100})
            interval = rates.take(Snapshot(1, 0, seconds * SECOND_NS, (row,), NOTHING), 1, 0, QUIET)
            assert interval.rate(interval.count) == 100 / seconds


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
        output.notice(Notice("the stream broke", {}))
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
    ("given", "asked"), [("a:b", "a:b"), ("a:b(arg0)", "a:b"), ("a::f:b()", "a::f:b"), ("a:b(", "a:b(")]
)
def test_no_values_are_fetched(given: str, asked: str) -> None:
    assert without_values(given) == asked
