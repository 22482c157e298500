"""Snapshots as tables and histograms."""

from __future__ import annotations

from stapsdtd.cli.aggregate_tables import Histograms, Rows, powers_of_two
from stapsdtd.cli.snapshot_output import Shown
from stapsdtd.client import Account, Bucket, Snapshot, SnapshotRow

ACCOUNT = Account(0, 0, 0, 0, 0, 0, 0, 1)


def shown(*by: str, limit: int | None = None, order: str = "count") -> Shown:
    return Shown(by, None, None, limit, None, as_json=False, command_line=(), order=order)


def snapshot(*rows: SnapshotRow) -> Snapshot:
    return Snapshot(1, 0, 1, rows, ACCOUNT)


def test_the_most_frequent_key_comes_first() -> None:
    rows = [SnapshotRow((name, 7), {"count": count}) for name, count in (("a", 5), ("b", 5000), ("c", 5))]
    assert Rows(shown("arg0:str", "pid")).lines(snapshot(*rows)) == [
        "COUNT  arg0:str  pid",
        "5,000  b         7",
        "    5  a         7",
        "    5  c         7",
    ]
    assert Rows(shown("arg0:str", "pid", limit=1)).lines(snapshot(*rows))[1:] == [
        "5,000  b         7",
        "and 2 more keys",
    ]


def test_what_takes_longest_in_all_comes_first() -> None:
    often = SnapshotRow(("often",), {"count": 9, "sum": 90, "max": 10}, (Bucket(10, 10, 9),))
    slow = SnapshotRow(("slow",), {"count": 1, "sum": 5_000, "max": 5_000}, (Bucket(5_000, 5_000, 1),))
    lines = Histograms(shown("arg0:str", limit=1, order="sum"), "ns").lines(snapshot(often, slow))
    assert lines[0] == "arg0:str=slow  1 value  p50 5 us  p90 5 us  p99 5 us  max 5 us  total 5 us"
    assert lines[-1] == "and 1 more key"


def test_values_have_the_unit_and_counts_have_none() -> None:
    row = SnapshotRow((), {"count": 2, "avg": 1500.0, "min": None})
    assert Rows(shown(), "us").lines(snapshot(row)) == ["COUNT      AVG  MIN", "    2  1.50 ms    -"]


def test_keys_cannot_command_the_terminal() -> None:
    row = SnapshotRow(("\x1b[2J", None, b"\x00x", True), {"count": 1})
    assert Rows(shown("a", "b", "c", "d")).lines(snapshot(row))[1] == "    1  \\x1b[2J  <unread>  \\x00x  true"


def test_nothing() -> None:
    assert Rows(shown()).lines(snapshot()) == ["no hits"]
    assert Histograms(shown()).lines(snapshot()) == ["no hits"]


def test_histogram_of_powers_of_two() -> None:
    fine = (Bucket(1, 1, 1), Bucket(64, 65, 2), Bucket(66, 67, 2), Bucket(1024, 1055, 1))
    row = SnapshotRow(("x",), {"count": 6, "max": 1030}, fine)
    lines = Histograms(shown("arg1:str")).lines(snapshot(row))
    assert lines[0] == "arg1:str=x  6 values  p50 65  p90 1,030  p99 1,030  max 1,030"
    assert lines[1].endswith(f"[1]  1  {'█' * 10}")
    assert lines[-5:] == [
        "   [64, 128)  4  " + "█" * 40,
        "  [128, 256)  0",
        "  [256, 512)  0",
        "   [512, 1K)  0",
        "    [1K, 2K)  1  " + "█" * 10,
    ]
    assert len(lines) == 1 + 11


def test_histogram_of_fractions_says_that_they_are_rounded() -> None:
    row = SnapshotRow((), {"count": 2, "max": 3.75}, (Bucket(0, 0, 1), Bucket(3, 3, 1)))
    assert Histograms(shown()).lines(snapshot(row))[0] == (
        "2 values  p50 0  p90 3  p99 3  max 3.75"
        "  (percentiles and buckets: rounded down to whole numbers; to keep fractions, multiply VALUE)"
    )


def test_linear_histogram_has_open_ends() -> None:
    buckets = (Bucket(None, -1, 1), Bucket(0, 9, 2), Bucket(10, None, 4))
    row = SnapshotRow((), {"count": 7, "max": 99}, buckets)
    assert Histograms(shown(), is_linear=True).lines(snapshot(row)) == [
        "7 values  p50 10  p90 10  p99 10  max 99",
        "     below 0  1  " + "█" * 10,
        "     [0, 10)  2  " + "█" * 20,
        "  10 or more  4  " + "█" * 40,
    ]


def test_several_histograms_are_apart() -> None:
    rows = [SnapshotRow((pid,), {"count": 1, "max": 1}, (Bucket(1, 1, 1),)) for pid in (1, 2)]
    lines = Histograms(shown("pid")).lines(snapshot(*rows))
    assert [line for line in lines if not line or line.startswith("pid")] == [
        "pid=1  1 value  p50 1  p90 1  p99 1  max 1", "", "pid=2  1 value  p50 1  p90 1  p99 1  max 1",
    ]  # fmt: skip


def test_negative_powers_of_two() -> None:
    joined = powers_of_two([Bucket(-3, -3, 1), Bucket(0, 0, 1), Bucket(1, 1, 1)])
    assert joined == [Bucket(-3, -2, 1), Bucket(-1, -1, 0), Bucket(0, 0, 1), Bucket(1, 1, 1)]
