"""Events as columns, one numpy array for each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
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
    strings of which there was more; None if that is so of none.
    """

    data: bytes
    ends: NDArray[np.uint32]
    unavailable: NDArray[np.bool_] | None
    truncated: NDArray[np.bool_] | None = None

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

    comm has dtype `S16`. `sites[site_id]` describes the site and the values.
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

    @property
    def tag(self) -> str:
        """Return the clause that these are events of."""
        return self.sites[int(self.site_id[0])].tag if self.count else ""
