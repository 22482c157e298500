"""Reads the frames that a client sends, for the life of its connection, before the gRPC server gets them.

Requests that began, by which timeouts go; header blocks, whose size is bounded; and how much work the frames are, which
is charged to the client's budget. What is neither about streams nor headers is left to gRPC to check.
"""

from __future__ import annotations

from stapsdtd.api.frame_budget import FrameBudget
from stapsdtd.api.header_blocks import MAX_BLOCK_BYTES, HeaderBlocks, fragment, too_long
from stapsdtd.api.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    STREAM_MASK,
    ErrorCode,
    Http2Error,
)

MAX_CONTINUATIONS = 16
"""Of a header block. HEADERS alone has room for the longest one."""
MAX_UNFINISHED = 1000
"""Requests. gRPC's server allows 256, and the client may have reset more than it has heard of."""
_MAX_FRAMES, _MAX_HEADER_BYTES = 2000, MAX_BLOCK_BYTES
"""Read in a turn, and what the last block has beyond: either takes 1 to 4 ms."""
_CHARGED_BYTES = 256
"""Of a frame other than DATA, HEADERS and CONTINUATION, for each of which it is charged like another frame."""


class FrameReader:
    """Reads frames in whatever pieces they come.

    is_greeting_over: whether the preface and SETTINGS were received.
    is_over: whether the headers of a first request were received, too.
    unfinished: stream ids of requests that began and have not ended; no id is used twice.
    last_stream: the stream id of the last request.
    """

    def __init__(self, budget: FrameBudget) -> None:
        self.is_greeting_over = False
        self.is_over = False
        self.unfinished: set[int] = set()
        self.last_stream = 0
        self._budget = budget
        self._blocks = HeaderBlocks()
        self._preface = PREFACE
        self._frame_header = b""
        # the present frame; its kind is negative between frames
        self._kind, self._flags, self._stream = -1, 0, 0
        self._payload_left = 0
        self._payload = b""
        # the block whose last fragment has not come
        self._block: bytes | None = None
        self._block_stream = self._block_bytes = self._continuations = 0
        self._ends_stream = False
        self._work_frames = self._work_header_bytes = 0

    def feed(self, data: bytes) -> int:
        """Read the next bytes received, which need not end with a frame.

        Return how many were read; call again with the rest, after others had their turn. Raises Http2Error if the
        connection has to be closed; then none of these bytes may reach the gRPC server.
        """
        at = self._feed_preface(data) if self._preface else 0
        self._work_frames = self._work_header_bytes = 0
        while at < len(data) and self._work_frames < _MAX_FRAMES and self._work_header_bytes < _MAX_HEADER_BYTES:
            at = self._feed_frame(data, at)
        self._budget.take_frames(self._work_frames)
        return at

    def _feed_preface(self, data: bytes) -> int:
        expected, self._preface = self._preface[: len(data)], self._preface[len(data) :]
        if not data.startswith(expected):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        return len(expected)

    def _feed_frame(self, data: bytes, at: int) -> int:
        """Read up to the end of the present frame. Return where that is."""
        if self._kind < 0:
            if self._frame_header or len(data) - at < FRAME_HEADER.size:
                missing = FRAME_HEADER.size - len(self._frame_header)
                self._frame_header += data[at : at + missing]
                if len(self._frame_header) < FRAME_HEADER.size:
                    return len(data)
                header, self._frame_header = self._frame_header, b""
                self._begin_frame(*FRAME_HEADER.unpack(header))
                at += missing
            else:
                self._begin_frame(*FRAME_HEADER.unpack_from(data, at))
                at += FRAME_HEADER.size
        end = min(at + self._payload_left, len(data))
        if self._kind in {HEADERS, CONTINUATION}:
            self._payload += data[at:end]
        self._payload_left -= end - at
        if not self._payload_left:
            kind, self._kind = self._kind, -1
            self._end_frame(kind)
        return end

    def _begin_frame(self, high: int, low: int, kind: int, flags: int, stream: int) -> None:
        """Check what can be checked before the payload comes."""
        self._kind, self._flags, self._stream = kind, flags, stream & STREAM_MASK
        self._payload_left = length = high << 16 | low
        self._work_frames += 1
        if not self.is_greeting_over and kind != SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and (kind != CONTINUATION or self._stream != self._block_stream):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a request's headers are interrupted")
        if kind == HEADERS:
            self._begin_headers()
            self._extend_block(length)
        elif kind == CONTINUATION:
            if self._block is None:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame continues nothing")
            self._continuations += 1
            if self._continuations > MAX_CONTINUATIONS:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM, f"a request's headers have more than {MAX_CONTINUATIONS} continuations"
                )
            self._extend_block(length)
        elif kind == DATA:
            if self._stream not in self.unfinished:
                raise Http2Error(ErrorCode.STREAM_CLOSED, "a DATA frame belongs to no request")
        else:
            self._work_frames += length // _CHARGED_BYTES

    def _begin_headers(self) -> None:
        """Begin a request's header block, or that of its trailers."""
        ends_stream = bool(self._flags & END_STREAM)
        if self._stream not in self.unfinished:
            if self._stream <= self.last_stream or not self._stream % 2:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"the id {self._stream} begins no request")
            self._budget.take_request()
            self.last_stream = self._stream
            self.unfinished.add(self._stream)
            if len(self.unfinished) > MAX_UNFINISHED:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM, f"more than {MAX_UNFINISHED} requests began and did not end"
                )
        elif not ends_stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a request has headers twice")
        self._block, self._block_stream, self._ends_stream = b"", self._stream, ends_stream
        self._block_bytes = self._continuations = 0

    def _extend_block(self, length: int) -> None:
        self._block_bytes += length
        if self._block_bytes > MAX_BLOCK_BYTES:
            raise too_long()

    def _end_frame(self, kind: int) -> None:
        if kind in {HEADERS, CONTINUATION}:
            payload, self._payload = self._payload, b""
            self._block = (self._block or b"") + (fragment(self._flags, payload) if kind == HEADERS else payload)
            if self._flags & END_HEADERS:
                self._end_block(self._block)
        elif kind == SETTINGS:
            self.is_greeting_over = True
        elif kind == RST_STREAM or (kind == DATA and self._flags & END_STREAM):
            self.unfinished.discard(self._stream)

    def _end_block(self, block: bytes) -> None:
        self._block = None
        self._charge_header_bytes(self._block_bytes)
        self._charge_header_bytes(self._blocks.decode(block))
        self.is_over = True
        if self._ends_stream:
            self.unfinished.discard(self._block_stream)

    def _charge_header_bytes(self, count: int) -> None:
        self._work_header_bytes += count
        self._budget.take_header_bytes(count)
