"""What printa() and the end of a program print of aggregations, in DTrace's layout.

      postgres                                                         12             4711
      psql                                                              5              512

A string of the key is on the left of 50 columns, an integer in as many as its type needs, and a result in 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stapsdtd.query.d.aggregations import Aggregation, Key, Rank, Row, key_rank
from stapsdtd.query.d.distribution import picture
from stapsdtd.query.d.printing import Printer
from stapsdtd.query.d.records import raw_bytes
from stapsdtd.query.d.values import Integer, Type, Value, shown, signed, unsigned


@dataclass(frozen=True, slots=True)
class Sorting:
    """The options aggsortkey, aggsortrev, aggsortpos and aggsortkeypos.

    By results, then keys, or the other way round. position: of the aggregation to compare first, where printa() has
    several. key_position: of the part of the key to compare first. A position that does not exist is 0.
    """

    by_key: bool = False
    is_reverse: bool = False
    position: int = 0
    key_position: int = 0


class _Line(NamedTuple):
    """What aggregations have for one key; None where one has nothing."""

    key: Key
    rows: tuple[Row | None, ...]


def printed(aggregations: Sequence[Aggregation], sorting: Sorting, printer: Printer | None = None) -> str:
    """Return what printa() prints, without a printer in columns."""
    start = "" if printer else "\n"
    return start + "".join(_texts(aggregations, sorting, printer))


def remaining(aggregations: Iterable[Aggregation], sorting: Sorting) -> str:
    """Return what is printed when a program ends, of those that printa() has not printed. In the order in which the
    program names them.
    """
    left = [each for each in aggregations if not each.is_printed]
    ordered = reversed(left) if sorting.is_reverse else left
    return "".join(text for each in ordered for text in _texts([each], sorting, None))


def _texts(aggregations: Sequence[Aggregation], sorting: Sorting, printer: Printer | None) -> Iterator[str]:
    for line in _lines(aggregations, sorting):
        results = [_result(each, row) for each, row in zip(aggregations, line.rows, strict=True)]
        for each in aggregations:
            each.is_printed = True
        if printer is not None:
            yield printer.text(line.key, results)
        else:
            yield "".join(_column(kind, value) for kind, value in zip(aggregations[0].key, line.key, strict=True))
            yield "".join(f" {result:>16}" if isinstance(result, int) else result for result in results)
            yield "\n"


def _lines(aggregations: Sequence[Aggregation], sorting: Sorting) -> list[_Line]:
    keys = dict.fromkeys(key for each in aggregations for key in each.rows)
    lines = [_Line(key, tuple(each.rows.get(key) for each in aggregations)) for key in keys]
    first = sorting.position if 0 <= sorting.position < len(aggregations) else 0

    def order(line: _Line) -> tuple[object, ...]:
        ranks: list[Rank] = [each.rank(row) for each, row in zip(aggregations, line.rows, strict=True)]
        by_result = (*ranks[first:], *ranks[:first])
        by_key = key_rank(line.key, sorting.key_position)
        return (by_key, by_result) if sorting.by_key else (by_result, by_key)

    return sorted(lines, key=order, reverse=sorting.is_reverse)


def _result(aggregation: Aggregation, row: Row | None) -> int | str:
    if aggregation.scale is None:
        return aggregation.number(row)
    return picture(aggregation.scale, {} if row is None else row.bins, aggregation.normal)


def _column(kind: Type, value: Value) -> str:
    """Return a part of a key."""
    if isinstance(value, str):
        return f"  {shown(value):<50}"
    if isinstance(value, bytes):
        return raw_bytes(value)
    match kind:
        case Integer(8):
            return f" {unsigned(value, 8):3}"
        case Integer(16):
            return f" {unsigned(value, 16):5}"
        case Integer(32):
            return f" {signed(value, 32):8}"
        case _:
            return f" {signed(value):16}"
