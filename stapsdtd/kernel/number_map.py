"""A map of the kernel's that programs and this process share."""

from __future__ import annotations

import ctypes
import errno
import os

from stapsdtd.kernel.host_calls import BPF_MAP_CREATE, BPF_MAP_LOOKUP, BPF_MAP_UPDATE
from stapsdtd.kernel.libbpf import FLAG_NO_PREALLOC, MAP_TYPE_HASH, UPDATE_ANY, MapOptions, last_error, library


class NumberMap:
    """A hash map from numbers to numbers, of 32 bits each. Any thread may use it; methods raise OSError."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        options = MapOptions(sz=ctypes.sizeof(MapOptions), map_flags=FLAG_NO_PREALLOC)
        self.descriptor = int(
            library().bpf_map_create(MAP_TYPE_HASH, b"stapsdt_numbers", 4, 4, max_entries, ctypes.byref(options))
        )
        if self.descriptor < 0:
            raise last_error(BPF_MAP_CREATE, "stapsdt_numbers")

    def __setitem__(self, key: int, value: int) -> None:
        pair = ctypes.c_uint32(key), ctypes.c_uint32(value)
        if library().bpf_map_update_elem(self.descriptor, *map(ctypes.byref, pair), UPDATE_ANY):
            raise last_error(BPF_MAP_UPDATE, "stapsdt_numbers")

    def get(self, key: int) -> int | None:
        value = ctypes.c_uint32()
        if library().bpf_map_lookup_elem(self.descriptor, ctypes.byref(ctypes.c_uint32(key)), ctypes.byref(value)):
            return None
        return value.value

    def discard(self, key: int) -> None:
        library().bpf_map_delete_elem(self.descriptor, ctypes.byref(ctypes.c_uint32(key)))

    def keys(self) -> frozenset[int]:
        """Return the keys, among them each that is in the map all the time."""
        keys, values = (ctypes.c_uint32 * self._max_entries)(), (ctypes.c_uint32 * self._max_entries)()
        position, count = ctypes.c_uint32(), ctypes.c_uint32(self._max_entries)
        arguments = ctypes.byref(position), keys, values, ctypes.byref(count), None
        # one call has room for all, and ENOENT says that there are no more
        if library().bpf_map_lookup_batch(self.descriptor, None, *arguments) and ctypes.get_errno() != errno.ENOENT:
            raise last_error(BPF_MAP_LOOKUP, "stapsdt_numbers")
        return frozenset(keys[: count.value])

    def close(self) -> None:
        os.close(self.descriptor)
