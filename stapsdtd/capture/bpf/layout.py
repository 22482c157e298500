"""bpf/stapsdt.h in numpy. `tests/unit/test_bpf_layout.py` holds both against the compiled object's BTF."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

INDEX_ENTRIES = 1 << 19
MAX_SLOTS = 1 << 15
MAX_PLANS = 1 << 15
PLAN_BITS = 16
GROUP_BITS = 24
GROUP_SHIFT = 64 - GROUP_BITS
MAX_MARKS = 1 << 14
MAX_OPERANDS = 1 << 17
MAX_TESTS = 1 << 15
MAX_COUNTERS = 1 << 17

MAX_VALUES = 32
MAX_FILTERS = 64
MAX_STEPS = 1024
MAX_THEN = 4
MAX_TEXT = 4097

MAX_RECIPES = 1 << 14
MAX_EDGES = 1 << 16
MAX_TABLES = 128
MAX_PARTS = 15
KEY_WORDS = 64
KEY_CLASSES = 6
WORKSPACES = 16

MAX_SPANS = 320
THREAD_SPANS = 64
MAX_PAIRING_ROWS = 1 << 13
MAX_PAIRINGS = 4
PAIR_KEY_WORDS = 3
PAIR_WORDS = 5
HIT_SPACES = 16
MAX_WORDS = 128
MAX_CELLS = 256

MAX_FOLLOWING = 64
MAX_FOLLOWED = 1 << 16

MAX_CHAINS = 64
MAX_LINKS = 16
MAX_CHAINED = 1 << 13
LINK_BITS = 4

JUMP_EXCLUDE = 0xFFFD
JUMP_END = 0xFFFC
JUMP_LOST = 0xFFFB


class OperandKind(IntEnum):
    CONSTANT = 0
    REGISTER = 1
    ADDRESS = 2
    MEMORY = 3
    UID_GID = 4
    CGROUP = 5
    PID = 6
    TID = 7
    CPU = 8
    MADE = 9


class Take(IntEnum):
    NUMBER = 0
    STRING = 1
    BYTES = 2
    COMM = 3
    START = 4


class Counter(IntEnum):
    HITS = 0
    FILTERED = 1
    EXCLUDED = 2
    LOST = 3
    UNDECIDED = 4


class SpanCounter(IntEnum):
    STARTS = 0
    PAIRED = 1
    NESTED = 2
    TIMED_OUT = 3
    TABLE_FULL = 4
    UNMATCHED = 5
    LOST = 6


class BucketKind(IntEnum):
    NONE = 0
    LOG_LINEAR = 1
    EDGES = 2


class Membership(IntEnum):
    NAMED = 1
    BORN = 2


COUNTERS_OF_FILTER = 3
COUNTERS_OF_PAIRING = 7
STRAY_HITS = 0

UNREAD_OPERAND = 1 << 63
ADDRESS_MASK = (1 << 56) - 1

OPERAND = np.dtype(
    [
        ("constant", "u8"),
        ("limit", "u4"),
        ("take", "u1"),
        ("kind", "u1"),
        ("base", "u1"),
        ("index", "u1"),
        ("scale", "u1"),
        ("width", "u1"),
        ("left", "u1"),
        ("right", "u1"),
        ("is_signed", "u1"),
        ("is_narrow", "u1"),
        ("is_kernel", "u1"),
        ("then_count", "u1"),
        ("then", "i4", MAX_THEN),
    ]
)

TEST = np.dtype(
    [
        ("mask", "u8"),
        ("value", "u8"),
        ("comm", "u8", 2),
        ("source", "u1"),
        ("index", "u1"),
        ("relation", "u1"),
        ("filter", "u1"),
        ("on_true", "u2"),
        ("on_false", "u2"),
        ("on_missing", "u2"),
        ("next_filter", "u2"),
        ("right", "u1"),
        ("result", "u1"),
        ("uses_words", "u1"),
        ("link", "u1"),
    ]
)

PLAN = np.dtype(
    [
        ("always", "u8"),
        ("emitted", "u8"),
        ("generation", "u8"),
        ("operands", "u4"),
        ("tests", "u4"),
        ("counters", "u4"),
        ("recipes", "u4"),
        ("recipe_count", "u4"),
        ("pairings", "u4"),
        ("pairing_count", "u1"),
        ("values", "u1"),
        ("has_tests", "u1"),
        ("has_texts", "u1"),
        ("is_counted", "u1"),
        ("is_begun", "u1"),
        ("is_paired", "u1"),
        ("uses_words", "u1"),
        ("pair_tests", "u4"),
        ("calculations", "u4"),
        ("is_single", "u1"),
        ("keeps_records", "u1"),
        ("filter_counters", "u1"),
        ("unused", "u1", 5),
    ]
)

RECIPE = np.dtype(
    [
        ("table", "u4"),
        ("variant", "u4"),
        ("operands", "u4"),
        ("edges", "u4"),
        ("edge_count", "u2"),
        ("lost", "u2"),
        ("filter", "u1"),
        ("key_class", "u1"),
        ("parts", "u1"),
        ("has_value", "u1"),
        ("is_signed", "u1"),
        ("adds", "u1"),
        ("compares", "u1"),
        ("buckets", "u1"),
        ("sub_bits", "u1"),
        ("hands_over", "u1"),
        ("is_small", "u1"),
        ("unused", "u1"),
    ]
)

PAIRING = np.dtype(
    [
        ("timeout_ns", "u8"),
        ("span", "u4"),
        ("operands", "u4"),
        ("cells", "u4"),
        ("filter", "u1"),
        ("is_end", "u1"),
        ("is_of_thread", "u1"),
        ("parts", "u1"),
        ("words", "u1"),
        ("is_small", "u1"),
        ("takes_latest", "u1"),
        ("is_of_call", "u1"),
        ("start_class", "u1"),
        ("start_filter", "u1"),
        ("unused", "u1", 2),
    ]
)

UNWANTED_START = 1 << 63
"""With the time of a start."""

VALUE_MISSING = 0x8000

ROW = np.dtype([("count", "u8"), ("total", "u8"), ("carry", "i8"), ("low", "u8"), ("high", "u8")])
"""A row of a table, behind its key."""

SPAN_ENTRY = np.dtype([("words", "u8", PAIR_WORDS), ("missing", "u8"), ("thread", "u8")])
"""What is kept of a start: its time, then words."""

SMALL_ENTRY = np.dtype([("time_ns", "u8"), ("thread", "u8")])
PAIR_CELLS = SPAN_ENTRY.itemsize // 8

CHAIN = np.dtype([("frames", "u8", MAX_LINKS), ("length", "u4"), ("unused", "u4")])
"""The calls of a thread that are on a chain."""

FIRST_WORD_CELL = MAX_PAIRINGS * PAIR_CELLS
FIRST_MISSING_CELL = FIRST_WORD_CELL + MAX_WORDS
"""Where the words of a hit's space are, and the bits of those that there are not, behind the pairs."""

