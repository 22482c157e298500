"""Rows of a snapshot whose keys are the same once SQL has lost its literals, added up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.cli.sql_text import normalized
from stapsdtd.client import CutText, SnapshotRow
from stapsdtd.client.joining import joined_row, without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.client import Snapshot, Value


def without_literals(snapshot: Snapshot, dialect: str, functions: Sequence[str]) -> Snapshot:
    """Return a snapshot of these functions whose keys' strings are SQL without literals; its own are `to_join` of them.

    Statements that were cut are not joined with those that were not.
    """
    by_key: dict[tuple[tuple[type, Value], ...], list[SnapshotRow]] = {}
    for row in snapshot.rows:
        key = tuple(_without_literals(part, dialect) for part in row.key)
        by_key.setdefault(tuple((type(part), part) for part in key), []).append(row)
    rows = (joined_row(tuple(part for _, part in key), rows) for key, rows in by_key.items())
    return replace(snapshot, rows=without(rows, functions))


def _without_literals(part: Value, dialect: str) -> Value:
    if not isinstance(part, str):
        return part
    text = normalized(part, dialect)
    return CutText(text) if isinstance(part, CutText) else text
