"""What a client's frames say and cost, in whatever pieces they come."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.api import frame_budget
from stapsdtd.api.frame_budget import CLIENT_FRAMES, CONNECTION_FRAMES, FrameBudget
from stapsdtd.api.frames import MAX_CONTINUATIONS, MAX_UNFINISHED, FrameReader
from stapsdtd.api.header_blocks import MAX_BLOCK_BYTES
from stapsdtd.api.http2 import ErrorCode, Http2Error, SentFrames
from stapsdtd.runtime.shares import Shares
from stapsdtd.sessions.token_bucket import TokenBuckets
from tests.api import http2
from tests.unit.test_token_bucket import Clock

GREETING = http2.greeting()
PING = http2.frame(http2.PING, bytes(8))
FIELD = b"\x83"
"""`:method: POST`, from the static table."""
FIRST_HEADERS = http2.frame(http2.HEADERS, FIELD * 30, 0, 1)
CONTINUED = http2.frame(http2.CONTINUATION, b"", 0, 1)
LAST_HEADERS = http2.frame(http2.CONTINUATION, FIELD * 30, http2.END_HEADERS, 1)
GREETED_AT = len(http2.PREFACE) + len(http2.frame(http2.SETTINGS, bytes(6)))
BEGIN = http2.HEADERS, http2.END_HEADERS
REQUESTS = 50
"""A second: the role's quota."""


def reader(requests: int | None = None, shared: TokenBuckets | None = None, clock: Clock | None = None) -> FrameReader:
    clock = clock or Clock()
    return FrameReader(FrameBudget("uid 1", requests, shared or TokenBuckets(clock), Shares(), clock))


def greeted(requests: int | None = None, shared: TokenBuckets | None = None, clock: Clock | None = None) -> FrameReader:
    made = reader(requests, shared, clock)
    assert made.feed(GREETING) == len(GREETING)
    return made


def feed_all(to: FrameReader, said: bytes) -> int:
    """Return in how many turns."""
    turns = 0
    while said:
        said = said[to.feed(said) :]
        turns += 1
    return turns


def error_of(to: FrameReader, said: bytes) -> Http2Error:
    with pytest.raises(Http2Error) as raised:
        feed_all(to, said)
    return raised.value


def headers(block: bytes, stream: int = 1, flags: int = http2.END_HEADERS) -> bytes:
    return http2.frame(http2.HEADERS, block, flags, stream)


@given(st.lists(st.integers(1, 300), max_size=60))
def test_it_is_over_with_the_last_byte_however_it_is_cut(cuts: list[int]) -> None:
    said = GREETING + PING + FIRST_HEADERS + CONTINUED + LAST_HEADERS
    frames = reader()
    at = 0
    for size in cuts:
        feed_all(frames, said[at : at + size])
        at = min(at + size, len(said))
        assert frames.is_greeting_over == (at >= GREETED_AT)
        assert frames.is_over == (at == len(said))
    feed_all(frames, said[at:])
    assert frames.is_over


class Told:
    """A reader's end: after which byte, and why; and what it knew until then."""

    def __init__(self, pieces: list[bytes]) -> None:
        frames = greeted(REQUESTS)
        self.error: str | None = None
        self.read = 0
        for piece in pieces:
            try:
                feed_all(frames, piece)
            except Http2Error as error:
                self.error = f"{error.code.name} {error}"
                break
            self.read += len(piece)
        self.known = frames.is_over, frozenset(frames.unfinished), frames.last_stream


FRAME = st.one_of(
    st.sampled_from(
        [
            PING,
            http2.frame(http2.SETTINGS),
            http2.frame(http2.WINDOW_UPDATE, bytes(4)),
            http2.frame(99, bytes(300)),
            headers(b"\x40\x03foo" + b"\x03bar"),
            headers(b"\xbe" * 3, 3, http2.END_HEADERS | http2.END_STREAM),
            headers(b"\x3f\xe1\x1f\xbe", 5),
            headers(b"\x20" * 3, 7),
            FIRST_HEADERS,
            CONTINUED,
            LAST_HEADERS,
            http2.frame(http2.DATA, b"12345", 0, 1),
            http2.frame(http2.DATA, b"", http2.END_STREAM, 3),
            http2.frame(http2.RST_STREAM, bytes(4), 0, 1),
        ]
    ),
    st.builds(
        http2.frame,
        st.integers(0, 10),
        st.binary(max_size=30),
        st.integers(0, 255),
        st.integers(0, 9),
    ),
)


