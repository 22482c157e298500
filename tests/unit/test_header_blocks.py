"""Headers that the gRPC server does not survive do not reach it, in whatever pieces they come."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.api.frame_budget import FrameBudget
from stapsdtd.api.frames import FrameReader
from stapsdtd.api.header_blocks import HeaderBlocks
from stapsdtd.api.http2 import ErrorCode, Http2Error
from stapsdtd.runtime.shares import Shares
from stapsdtd.sessions.token_bucket import TokenBuckets
from tests.api import http2
from tests.unit.test_token_bucket import Clock

GOOD = [(b":method", b"POST"), (b":path", b"/stapsdtd.v1.StapsdtService/ListProbes"), (b"te", b"trailers")]
BAD = [(b":method", b"POST"), (b":path", b"/stapsdtd.v1.\xff\xfe/ListProbes")]
END = http2.END_HEADERS


def encoded(*blocks: list[tuple[bytes, bytes]], huffman: bool = True) -> list[bytes]:
    """As one client sends them: later ones refer to earlier ones."""
    encoder = hpack.Encoder()
    return [encoder.encode(block, huffman) for block in blocks]


@pytest.mark.parametrize("huffman", [False, True])
@given(st.lists(st.integers(1, 40), max_size=30))
def test_a_path_that_is_no_text_is_found(huffman: bool, cuts: list[int]) -> None:
    clock = Clock()
    frames = FrameReader(FrameBudget("uid 1", None, TokenBuckets(clock), Shares(), clock))
    frames.feed(http2.greeting())
    good, again, bad = encoded(GOOD, GOOD, BAD, huffman=huffman)
    for stream, block in ((1, good), (3, again)):
        frames.feed(http2.frame(http2.HEADERS, block, END, stream))
    said = http2.frame(http2.HEADERS, bad[:7], 0, 5) + http2.frame(http2.CONTINUATION, bad[7:], END, 5)
    at = 0
    for size in [*cuts, len(said)]:
        piece, at = said[at : at + size], at + size
        if at >= len(said):
            break
        frames.feed(piece)
    with pytest.raises(Http2Error) as raised:
        frames.feed(piece)
    assert str(raised.value) == r"a request's path is no method's: b'/stapsdtd.v1.\xff\xfe/ListProbes'"


@pytest.mark.parametrize("path", ["/a\nb", "/\x1b[2J", "/\u202e", "/" + "a" * 2000])
def test_what_is_no_path(path: str) -> None:
    (block,) = encoded([(b":path", path.encode())])
    with pytest.raises(Http2Error, match="a request's path is no method's") as raised:
        HeaderBlocks().decode(block)
    assert raised.value.code is ErrorCode.PROTOCOL_ERROR


def test_fields_are_measured_as_hpack_does() -> None:
    blocks = HeaderBlocks()
    size = sum(32 + len(name) + len(value) for name, value in GOOD)
    assert [blocks.decode(block) for block in encoded(GOOD, GOOD)] == [size, size]
