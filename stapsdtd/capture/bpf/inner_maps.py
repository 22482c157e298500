"""A map of the program whose entries are maps themselves, each with a number."""

from __future__ import annotations

from stapsdtd.kernel.libbpf import put_map, remove_map


class InnerMaps:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def put(self, number: int, descriptor: int) -> None:
        """Let hits use a map. Raises OSError."""
        put_map(self._descriptor, number, descriptor)

    def take(self, number: int) -> None:
        """Have hits find no map of this number. Raises OSError, and FileNotFoundError if there is none."""
        remove_map(self._descriptor, number)
