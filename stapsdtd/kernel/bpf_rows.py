"""A hash map from keys to rows, which a program fills and the daemon empties."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

from stapsdtd.kernel.host_calls import BPF_MAP_CREATE, BPF_MAP_DELETE
from stapsdtd.kernel.libbpf import MAP_TYPE_HASH, last_error, library

ENTRIES_AT_ONCE = 4096
"""More than any hash bucket has, since the kernel makes as many buckets as entries."""

Octets = npt.NDArray[np.uint8]


class RowMap:
    """Any thread may use it; methods raise OSError.

    The memory of all entries is allocated at once: otherwise a hit might find none, though there is room.
    """

    def __init__(self, key_bytes: int, row_bytes: int, max_entries: int) -> None:
        self._sizes = key_bytes, row_bytes
        self.max_entries = max_entries
        self.descriptor = int(
            library().bpf_map_create(MAP_TYPE_HASH, b"stapsdt_rows", key_bytes, row_bytes, max_entries, None)
        )
        if self.descriptor < 0:
            raise last_error(BPF_MAP_CREATE, "stapsdt_rows")

    def take_all(self) -> tuple[Octets, Octets, bool]:
        """Remove all entries while no program adds any. Return keys and rows, an entry in each line, and whether these
        are all: if the kernel fails behind some, the others stay.
        """
        keys, rows = (np.empty((ENTRIES_AT_ONCE, size), np.uint8) for size in self._sizes)
        position, count = ctypes.c_uint32(), ctypes.c_uint32()
        parts: list[tuple[Octets, Octets]] = []
        is_first, is_last, has_failed = True, False, False
        while not is_last:
            count.value = ENTRIES_AT_ONCE
            result = library().bpf_map_lookup_and_delete_batch(
                self.descriptor,
                None if is_first else ctypes.byref(position),
                ctypes.byref(position),
                keys.ctypes.data,
                rows.ctypes.data,
                ctypes.byref(count),
                None,
            )
            is_first, is_last = False, bool(result)
            has_failed = bool(result) and ctypes.get_errno() != errno.ENOENT
            if has_failed and not parts:
                raise last_error(BPF_MAP_DELETE, "stapsdt_rows")
            if not has_failed:
                parts.append((keys[: count.value].copy(), rows[: count.value].copy()))
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts]), not has_failed

    def close(self) -> None:
        os.close(self.descriptor)
