"""Decodes the header blocks of a client's HTTP/2 connection before the gRPC server does.

    :method POST, :scheme http, :path /stapsdtd.v1.StapsdtService/ListProbes, …    HPACK (RFC 7541)

An index of one byte stands for a field of up to 4,096 bytes, so that 15 kB of HPACK expand to 60 MB, of which gRPC's
decoder makes a gigabyte for some thirty connections. And gRPC's Python server decodes paths in the task that accepts
all calls: one that is not UTF-8 ends this task, and with it the service for everybody.
"""

from __future__ import annotations

import hpack
from hpack.exceptions import OversizedHeaderListError

from stapsdtd.api.http2 import PADDED, PRIORITY, ErrorCode, Http2Error

MAX_BLOCK_BYTES = 16 << 10
"""Of a block as sent, with padding, and of its fields, each with HPACK's 32 bytes. gRPC refuses requests with more."""
_FIELD_OVERHEAD = 32
_MAX_PATH_BYTES = 1024
_MAX_TABLE_UPDATES = 2
"""RFC 7541, section 4.2, needs no more: the smallest size since the last block, and the present one."""
_PRIORITY_BYTES = 5


class HeaderBlocks:
    """Decodes blocks in the order in which they were sent, as later ones refer to earlier ones."""

    def __init__(self) -> None:
        # gRPC's server leaves SETTINGS_HEADER_TABLE_SIZE at 4,096, as is the decoder's own bound
        self._decoder = hpack.Decoder(MAX_BLOCK_BYTES)

    def decode(self, block: bytes) -> int:
        """Decode the next block. Return the bytes of its fields; raises Http2Error if gRPC must not get it."""
        _check_table_updates(block)
        try:
            fields = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise too_long() from error
        except hpack.HPACKError as error:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, f"a request's headers cannot be decoded: {str(error)[:100]}"
            ) from error
        size = 0
        for name, value in fields:
            size += _FIELD_OVERHEAD + len(name) + len(value)
            if name == b":path" and not _is_path(value):
                raise Http2Error(
                    ErrorCode.PROTOCOL_ERROR, f"a request's path is no method's: {value[:_MAX_PATH_BYTES]!r}"
                )
        return size


def too_long() -> Http2Error:
    return Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a request's headers have more than {MAX_BLOCK_BYTES} bytes")


def fragment(flags: int, payload: bytes) -> bytes:
    """Return the part of a HEADERS frame's payload that belongs to the block (RFC 9113, section 6.2)."""
    padding_at = 1 if flags & PADDED else 0
    begin = padding_at + (_PRIORITY_BYTES if flags & PRIORITY else 0)
    if len(payload) < begin:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a HEADERS frame ends before its header block")
    end = len(payload) - (payload[0] if padding_at else 0)
    if end < begin:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a HEADERS frame has more padding than payload")
    return payload[begin:end]


def _is_path(value: bytes) -> bool:
    return len(value) <= _MAX_PATH_BYTES and value.isascii() and value.decode().isprintable()


def _check_table_updates(block: bytes) -> None:
    """Bound what takes the decoder 1 us a byte and counts as no field: 001 and a size, of 5 bits or more bytes."""
    at = updates = 0
    while at < len(block) and block[at] >> 5 == 0b001:
        updates += 1
        if updates > _MAX_TABLE_UPDATES:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR,
                f"a request's headers begin with more than {_MAX_TABLE_UPDATES} table sizes",
            )
        if block[at] & 0b11111 == 0b11111:
            at += 1
            while at < len(block) and block[at] & 0x80:
                at += 1
        at += 1
