"""bpf/span.h told again in Python: what a pairing makes of a hit, and the tables of starts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.layout import SpanCounter
from stapsdtd.capture.bpf.span_kinds import SpanKind
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.kernel.bpf_rows import Octets


class MemoryEntries(EntryMap):
    """by_key: what is kept of each start, its time first. before_take and after_take are called around each."""

    def __init__(self, max_entries: int, kind: SpanKind) -> None:
        self.kind = kind
        self.max_entries = max_entries
        self.by_key: dict[bytes, bytes] = {}
        self.is_closed = False
        self.refuse_put: OSError | None = None
        self.before_take: Callable[[], None] = lambda: None
        self.after_take: Callable[[], None] = lambda: None

    def look_up_all(self) -> tuple[Octets, Octets]:
        sizes = self.kind.key_bytes, self.kind.entry_bytes
        parts = zip((self.by_key, self.by_key.values()), sizes, strict=True)
        keys, entries = (np.frombuffer(b"".join(part), np.uint8).reshape(-1, size) for part, size in parts)
        return keys, entries

    def all_keys(self) -> list[bytes]:
        return list(self.by_key)

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
    died: list[int] = field(default_factory=lambda: [0] * layout.THREAD_SPANS)
    attached: list[int] = field(default_factory=list)
    refuse: OSError | None = None

    def end_thread(self, task: int) -> None:
        for number in self.of_threads:
            table = self.tables[number]
            key = packed([task], table.kind.key_bytes // 8)
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
            if pairing["takes_latest"]:
                table.by_key[key] = entry
        elif len(table.by_key) == table.max_entries:
            counted.append(SpanCounter.TABLE_FULL)
        else:
            table.by_key[key] = entry
        return counted

    def end(self, pairing: Any, key: bytes, now_ns: int) -> tuple[list[SpanCounter], tuple[int, ...] | None]:
        """Return what is counted, and the pair if there is one; a negative time elapsed tells that it is not wanted."""
        # there is none as long as it is not known what to keep
        table = self.tables.get(int(pairing["span"]))
        start = table.by_key.pop(key, None) if table else None
        if start is None:
            return [SpanCounter.UNMATCHED], None
        if is_late(pairing, start, struct.pack("=Q", now_ns)):
            return [SpanCounter.TIMED_OUT, SpanCounter.UNMATCHED], None
        begun_ns, *words = struct.unpack_from(f"={len(start) // 8}Q", start)
        return [SpanCounter.PAIRED], (-1 if begun_ns & layout.UNWANTED_START else now_ns - begun_ns, *words)


def is_late(pairing: Any, start: bytes, now: bytes) -> bool:
    begun_ns, now_ns = (struct.unpack_from("=Q", each)[0] & ~layout.UNWANTED_START for each in (start, now))
    timeout_ns = int(pairing["timeout_ns"])
    return 0 < timeout_ns < int(now_ns - begun_ns)


def packed(words: list[int], count: int) -> bytes:
    return struct.pack(f"={count}Q", *words, *[0] * (count - len(words)))
