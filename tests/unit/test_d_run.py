"""What the server adds up for D programs becomes what they would have come to themselves."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.d_hits import Hits
from stapsdtd.cli.d_run import Output, Runner
from stapsdtd.client import Account, AsyncSubscription, Bucket, Event, EventBatch, Snapshot, SnapshotRow
from stapsdtd.client.messages import EventBlock
from stapsdtd.query.d.aggregations import Aggregation
from stapsdtd.query.d.check import check
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.interpret import Program
from stapsdtd.query.d.lower import Lowered, planned
from stapsdtd.query.d.machine import Hit
from stapsdtd.query.d.needs import Needs
from stapsdtd.query.d.nodes import Clause
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.print_aggregations import Sorting
from stapsdtd.query.d.probes import Tick
from stapsdtd.query.d.records import Records
from stapsdtd.query.d.values import INT64

ACCOUNT = Account(0, 0, 0, 0, 0, 0, 0, 0)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1) | st.sampled_from([-(1 << 31), (1 << 31) - 1])


class Known:
    """Every argument fits."""

    def fits(self, clause: Clause, index: int, bits: int) -> bool:
        del clause, index, bits
        return True

    def are_apart(self, clause: Clause, other: Clause) -> bool:
        return clause is not other


class Stream:
    """A subscription that has these snapshots."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    async def messages(self, *, resubscribe: bool) -> AsyncGenerator[Snapshot, None]:
        assert not resubscribe
        for snapshot in self._snapshots:
            yield snapshot


def merged(statement: str, rows: Sequence[SnapshotRow]) -> Aggregation:
    """What @ comes to of one row for each aggregation of the server's."""
    program = check(parse(f"a:::b {{ {statement}; }}"), lambda *_: INT64)
    (parts,) = planned(program, Known()).lowered.values()
    by_tag: dict[str, Lowered] = {str(number): each for number, each in enumerate(parts)}
    running = Program(program, Records(lambda _: None, is_quiet=True), Sorting(), lambda *_: None)
    snapshots = [Snapshot(1, 0, 0, (row,), ACCOUNT, tag) for tag, row in zip(by_tag, rows, strict=True)]
    subscription = cast("AsyncSubscription", Stream(snapshots))
    runner, hits = Runner(running, Output(), by_tag, retries=False), Hits([], {}, Needs(), {})
    asyncio.run(runner.read(subscription, hits))
    runner.finish(hits.own("dtrace", "END"))
    return running.aggregations[""]


@given(st.lists(INT32, min_size=1, max_size=20))
def test_a_standard_deviation_is_exact(values: list[int]) -> None:
    squares = [value * value for value in values]
    sums = [sum(values), sum(square >> 32 for square in squares), sum(square & 0xFFFFFFFF for square in squares)]
    rows = [SnapshotRow((), {"values": len(values), "sum": total}) for total in sums]
    found = merged("@ = stddev(arg0)", rows)
    expected = Aggregation("", found.function)
    for value in values:
        expected.add((), value)
    row, other = found.rows[()], expected.rows[()]
    assert (row.count, row.sum, row.squares) == (other.count, other.sum, other.squares)
    assert found.number(row) == expected.number(other)


@given(st.lists(st.integers(-200, 200), min_size=1, max_size=20))
def test_buckets_become_bins(values: list[int]) -> None:
    statement = "@ = lquantize(arg0, 0, 80, 30)"
    # as the server tells them: those that have values
    bounds = [(None, -1), (0, 29), (30, 59), (60, None)]
    counts = Counter(bisect_right([0, 30, 60], value) for value in values)
    buckets = tuple(Bucket(*bounds[number], count) for number, count in sorted(counts.items()))
    found = merged(statement, [SnapshotRow((), {"values": len(values)}, buckets)])
    expected = Aggregation("", found.function, scale=found.scale)
    for value in values:
        expected.add((), value)
    assert found.rows[()].bins == expected.rows[()].bins


def test_a_sum_of_more_than_64_bits_is_told_to_be_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    merged("@ = sum(arg0)", [SnapshotRow((), {"values": 3, "sum": 3.0 * 2**63})])
    assert "1 sum of @ rounded, since it takes more than 64 bits" in capsys.readouterr().err