@given(st.lists(FRAME, max_size=20), st.lists(st.integers(1, 40), max_size=60))
def test_the_same_is_found_however_it_is_cut(frames: list[bytes], cuts: list[int]) -> None:
    said = b"".join(frames)
    pieces, at = [], 0
    for size in [*cuts, len(said)]:
        pieces.append(said[at : at + size])
        at += size
    cut, bytewise = Told(pieces), Told([said[place : place + 1] for place in range(len(said))])
    assert (cut.error, cut.known) == (bytewise.error, bytewise.known)
    # nothing of a piece is passed on that has what is refused
    assert cut.read == max(end for end in itertools.accumulate(map(len, pieces), initial=0) if end <= bytewise.read)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), b"PRI * HTTP/2.0\r\n\r\nXX" + GREETING])
def test_what_is_no_http2_is_refused(said: bytes) -> None:
    frames = reader()
    assert "does not speak HTTP/2" in str(error_of(frames, said))
    assert not frames.is_greeting_over


def _said(*frames: tuple[int, int, int]) -> FrameReader:
    """Kind, flags and stream of each."""
    made = greeted()
    feed_all(made, b"".join(http2.frame(kind, FIELD * 4, flags, stream) for kind, flags, stream in frames))
    return made


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
        # trailers, also of a request that is not the last one
        ([(*BEGIN, 1), (*BEGIN, 3), (http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1)], {3}),
        (
            [
                (*BEGIN, 1),
                (*BEGIN, 3),
                (http2.HEADERS, http2.END_STREAM, 1),
                (http2.CONTINUATION, http2.END_HEADERS, 1),
            ],
            {3},
        ),
        # the first bit of a stream's number means nothing
        ([(*BEGIN, 1), (http2.DATA, http2.END_STREAM, 1 | 1 << 31)], set()),
        ([(http2.PING, http2.END_STREAM, 0), (http2.WINDOW_UPDATE, 0, 1)], set()),
    ],
)
def test_requests_that_did_not_end(frames: list[tuple[int, int, int]], unfinished: set[int]) -> None:
    assert _said(*frames).unfinished == unfinished


def test_requests_that_did_not_end_are_counted_up_to_some() -> None:
    frames = greeted()
    feed_all(frames, b"".join(headers(FIELD, 2 * number + 1) for number in range(MAX_UNFINISHED)))
    error = error_of(frames, headers(FIELD, 2 * MAX_UNFINISHED + 1))
    assert error.code is ErrorCode.ENHANCE_YOUR_CALM


PADDED, PRIORITY = 0x8, 0x20


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (http2.frame(http2.CONTINUATION, b"", http2.END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        (FIRST_HEADERS + PING, ErrorCode.PROTOCOL_ERROR),
        (FIRST_HEADERS + headers(FIELD, 3), ErrorCode.PROTOCOL_ERROR),
        (FIRST_HEADERS + http2.frame(http2.CONTINUATION, b"", http2.END_HEADERS, 3), ErrorCode.PROTOCOL_ERROR),
        (headers(FIELD, 0), ErrorCode.PROTOCOL_ERROR),
        (headers(FIELD, 2), ErrorCode.PROTOCOL_ERROR),
        (headers(FIELD, 3) + headers(FIELD, 1), ErrorCode.PROTOCOL_ERROR),
        (headers(FIELD) + headers(FIELD), ErrorCode.PROTOCOL_ERROR),
        (headers(FIELD, 1, http2.END_HEADERS | http2.END_STREAM) + headers(FIELD), ErrorCode.PROTOCOL_ERROR),
        (http2.frame(http2.DATA, b"x", 0, 1), ErrorCode.STREAM_CLOSED),
        (http2.frame(http2.DATA, b"x"), ErrorCode.STREAM_CLOSED),
        (headers(b"", 1, http2.END_HEADERS | PADDED), ErrorCode.FRAME_SIZE_ERROR),
        (headers(bytes(4), 1, http2.END_HEADERS | PRIORITY), ErrorCode.FRAME_SIZE_ERROR),
        (headers(b"\2" + FIELD, 1, http2.END_HEADERS | PADDED), ErrorCode.PROTOCOL_ERROR),
        (headers(b"\x80"), ErrorCode.COMPRESSION_ERROR),
        (headers(b"\xbe"), ErrorCode.COMPRESSION_ERROR),
        (headers(b"\x3f\xe2\x1f"), ErrorCode.COMPRESSION_ERROR),
        (headers(b"\x20\x3f\xe1\x1f\x20" + FIELD), ErrorCode.COMPRESSION_ERROR),
    ],
)
def test_what_no_client_may_send(said: bytes, code: ErrorCode) -> None:
    assert error_of(greeted(), said).code is code


