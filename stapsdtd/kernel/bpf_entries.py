"""A hash map from keys to entries, which a program puts in and takes out."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

from stapsdtd.kernel.bpf_rows import ENTRIES_AT_ONCE, Octets
from stapsdtd.kernel.host_calls import BPF_MAP_CREATE, BPF_MAP_DELETE, BPF_MAP_LOOKUP, BPF_MAP_UPDATE
from stapsdtd.kernel.libbpf import MAP_TYPE_HASH, last_error, library

_UPDATE_NOEXIST = 1


class EntryMap:
    """Any thread may use it; methods raise OSError.

    The memory of all entries is allocated at once: otherwise a hit might find none, though there is room.
    """

    def __init__(self, key_bytes: int, entry_bytes: int, max_entries: int) -> None:
        self._sizes = key_bytes, entry_bytes
        self.max_entries = max_entries
        self.descriptor = int(
            library().bpf_map_create(MAP_TYPE_HASH, b"stapsdt_spans", key_bytes, entry_bytes, max_entries, None)
        )
        if self.descriptor < 0:
            raise last_error(BPF_MAP_CREATE, "stapsdt_spans")

    def look_up_all(self) -> tuple[Octets, Octets]:
        """Return keys and entries, one in each line, among them each that is in the map all the time."""
        keys, entries = (np.empty((ENTRIES_AT_ONCE, size), np.uint8) for size in self._sizes)
        position, count = ctypes.c_uint32(), ctypes.c_uint32()
        found: list[tuple[Octets, Octets]] = []
        is_last = False
        while not is_last:
            count.value = ENTRIES_AT_ONCE
            is_last = bool(
                library().bpf_map_lookup_batch(
                    self.descriptor,
                    ctypes.byref(position) if found else None,
                    ctypes.byref(position),
                    keys.ctypes.data,
                    entries.ctypes.data,
                    ctypes.byref(count),
                    None,
                )
            )
            if is_last and ctypes.get_errno() != errno.ENOENT:
                raise last_error(BPF_MAP_LOOKUP, "stapsdt_spans")
            found.append((keys[: count.value].copy(), entries[: count.value].copy()))
        return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])

    def all_keys(self) -> list[bytes]:
        """Return keys without their entries, which may be large. While some come and go, others may be left out."""
        found: dict[bytes, None] = {}
        before, key = None, ctypes.create_string_buffer(self._sizes[0])
        for _ in range(2 * self.max_entries):
            if library().bpf_map_get_next_key(self.descriptor, before, key):
                if ctypes.get_errno() == errno.ENOENT:
                    break
                raise last_error(BPF_MAP_LOOKUP, "stapsdt_spans")
            before = key.raw
            found[before] = None
        return list(found)

    def take(self, key: bytes) -> bytes | None:
        """Remove an entry, and return it as it was then, or None if there is none."""
        entry = ctypes.create_string_buffer(self._sizes[1])
        if library().bpf_map_lookup_and_delete_elem(self.descriptor, key, entry):
            if ctypes.get_errno() == errno.ENOENT:
                return None
            raise last_error(BPF_MAP_DELETE, "stapsdt_spans")
        return entry.raw

    def put(self, key: bytes, entry: bytes) -> bool:
        """Return whether there was no other one with this key."""
        if library().bpf_map_update_elem(self.descriptor, key, entry, _UPDATE_NOEXIST):
            if ctypes.get_errno() == errno.EEXIST:
                return False
            raise last_error(BPF_MAP_UPDATE, "stapsdt_spans")
        return True

    def close(self) -> None:
        os.close(self.descriptor)