KEY_BYTES = (16, 32, 64, 80, 128, 272)
"""Of each class."""

PACKED_OPERAND = struct.Struct("=QI12B4i")
PACKED_TEST = struct.Struct("=QQ16s4B4H4B")
PACKED_PLAN = struct.Struct("=QQQ6I8B2I3B5x")
PACKED_RECIPE = struct.Struct("=4IHH11Bx")
PACKED_PAIRING = struct.Struct("=Q3I10B2x")
"""As OPERAND, TEST, PLAN, RECIPE and PAIRING; packing a row takes a tenth of the time of filling one of numpy's."""

SLOT = np.dtype([("word", "u8")])

_LINE_BYTES = 64


def _first_behind(lines: int, row_bytes: int) -> int:
    """Return the first row of a table that begins behind so many lines of a page.

    A hit reads a row of each table, and the tables begin at pages. First rows would all compete for one set of the
    processor's cache, with whatever else the kernel keeps where a page begins.
    """
    return -(-lines * _LINE_BYTES // row_bytes)


FIRST_INDEX_ENTRY = _first_behind(8, 4)
FIRST_SLOT = _first_behind(16, SLOT.itemsize)
FIRST_PLAN = _first_behind(24, PLAN.itemsize)
FIRST_OPERAND = _first_behind(32, OPERAND.itemsize)
FIRST_TEST = _first_behind(40, TEST.itemsize)
FIRST_COUNTER = _first_behind(48, 8)
FIRST_RECIPE = _first_behind(56, RECIPE.itemsize)
"""What is used of each table."""

RECORD = np.dtype(
    [
        ("time_ns", "u8"),
        ("tid", "u4"),
        ("pid", "u4"),
        ("matched", "u8"),
        ("generation", "u8"),
        ("missing", "u4"),
        ("cpu", "u4"),
        ("comm", "S16"),
    ]
)
"""What is in front of a record's values."""

RECORD_HEADER = 8
STRIDES = (96, 128, 192, 320, 1024, 4096, 16384, 65536)
"""Of each class's ring: the kernel's header and the record."""


def record_class(record_bytes: int) -> int:
    """Return the smallest class that holds a record."""
    return next(number for number, stride in enumerate(STRIDES) if record_bytes <= stride - RECORD_HEADER)
