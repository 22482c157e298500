"""Columns of events as record batches and data frames."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from stapsdtd.client import CapturedArgument, DescribedSite, Probe, Site
from stapsdtd.client.column_batch import ColumnBatch, NumberColumn, StringColumn

CAPTURES = (
    CapturedArgument(0, False, ""),
    CapturedArgument(1, True, "it could not be read"),
    CapturedArgument(2, False, "", is_buffer=True),
    CapturedArgument(0, False, "", of_start=True),
    CapturedArgument(0, False, "", field="uid"),
    CapturedArgument(0, False, ""),
)


def described(site_id: int, name: str) -> DescribedSite:
    site = Site(site_id, 0x1000, None, "main", ())
    return DescribedSite(Probe("app", name, "/usr/bin/app", None, "x86-64", (), (site,)), site, CAPTURES)


def numbers(*values: int, missing: list[bool] | None = None) -> NumberColumn:
    return NumberColumn(np.array(values, np.int64), None if missing is None else np.array(missing))


def texts(*values: bytes, missing: list[bool] | None = None, is_raw: bool = False) -> StringColumn:
    ends = np.cumsum([len(value) for value in values]).astype(np.uint32)
    return StringColumn(b"".join(values), ends, None if missing is None else np.array(missing), None, is_raw)


BATCH = ColumnBatch(
    count=2,
    seq=np.array([1, 2], np.uint64),
    time_ns=np.array([1_700_000_000_000_000_001, 1_700_000_000_000_000_002]),
    pid=np.array([10, 20], np.int32),
    tid=np.array([11, 21], np.int32),
    cpu=np.array([0, 1], np.uint16),
    comm=np.array([b"app", b"\xff"], "S16"),
    site_id=np.array([1, 2], np.uint32),
    values=(
        numbers(-1, 2, missing=[False, True]),
        texts(b"na\xc3\xafve \xff", b"", missing=[False, True]),
        texts(b"\0\1", b"\2", is_raw=True),
        numbers(3, 4),
        numbers(0, 1000),
        numbers(5, 6),
    ),
    sites={1: described(1, "a"), 2: described(2, "b")},
)


def test_values_have_names_each_its_own() -> None:
    assert BATCH.names == ("arg0", "arg1", "arg2", "start.arg0", "uid", "arg0_2")


def test_texts_are_text_and_what_is_missing_is_null() -> None:
    found = BATCH.to_arrow()
    assert found.schema.field("time").type == pa.timestamp("ns", tz="UTC")
    assert found.drop_columns(["time"]).to_pylist() == [
        {
            "seq": 1, "pid": 10, "tid": 11, "cpu": 0, "comm": "app", "provider": "app", "name": "a",
            "path": "/usr/bin/app", "arg0": -1, "arg1": "naïve \\xff", "arg2": b"\0\1", "start.arg0": 3, "uid": 0,
            "arg0_2": 5,
        },
        {
            "seq": 2, "pid": 20, "tid": 21, "cpu": 1, "comm": "\\xff", "provider": "app", "name": "b",
            "path": "/usr/bin/app", "arg0": None, "arg1": None, "arg2": b"\2", "start.arg0": 4, "uid": 1000,
            "arg0_2": 6,
        },
    ]  # fmt: skip


def test_data_frame_has_the_same() -> None:
    frame = BATCH.to_pandas()
    assert list(frame.columns)[:3] == ["seq", "time", "pid"]
    assert frame["time"].astype("int64").tolist() == BATCH.time_ns.tolist()
    assert frame.groupby("name", observed=True)["uid"].sum().to_dict() == {"a": 0, "b": 1000}
