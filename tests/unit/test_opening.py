"""Where a connection's greeting and its first request's headers end, in whatever pieces they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.api.opening import Opening
from tests.api import http2

GREETING = http2.greeting()
PING = http2.frame(http2.PING, bytes(8))
FIRST_HEADERS = http2.frame(http2.HEADERS, bytes(300), 0, 1)
CONTINUED = http2.frame(http2.CONTINUATION, b"", 0, 1)
LAST_HEADERS = http2.frame(http2.CONTINUATION, bytes(70_000), http2.END_HEADERS, 1)
GREETED_AT = len(http2.PREFACE) + len(http2.frame(http2.SETTINGS, bytes(6)))


@given(st.lists(st.integers(1, 5000), max_size=60))
def test_it_is_over_with_the_last_byte_however_it_is_cut(cuts: list[int]) -> None:
    said = GREETING + PING + FIRST_HEADERS + CONTINUED + LAST_HEADERS
    opening = Opening()
    at = 0
    for size in cuts:
        opening.feed(said[at : at + size])
        at = min(at + size, len(said))
        assert opening.is_greeting_over == (at >= GREETED_AT)
        assert opening.is_over == (at == len(said))
    opening.feed(said[at:])
    assert opening.is_over


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), b"PRI * HTTP/2.0\r\n\r\nXX" + GREETING])
def test_what_is_no_http2_is_never_over(said: bytes) -> None:
    opening = Opening()
    for each in (said, GREETING + FIRST_HEADERS + LAST_HEADERS):
        opening.feed(each)
        assert not opening.is_greeting_over
        assert not opening.is_over


def _said(*frames: tuple[int, int, int]) -> Opening:
    """Kind, flags and stream of each."""
    opening = Opening()
    opening.feed(GREETING + b"".join(http2.frame(kind, bytes(5), flags, stream) for kind, flags, stream in frames))
    return opening


BEGIN = http2.HEADERS, http2.END_HEADERS


@pytest.mark.parametrize(
    ("frames", "unfinished"),
    [
        ([(http2.HEADERS, 0, 1)], {1}),
        ([(*BEGIN, 1)], {1}),
        ([(*BEGIN, 1), (http2.DATA, 0, 1)], {1}),
        ([(*BEGIN, 1), (http2.DATA, http2.END_STREAM, 1)], set()),
        ([(*BEGIN, 1), (http2.RST_STREAM, 0, 1)], set()),
        ([(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1)], set()),
        ([(http2.HEADERS, http2.END_STREAM, 1)], {1}),
        ([(http2.HEADERS, http2.END_STREAM, 1), (http2.CONTINUATION, http2.END_HEADERS, 1)], set()),
        ([(http2.HEADERS, 0, 1), (http2.CONTINUATION, http2.END_HEADERS, 1)], {1}),
        ([(*BEGIN, 1), (*BEGIN, 3), (http2.DATA, http2.END_STREAM, 1)], {3}),
        # the first bit of a stream's number means nothing
        ([(*BEGIN, 1), (http2.DATA, http2.END_STREAM, 1 | 1 << 31)], set()),
        ([(http2.PING, http2.END_STREAM, 0), (http2.WINDOW_UPDATE, 0, 1)], set()),
    ],
)
def test_requests_that_did_not_end(frames: list[tuple[int, int, int]], unfinished: set[int]) -> None:
    assert _said(*frames).unfinished == unfinished


def test_requests_that_did_not_end_are_counted_up_to_some() -> None:
    opening = _said(*[(*BEGIN, 2 * number + 1) for number in range(100_000)])
    assert 256 < len(opening.unfinished) < 2000
