"""Columns of events as Arrow's record batches, which pandas, Polars and others read. Imported only if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stapsdtd.client.column_batch import StringColumn
from stapsdtd.client.events import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stapsdtd.client.column_batch import Column, ColumnBatch

_Array = Any
"""A pyarrow.Array: pyarrow declares no types."""


def record_batch(batch: ColumnBatch) -> pa.RecordBatch:
    """See `ColumnBatch.to_arrow`."""
    probes = {site_id: batch.sites[site_id].probe for site_id in np.unique(batch.site_id).tolist()}
    arrays: dict[str, _Array] = {
        "seq": pa.array(batch.seq),
        "time": pa.array(batch.time_ns).cast(pa.timestamp("ns", tz="UTC")),
        "pid": pa.array(batch.pid),
        "tid": pa.array(batch.tid),
        "cpu": pa.array(batch.cpu),
        "comm": _coded(batch.comm, {comm: text_of(comm) for comm in set(batch.comm.tolist())}),
        "provider": _coded(batch.site_id, {site_id: probe.provider for site_id, probe in probes.items()}),
        "name": _coded(batch.site_id, {site_id: probe.name for site_id, probe in probes.items()}),
        "path": _coded(batch.site_id, {site_id: probe.path for site_id, probe in probes.items()}),
    }
    for name, column in zip(batch.names, batch.values, strict=True):
        arrays[name] = _array(column)
    return pa.RecordBatch.from_pydict(arrays)


def _coded(values: NDArray[Any], texts: dict[Any, str]) -> _Array:
    """Return a dictionary array of a few texts, which several values may have."""
    distinct, codes = np.unique(values, return_inverse=True)
    places: dict[str, int] = {}
    place_of = np.array([places.setdefault(texts[each], len(places)) for each in distinct.tolist()], np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(place_of[codes]), pa.array(list(places), pa.string()))


def _array(column: Column) -> _Array:
    if not isinstance(column, StringColumn):
        return pa.array(column.values, mask=column.unavailable)
    missing = [False] * len(column) if column.unavailable is None else column.unavailable.tolist()
    if column.is_raw:
        return pa.array(_known(list(column), missing), pa.binary())
    return pa.array(_known([text_of(text) for text in column], missing), pa.string())


def _known(values: Sequence[object], missing: Sequence[bool]) -> list[object]:
    return [None if is_missing else value for value, is_missing in zip(values, missing, strict=True)]
