"""bpf/aggregate.h told again in Python: what a recipe makes of a hit, and the tables of rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.layout import BucketKind, OperandKind, Take
from stapsdtd.kernel.bpf_rows import Octets, RowMap

_ALL_BITS = (1 << 64) - 1
_SIGN = 1 << 63

Taken = Callable[[Any], tuple[int, bool, bytes]]
"""Fetches an operand: a number, whether it could be read, and the text."""


class MemoryRows(RowMap):
    """by_key: counts, totals, carries, and what the greatest of ~value and of value are."""

    def __init__(self, key_bytes: int, max_entries: int) -> None:
        self._key_bytes = key_bytes
        self.max_entries = max_entries
        self.by_key: dict[bytes, list[int]] = {}
        self.is_closed = False
        self.refuse_taking: OSError | None = None

    def take_all(self) -> tuple[Octets, Octets, bool]:
        if self.refuse_taking is not None:
            raise self.refuse_taking
        keys = np.frombuffer(b"".join(self.by_key), np.uint8).reshape(-1, self._key_bytes)
        rows = np.array([tuple(row) for row in self.by_key.values()], layout.ROW)
        self.by_key = {}
        return keys, rows.view(np.uint8).reshape(-1, layout.ROW.itemsize), True

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FakeRowTables:
    """Banks by key class and number. filled: rows of each bank."""

    def __init__(self) -> None:
        self.banks: dict[tuple[int, int], MemoryRows] = {}
        self.filled = [0] * (2 * layout.MAX_TABLES)
        self.parity = 0

    def add(self, recipe: Any, key: bytes, value: int | None, parity: int) -> bool:
        """Add a hit to a row; answer whether there was room."""
        bank = 2 * int(recipe["table"]) + parity
        rows = self.banks[int(recipe["key_class"]), bank]
        row = rows.by_key.get(key)
        if row is None:
            if len(rows.by_key) == rows.max_entries:
                return False
            row = rows.by_key[key] = [0] * 5
            self.filled[bank] += 1
        row[0] += 1
        if value is not None and recipe["adds"]:
            number = value - (1 << 64) if recipe["is_signed"] and value & _SIGN else value
            total = (row[2] << 64) + row[1] + number
            row[1], row[2] = total & _ALL_BITS, total >> 64
        if value is not None and recipe["compares"]:
            ordered = value ^ _SIGN if recipe["is_signed"] else value
            row[3], row[4] = max(row[3], ordered ^ _ALL_BITS), max(row[4], ordered)
        return True


def made_key(
    recipe: Any, operands: list[Any], taken: Taken, edges: list[int], head: dict[int, int]
) -> tuple[bytes, int | None] | None:
    """The key of a hit, and its value if there is one; None if the hit is handed over, since it lacks something that is
    not in memory. operands: the recipe's. head: the hit's own fields, by kind.
    """
    words, missing, is_unread = b"", 0, False
    for number, operand in enumerate(operands[: int(recipe["parts"])]):
        if operand["kind"] in head:
            words += struct.pack("=Q", head[int(operand["kind"])])
        elif operand["take"] == Take.COMM:
            words += b"app".ljust(layout.RECORD["comm"].itemsize, b"\0")
        else:
            found, is_there, text = taken(operand)
            missing |= (not is_there) << number
            # nothing is there at 0
            is_unread |= not is_there and found != 0
            if operand["take"] in {Take.STRING, Take.BYTES}:
                words += text.ljust((int(operand["limit"]) + 7) // 8 * 8, b"\0")
            else:
                words += struct.pack("=Q", found if is_there else 0)
    value, bucket = None, 0
    if recipe["has_value"]:
        found, is_there, _ = taken(operands[-1])
        value = found if is_there else None
        if value is None:
            missing |= layout.VALUE_MISSING
            is_unread = True
        else:
            bucket = _bucket(recipe, value, edges)
    if is_unread and recipe["hands_over"]:
        return None
    begin = int(recipe["variant"]) | missing << 32 | (bucket & 0xFFFF) << 48
    size = layout.KEY_BYTES[int(recipe["key_class"])]
    return (struct.pack("=Q", begin) + words).ljust(size, b"\0"), value


HIT_KINDS = OperandKind.PID, OperandKind.TID, OperandKind.CPU


def _bucket(recipe: Any, value: int, edges: list[int]) -> int:
    number = value - (1 << 64) if recipe["is_signed"] and value & _SIGN else value
    if recipe["buckets"] == BucketKind.EDGES:
        first = int(recipe["edges"])
        return sum(edge <= number for edge in edges[first : first + int(recipe["edge_count"])])
    if recipe["buckets"] == BucketKind.LOG_LINEAR:
        sub_bits, magnitude = int(recipe["sub_bits"]), abs(number)
        shift = max(magnitude.bit_length() - 1 - sub_bits, 0)
        linear = (magnitude >> shift) + (shift << sub_bits)
        return -linear if number < 0 else linear
    return 0
