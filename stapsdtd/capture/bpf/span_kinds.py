"""The kinds of tables that keep starts, by what is kept of each."""

from __future__ import annotations

from typing import NamedTuple

from stapsdtd.capture.bpf.layout import PAIR_KEY_WORDS, SMALL_ENTRY, SPAN_ENTRY


class SpanKind(NamedTuple):
    """A kind of tables of starts. table: the map that has them. key_bytes, entry_bytes: of each start.

    start_class: as in `layout.PAIRING`.
    """

    table: str
    key_bytes: int
    entry_bytes: int
    start_class: int = 0


_START_BYTES = 512, 2048, 8192, 32768

SMALL_SPAN = SpanKind("spans_small", 8, SMALL_ENTRY.itemsize)
"""Knows threads and times alone."""

SPAN_OF_WORDS = SpanKind("spans", 8 * PAIR_KEY_WORDS, SPAN_ENTRY.itemsize)

SPANS_OF_RECORDS = tuple(
    SpanKind(f"starts_{number}", 8 * PAIR_KEY_WORDS, size, number) for number, size in enumerate(_START_BYTES, 1)
)
"""Of each class."""
