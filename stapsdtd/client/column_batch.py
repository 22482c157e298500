"""Events as columns, one numpy array for each field."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    from stapsdtd.client.messages import DescribedSite


@dataclass(frozen=True, slots=True, eq=False)
class NumberColumn:
    """One number per event. unavailable: true for events without a value; None if all have one."""

    values: NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.float64]
    unavailable: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class StringColumn:
    """One byte string per event, or a value's bytes: `column[i]` is the data between two ends. truncated: true for
    strings of which there was more; None if that is so of none. is_raw: they are bytes as they were in memory.
    """

    data: bytes
    ends: NDArray[np.uint32]
    unavailable: NDArray[np.bool_] | None
    truncated: NDArray[np.bool_] | None = None
    is_raw: bool = False

    def __getitem__(self, row: int) -> bytes:
        if not 0 <= row < len(self.ends):
            raise IndexError(row)
        return self.data[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))


Column = NumberColumn | StringColumn


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBatch:
    """count events of one clause as one read-only array per field; the arrays are views of the message's bytes.

    comm has dtype `S16`. `sites[site_id]` describes the site and the values. realtime_offset_ns: by how much time_ns is
    ahead of CLOCK_MONOTONIC; None from an older server.
    """

    count: int
    seq: NDArray[np.uint64]
    time_ns: NDArray[np.int64]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    cpu: NDArray[np.uint16]
    comm: NDArray[np.bytes_]
    site_id: NDArray[np.uint32]
    values: tuple[Column, ...]
    sites: Mapping[int, DescribedSite]
    realtime_offset_ns: int | None = None

    @property
    def monotonic_ns(self) -> NDArray[np.int64] | None:
        """Return when the events fired, by CLOCK_MONOTONIC of the server's host; None from an older server."""
        return None if self.realtime_offset_ns is None else self.time_ns - self.realtime_offset_ns

    @property
    def names(self) -> tuple[str, ...]:
        """Return the values' names: `arg0`, of a span's start `start.arg0`, or a field's; of equal ones `arg0_2`."""
        captures = self.sites[int(self.site_id[0])].captures if self.count else ()
        names: dict[str, None] = {}
        for capture in captures:
            name = capture.field or f"{'start.' if capture.of_start else ''}arg{capture.index}"
            names[next(each for each in chain([name], (f"{name}_{n}" for n in count(2))) if each not in names)] = None
        return tuple(names)

    def to_arrow(self) -> pa.RecordBatch:
        """Return a pyarrow.RecordBatch of seq, time, pid, tid, cpu, comm, provider, name, path, and values by `names`.

        Texts are text, with bytes that are not UTF-8 escaped; what is unavailable is null. Needs pyarrow.
        """
        from stapsdtd.client.arrow import record_batch  # noqa: PLC0415 (pyarrow is optional)

        return record_batch(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return the same as a pandas.DataFrame. Needs pyarrow and pandas."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    @property
    def tag(self) -> str:
        """Return the clause that these are events of."""
        return self.sites[int(self.site_id[0])].tag if self.count else ""
