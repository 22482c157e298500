"""Headers that the gRPC server does not survive do not reach it, in whatever pieces they come."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.api.header_blocks import MAX_BLOCK_BYTES, HeaderBlocks
from stapsdtd.api.opening import Opening
from tests.api import http2

GOOD = [(b":method", b"POST"), (b":path", b"/stapsdtd.v1.StapsdtService/ListProbes"), (b"te", b"trailers")]
BAD = [(b":method", b"POST"), (b":path", b"/stapsdtd.v1.\xff\xfe/ListProbes")]
END = http2.END_HEADERS


def opening() -> Opening:
    made = Opening(HeaderBlocks().why_not)
    made.feed(http2.greeting())
    return made


def encoded(*blocks: list[tuple[bytes, bytes]], huffman: bool = True) -> list[bytes]:
    """As one client sends them: later ones refer to earlier ones."""
    encoder = hpack.Encoder()
    return [encoder.encode(block, huffman) for block in blocks]


@pytest.mark.parametrize("huffman", [False, True])
@given(st.lists(st.integers(1, 40), max_size=30))
def test_a_path_that_is_no_text_is_found(huffman: bool, cuts: list[int]) -> None:
    found = opening()
    good, again, bad = encoded(GOOD, GOOD, BAD, huffman=huffman)
    for stream, block in ((1, good), (3, again)):
        found.feed(http2.frame(http2.HEADERS, block, END, stream))
        assert not found.problem
    said = http2.frame(http2.HEADERS, bad[:7], 0, 5) + http2.frame(http2.CONTINUATION, bad[7:], END, 5)
    at = 0
    for size in cuts:
        found.feed(said[at : at + size])
        at += size
        assert bool(found.problem) == (at >= len(said))
    found.feed(said[at:])
    assert found.problem == r"a request's path is no method's: b'/stapsdtd.v1.\xff\xfe/ListProbes'"


@pytest.mark.parametrize("path", ["/a\nb", "/\x1b[2J", "/\u202e", "/" + "a" * 2000])
def test_what_is_no_path(path: str) -> None:
    (block,) = encoded([(b":path", path.encode())])
    assert HeaderBlocks().why_not(block).startswith("a request's path is no method's")


def test_padding_and_priority_are_no_part_of_the_block() -> None:
    found = opening()
    good, bad = encoded(GOOD, BAD)
    padded = bytes([3]) + bytes(5) + good + bytes(3)
    found.feed(http2.frame(http2.HEADERS, padded, END | 0x28, 1))
    assert not found.problem
    found.feed(http2.frame(http2.HEADERS, bytes([3]) + bytes(5) + bad + bytes(3), END | 0x28, 3))
    assert found.problem


def bomb() -> bytes:
    """A small block that refers to one large field, many times."""
    return hpack.Encoder().encode([(b"foo", b"z" * 3900)] * 1000)


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([(http2.HEADERS, b"\x80", END)], "cannot be decoded"),
        ([(http2.HEADERS, bomb(), END)], "cannot be decoded"),
        ([(http2.HEADERS, b"", 0), (http2.PING, bytes(8), 0)], "interrupted"),
        ([(http2.HEADERS, b"", 0), (http2.HEADERS, b"", END)], "interrupted"),
        ([(http2.CONTINUATION, b"", END)], "interrupted"),
        ([(http2.HEADERS, bytes(MAX_BLOCK_BYTES + 1), END)], "more than 32768 bytes"),
        ([(http2.HEADERS, b"", 0), *[(http2.CONTINUATION, bytes(10_000), 0)] * 4], "more than 32768 bytes"),
    ],
)
def test_what_is_not_passed_on(frames: list[tuple[int, bytes, int]], problem: str) -> None:
    found = opening()
    for kind, payload, flags in frames:
        found.feed(http2.frame(kind, payload, flags, 1))
    assert problem in found.problem


def test_requests_that_do_not_end_are_few() -> None:
    found = opening()
    (block,) = encoded([(b":method", b"POST")])
    for number in range(1001):
        assert not found.problem
        found.feed(http2.frame(http2.HEADERS, block, END, 2 * number + 1))
    assert found.problem == "more than 1000 requests began and did not end"
