"""C's functions for numbers in network byte order: `ntohs(0x5000)` is 0x50, on a little-endian host."""

from __future__ import annotations

SIZES = {"ntohs": 2, "ntohl": 4, "ntohll": 8, "htons": 2, "htonl": 4, "htonll": 8}
"""How many bytes each turns; it drops the others. There and back is the same."""


def turned(function: str, number: int) -> int:
    """Return what a function makes of a number, on a little-endian host."""
    size = SIZES[function]
    return int.from_bytes((number % (1 << 8 * size)).to_bytes(size, "little"), "big")