class Fired:
    """A subscription whose events have these times, and that is asked to go on behind each of them."""

    def __init__(self, times: Sequence[int], behind: Callable[[int], None]) -> None:
        self._times = times
        self._behind = behind

    async def messages(self, *, resubscribe: bool) -> AsyncGenerator[EventBatch, None]:
        assert not resubscribe
        for time_ns in self._times:
            batch = EventBatch(cast("tuple[EventBlock, ...]", (SimpleNamespace(seq=[time_ns]),)))
            vars(batch)["events"] = (SimpleNamespace(monotonic_ns=time_ns),)
            yield batch
            self._behind(time_ns)


class AllHits(Hits):
    """Of which each is a hit of all clauses of a::: there are."""

    def __init__(self, program: Checked) -> None:
        super().__init__(program.program.clauses[:1], {}, Needs(), {})

    def matching(self, event: Event) -> tuple[Clause, ...]:
        del event
        return tuple(self._clauses)

    def timestamp(self, event: Event) -> int:
        assert event.monotonic_ns is not None
        return event.monotonic_ns

    def hit(self, event: Event) -> Hit:
        return replace(self.own("a", "b"), timestamp=self.timestamp(event))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        # those that fired before it exits, though they come behind it
        ("a:::b { @ = count(); } tick-1s { exit(3); }", 4),
        ("a:::b { @ = count(); } a:::b /0/ { } tick-1s { @x = count(); }", 6),
        ("a:::b { @ = count(); exit(3); } tick-1s { @x = count(); }", 1),
    ],
    ids=["a timer exits", "nothing exits", "a hit exits"],
)
def test_hits_until_the_exit_are_looked_at(text: str, seen: int) -> None:
    program = check(parse(text), lambda *_: INT64)
    running = Program(program, Records(lambda _: None, is_quiet=True), Sorting(), lambda *_: None)
    runner, hits = Runner(running, Output(), {}, retries=False), AllHits(program)

    def tick_at_4(time_ns: int) -> None:
        if time_ns == 2:
            runner.own(Tick("tick-1s", 10**9), replace(hits.own("profile", "tick-1s"), timestamp=4))

    stream = cast("AsyncSubscription", Fired([1, 2, 3, 4, 5, 6], tick_at_4))
    asyncio.run(runner.read(stream, hits))
    assert running.aggregations[""].rows[()].count == seen
    assert running.exit_status == (3 if "exit" in text else None)


def test_hits_are_counted_that_there_was_no_time_for(capsys: pytest.CaptureFixture[str]) -> None:
    program = check(parse("a:::b { @ = count(); }"), lambda *_: INT64)
    running = Program(program, Records(lambda _: None, is_quiet=True), Sorting(), lambda *_: None)
    runner, hits = Runner(running, Output(), {}, retries=False), AllHits(program)

    def interrupt_at_2(time_ns: int) -> None:
        runner.hurry(0 if time_ns == 2 else 100)

    asyncio.run(runner.read(cast("AsyncSubscription", Fired([1, 2, 3, 4, 5], interrupt_at_2)), hits))
    runner.finish(hits.own("dtrace", "END"))
    assert running.aggregations[""].rows[()].count == 2
    assert "3 hits not shown: interrupted before the program had looked at them" in capsys.readouterr().err


@pytest.mark.parametrize("uptime_ns", [0, -(10**15)], ids=["this host", "another host"])
def test_timestamps_are_of_this_host_and_no_step_of_the_clock_changes_them(uptime_ns: int) -> None:
    """uptime_ns: by how much longer the server's host has been up."""
    hits, second, hour = Hits([], {}, Needs(), {}), 10**9, 3600 * 10**9

    def timestamp(after_ns: int, step_ns: int) -> int:
        times = SimpleNamespace(time_ns=wall + after_ns + step_ns, monotonic_ns=monotonic + uptime_ns + after_ns)
        return hits.timestamp(cast("Event", times))

    wall, monotonic = time.time_ns(), time.monotonic_ns()
    first = timestamp(0, 0)
    assert abs(first - monotonic) < second
    assert timestamp(second, hour) == first + second
    assert timestamp(2 * second, -hour) == first + 2 * second


def test_timestamps_of_an_older_server_follow_its_clock() -> None:
    event = SimpleNamespace(time_ns=time.time_ns(), monotonic_ns=None)
    assert abs(Hits([], {}, Needs(), {}).timestamp(cast("Event", event)) - time.monotonic_ns()) < 10**9
