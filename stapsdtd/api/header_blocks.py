"""Reads the header blocks of a client's HTTP/2 connection, for what the gRPC server does not survive.

    :method POST, :scheme http, :path /stapsdtd.v1.StapsdtService/ListProbes, …    HPACK (RFC 7541)

gRPC's Python server decodes paths in the task that accepts all calls: one that is not UTF-8 ends this task, and with it
the service for everybody.
"""

from __future__ import annotations

import hpack

MAX_BLOCK_BYTES = 32 << 10
"""Encoded or decoded. gRPC itself refuses a request with more than 16 KiB."""
_MAX_PATH_BYTES = 1024
_PADDED, _PRIORITY, _PRIORITY_BYTES = 0x8, 0x20, 5


class HeaderBlocks:
    """Decodes blocks in the order in which they were sent, as later ones refer to earlier ones."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(MAX_BLOCK_BYTES)

    def why_not(self, block: bytes) -> str:
        """Return why the request must not reach the gRPC server, or an empty string."""
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.HPACKError as error:
            return f"a request's headers cannot be decoded: {error}"
        for name, value in fields:
            if name == b":path" and not _is_path(value):
                return f"a request's path is no method's: {value[:_MAX_PATH_BYTES]!r}"
        return ""


def _is_path(value: bytes) -> bool:
    return len(value) <= _MAX_PATH_BYTES and value.isascii() and value.decode().isprintable()


def fragment(flags: int, payload: bytes) -> bytes:
    """Return the part of a HEADERS frame's payload that belongs to the block (RFC 9113, 6.2)."""
    padding = 0
    if flags & _PADDED:
        padding, payload = payload[0] if payload else 0, payload[1:]
    if flags & _PRIORITY:
        payload = payload[_PRIORITY_BYTES:]
    return payload[: len(payload) - padding] if padding <= len(payload) else b""
