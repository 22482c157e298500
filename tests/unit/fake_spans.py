"""bpf/span.h told again in Python: what a pairing makes of a hit, and the tables of starts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.layout import SpanCounter
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.kernel.bpf_rows import Octets


class MemoryEntries(EntryMap):
    """by_key: what is kept of each start, its time first. before_take and after_take are called around each."""

    def __init__(self, max_entries: int, *, is_small: bool) -> None:
        self.is_small = is_small
        self.max_entries = max_entries
        self.by_key: dict[bytes, bytes] = {}
        self.is_closed = False
        self.refuse_put: OSError | None = None
        self.before_take: Callable[[], None] = lambda: None
        self.after_take: Callable[[], None] = lambda: None

    def look_up_all(self) -> tuple[Octets, Octets]:
        parts = zip((self.by_key, self.by_key.values()), layout.SPAN_BYTES[self.is_small], strict=True)
        keys, entries = (np.frombuffer(b"".join(part), np.uint8).reshape(-1, size) for part, size in parts)
        return keys, entries

    def take(self, key: bytes) -> bytes | None:
        self.before_take()
        entry = self.by_key.pop(key, None)
        self.after_take()
        return entry

    def put(self, key: bytes, entry: bytes) -> bool:
        if self.refuse_put is not None:
            raise self.refuse_put
        return self.by_key.setdefault(key, entry) is entry

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@dataclass
class FakeSpans:
    """tables: by number. died: of each. attached: descriptors of what sees threads end. refuse: what the next makes."""

    tables: dict[int, MemoryEntries] = field(default_factory=dict)
    of_threads: set[int] = field(default_factory=set)
    died: list[int] = field(default_factory=lambda: [0] * layout.MAX_SPANS)
    attached: list[int] = field(default_factory=list)
    refuse: OSError | None = None

    def end_thread(self, task: int) -> None:
        for number in self.of_threads:
            table = self.tables[number]
            key = packed([task], layout.SPAN_BYTES[table.is_small][0] // 8)
            if table.by_key.pop(key, None) is not None:
                self.died[number] += 1

    def begin(self, pairing: Any, key: bytes, entry: bytes) -> list[SpanCounter]:
        """Return what is counted."""
        table, counted = self.tables[int(pairing["span"])], [SpanCounter.STARTS]
        known = table.by_key.get(key)
        if known is not None and is_late(pairing, known, entry):
            del table.by_key[key]
            counted.append(SpanCounter.TIMED_OUT)
        if key in table.by_key:
            counted.append(SpanCounter.NESTED)
        elif len(table.by_key) == table.max_entries:
            counted.append(SpanCounter.TABLE_FULL)
        else:
            table.by_key[key] = entry
        return counted

    def end(self, pairing: Any, key: bytes, now_ns: int) -> tuple[list[SpanCounter], tuple[int, ...] | None]:
        """Return what is counted, and the pair if there is one."""
        start = self.tables[int(pairing["span"])].by_key.pop(key, None)
        if start is None:
            return [SpanCounter.UNMATCHED], None
        if is_late(pairing, start, struct.pack("=Q", now_ns)):
            return [SpanCounter.TIMED_OUT, SpanCounter.UNMATCHED], None
        begun_ns, *words = struct.unpack(f"={len(start) // 8}Q", start)
        return [SpanCounter.PAIRED], (now_ns - begun_ns, *words)


def is_late(pairing: Any, start: bytes, now: bytes) -> bool:
    (begun_ns,), (now_ns,) = struct.unpack_from("=Q", start), struct.unpack_from("=Q", now)
    timeout_ns = int(pairing["timeout_ns"])
    return 0 < timeout_ns < int(now_ns - begun_ns)


def packed(words: list[int], count: int) -> bytes:
    return struct.pack(f"={count}Q", *words, *[0] * (count - len(words)))