def test_first_frame_is_settings() -> None:
    assert error_of(reader(), http2.PREFACE + PING).code is ErrorCode.PROTOCOL_ERROR


def test_padding_priority_and_table_sizes_are_read_as_they_are_meant() -> None:
    frames = greeted()
    block = b"\x40\x03foo\x03bar"
    feed_all(frames, headers(b"\3" + bytes(5) + block + bytes(3), 1, http2.END_HEADERS | PADDED | PRIORITY))
    feed_all(frames, headers(b"\x01" + b"\xbe" + b"\0", 3, http2.END_HEADERS | PADDED))
    feed_all(frames, headers(b"\x20\x3f\xe1\x1f" + FIELD, 5))
    # the first of them emptied the table
    assert error_of(frames, headers(b"\xbe", 7)).code is ErrorCode.COMPRESSION_ERROR


def literal(value_bytes: int) -> bytes:
    """A field with a name of one byte that is kept in the table, if it fits."""
    rest = value_bytes - 127
    return b"\x40\x01x\x7f" + bytes([0x80 | rest & 0x7F, rest >> 7]) + b"z" * value_bytes


class TestBounds:
    """Each at the limit, and one beyond."""

    def test_fields_of_a_block(self) -> None:
        # 4,000 bytes with the 32 of HPACK, four times, and 384 more
        block = literal(3967) + b"\xbe" * 3
        rest = MAX_BLOCK_BYTES - 4 * 4000
        assert rest == 384
        feed_all(greeted(), headers(block + literal(rest - 33)))
        assert error_of(greeted(), headers(block + literal(rest - 32))).code is ErrorCode.ENHANCE_YOUR_CALM

    def test_bytes_of_a_block(self) -> None:
        """With padding, and refused before any of those beyond comes."""
        begin = http2.frame(http2.HEADERS, bytes([255]) + FIELD + bytes(255), PADDED, 1)
        left = MAX_BLOCK_BYTES - 257
        feed_all(greeted(), begin + http2.frame(http2.CONTINUATION, bytes(left), 0, 1))
        beyond = http2.frame(http2.CONTINUATION, bytes(left + 1), 0, 1)[:9]
        assert error_of(greeted(), begin + beyond).code is ErrorCode.ENHANCE_YOUR_CALM

    def test_continuations(self) -> None:
        frames = greeted()
        feed_all(frames, FIRST_HEADERS + CONTINUED * MAX_CONTINUATIONS)
        assert error_of(frames, CONTINUED).code is ErrorCode.ENHANCE_YOUR_CALM

    def test_frames_of_a_connection(self) -> None:
        clock = Clock()
        frames = greeted(REQUESTS, clock=clock)
        feed_all(frames, PING * (CONNECTION_FRAMES - 2))
        clock.now += 0.125
        feed_all(frames, PING * (CONNECTION_FRAMES // 8))
        error = error_of(frames, PING)
        assert (error.code, str(error)) == (
            ErrorCode.ENHANCE_YOUR_CALM,
            f"one connection of uid 1 sends more than {CONNECTION_FRAMES} frames a second",
        )

    def test_frames_of_a_client(self) -> None:
        clock = Clock()
        shared = TokenBuckets(clock)
        first, second, third = (greeted(REQUESTS, shared, clock) for _ in range(3))
        feed_all(first, PING * (CONNECTION_FRAMES - 2))
        feed_all(second, PING * (CLIENT_FRAMES - CONNECTION_FRAMES - 4))
        assert str(error_of(third, PING)) == f"uid 1 sends more than {CLIENT_FRAMES} frames a second"

    def test_large_frames_count_as_several(self) -> None:
        frames = greeted(REQUESTS)
        large = http2.frame(http2.SETTINGS, bytes(6 * 2730))
        count = (CONNECTION_FRAMES - 2) // 64
        feed_all(frames, large * count)
        assert "frames a second" in str(error_of(frames, large))

    def test_requests(self) -> None:
        frames = greeted(REQUESTS)
        most = REQUESTS * frame_budget.REQUESTS_FACTOR
        ended = http2.END_HEADERS | http2.END_STREAM
        feed_all(frames, b"".join(headers(FIELD, 2 * number + 1, ended) for number in range(most)))
        assert "requests a second" in str(error_of(frames, headers(FIELD, 2 * most + 1, ended)))

    def test_bytes_of_headers(self) -> None:
        """As they are sent, and as fields."""
        frames = greeted(1)
        field_bytes = 1 + 32 + len(":methodPOST")
        fields = 300
        blocks = frame_budget.LEAST_REQUESTS * frame_budget.HEADER_BYTES_A_REQUEST // (fields * field_bytes)
        feed_all(frames, b"".join(headers(FIELD * fields, 2 * number + 1) for number in range(blocks)))
        assert "bytes of headers a second" in str(error_of(frames, headers(FIELD * fields, 2 * blocks + 1)))

    def test_a_small_quota_has_room_for_a_burst(self) -> None:
        frames = greeted(1)
        ended = http2.END_HEADERS | http2.END_STREAM
        most = frame_budget.LEAST_REQUESTS
        feed_all(frames, b"".join(headers(FIELD, 2 * number + 1, ended) for number in range(most)))
        assert f"{most} requests a second" in str(error_of(frames, headers(FIELD, 2 * most + 1, ended)))

    def test_who_has_no_quota_has_no_budget(self) -> None:
        frames = greeted()
        feed_all(frames, PING * 2 * CLIENT_FRAMES)
        feed_all(frames, b"".join(headers(FIELD * 300, 2 * number + 1) for number in range(MAX_UNFINISHED)))


def test_work_of_a_turn_is_bounded() -> None:
    """In frames, and in what is decoded."""
    frames = greeted()
    assert feed_all(frames, PING * 7000) == 4
    # 300 bytes, and 43 for each of them as a field
    assert 300 + 43 * 300 < MAX_BLOCK_BYTES < 2 * (300 + 43 * 300)
    assert feed_all(frames, b"".join(headers(FIELD * 300, 2 * number + 1) for number in range(30))) == 15


class TestSentFrames:
    ERROR = Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many")

    @given(st.lists(st.integers(1, 60), max_size=20), st.lists(st.integers(0, 40), max_size=5))
    def test_goaway_comes_between_frames_only(self, cuts: list[int], sizes: list[int]) -> None:
        said = b"".join(http2.frame(http2.DATA, bytes(size), 0, 1) for size in sizes)
        ends = {0}
        for size in sizes:
            ends.add(max(ends) + 9 + size)
        sent, at = SentFrames(), 0
        for size in cuts:
            sent.feed(said[at : at + size])
            at = min(at + size, len(said))
            assert bool(sent.goaway(self.ERROR, 7)) == (at in ends)

    def test_goaway(self) -> None:
        sent = SentFrames()
        goaway = http2.frame(http2.GOAWAY, struct.pack(">II", 7, 11) + b"too many")
        assert sent.goaway(self.ERROR, 7) == http2.frame(http2.SETTINGS) + goaway
        sent.feed(http2.frame(http2.SETTINGS))
        assert sent.goaway(self.ERROR, 7) == goaway
