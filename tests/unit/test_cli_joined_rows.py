"""Rows of statements that differ in literals alone."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from stapsdtd.cli.joined_rows import without_literals
from stapsdtd.client import Account, Bucket, CutText, Snapshot, SnapshotRow
from stapsdtd.client.encode import to_join

ACCOUNT = Account(
    fired=0, delivered=0, filtered=0, lost_kernel_buffer=0, lost_queue=0, lost_decode=0, in_flight=0, sites=0
)
FUNCTIONS = ("count", "avg", "min", "max", "sum")


def snapshot(*rows: SnapshotRow) -> Snapshot:
    return Snapshot(1, 0, 1, rows, ACCOUNT)


def row_of(statement: str, values: list[int], unread: int) -> SnapshotRow:
    """As the server makes one for to_join: hits without a value are in the count alone."""
    known = {"avg": None, "min": None, "max": None, "sum": None} if not values else {
        "avg": sum(values) / len(values), "min": min(values), "max": max(values), "sum": sum(values),
    }  # fmt: skip
    buckets = tuple(Bucket(value, value, values.count(value)) for value in sorted(set(values)))
    return SnapshotRow((statement, 7), {"count": len(values) + unread, **known, "values": len(values)}, buckets)


@given(st.lists(st.tuples(st.lists(st.integers(-9, 9), max_size=5), st.integers(0, 2)), min_size=1, max_size=5))
@example([([0], 0), ([6], 0), ([-1, 1], 3)])
def test_rows_are_those_of_all_values_together(parts: list[tuple[list[int], int]]) -> None:
    rows = [row_of(f"SELECT {number}", values, unread) for number, (values, unread) in enumerate(parts)]
    (joined,) = without_literals(snapshot(*rows), "sql", FUNCTIONS).rows
    whole = row_of("SELECT ?", [value for values, _ in parts for value in values], sum(unread for _, unread in parts))
    assert joined.key == whole.key
    assert joined.buckets == whole.buckets
    average, wanted = joined.values["avg"], whole.values["avg"]
    assert (average is None) is (wanted is None)
    assert average is None or wanted is None or abs(average - wanted) < 1e-9
    assert {**joined.values, "avg": wanted, "values": whole.values["values"]} == whole.values
    assert "values" not in joined.values


def test_an_average_needs_the_number_of_values() -> None:
    assert set(to_join(("count", "avg"))) == {"count", "avg", "sum", "values"}
    assert tuple(to_join(("count", "max"))) == ("count", "max")


def test_other_rows_stay_as_they_are() -> None:
    rows = [SnapshotRow((None, b"\xff"), {"count": 1}), SnapshotRow(("COMMIT", 7), {"count": 2})]
    assert without_literals(snapshot(*rows), "sql", FUNCTIONS).rows == tuple(rows)


def test_statements_that_were_cut_stay_apart() -> None:
    texts = ["SELECT 1", CutText("SELECT 22"), CutText("SELECT 333")]
    joined = without_literals(snapshot(*(SnapshotRow((text,), {"count": 1}) for text in texts)), "sql", FUNCTIONS).rows
    assert [(row.key, isinstance(row.key[0], CutText), row.values["count"]) for row in joined] == [
        (("SELECT ?",), False, 1),
        (("SELECT ?",), True, 2),
    ]


def test_open_ends_come_first() -> None:
    rows = [
        SnapshotRow((text,), {"count": 1}, (Bucket(None, -1, 1), Bucket(0, 9, 1), Bucket(10, None, 1))) for text in "12"
    ]
    (joined,) = without_literals(snapshot(*rows), "sql", FUNCTIONS).rows
    assert [bucket.low for bucket in joined.buckets] == [None, 0, 10]
    assert all(bucket.count == 2 for bucket in joined.buckets)
