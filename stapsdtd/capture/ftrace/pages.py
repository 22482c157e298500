"""Parses pages of trace_pipe_raw into records (include/linux/ring_buffer.h).

    page:   timestamp u64 | commit u64 | records …
    record: type_len 5 bits, time_delta 27 bits | data                     type_len 1 to 28: data of 4 * type_len bytes
            0: length u32, then data | 29: padding | 30: time extend | 31: absolute time stamp

Consecutive records mostly have the same length, as one thread fires one probe. numpy parses such runs at once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from stapsdtd.capture.ftrace.format import PageFormat
from stapsdtd.events.columns import I64, U32, Indices

_LARGE, _PADDING, _TIME_EXTEND, _TIME_STAMP = 0, 29, 30, 31
_TYPE_BITS = 5
_TYPE_MASK = (1 << _TYPE_BITS) - 1
_DELTA_BITS = 27
_COMMIT_MASK = (1 << 30) - 1  # the two bits above tell that events were overwritten
_STAMP_MASK = (1 << 59) - 1
_SHORTEST_RUN = 8

_U32 = struct.Struct("=I")
_HEADER = struct.Struct("=QQ")


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one CPU in the order of time.

    content: their pages, concatenated. starts: the offset of each record's data in it, in bytes, a multiple of 4.
    time_ns: by the instance's clock.
    """

    cpu: int
    content: bytes
    starts: Indices
    time_ns: I64

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def words(self) -> U32:
        return np.frombuffer(self.content, np.uint32)

    def take(self, rows: Indices | slice) -> Records:
        return Records(self.cpu, self.content, self.starts[rows], self.time_ns[rows])

    def split(self, time_ns: int) -> tuple[Records, Records]:
        """Return the records up to time_ns, and the later ones."""
        at = int(np.searchsorted(self.time_ns, time_ns, "right"))
        return self.take(slice(at)), self.take(slice(at, None))

    def followed_by(self, later: Records) -> Records:
        return Records(
            self.cpu,
            self.content + later.content,
            np.concatenate([self.starts, later.starts + len(self.content)]),
            np.concatenate([self.time_ns, later.time_ns]),
        )


def parse_pages(cpu: int, pages: list[bytes], page_format: PageFormat) -> Records:
    starts: list[Indices] = []
    times: list[I64] = []
    for index, page in enumerate(pages):
        page_starts, page_times = _parse_page(page, page_format.data_offset)
        offset = index * page_format.bytes
        starts += [run + offset for run in page_starts]
        times += page_times
    return Records(
        cpu,
        b"".join(pages),
        np.concatenate(starts) if starts else np.empty(0, np.intp),
        np.concatenate(times) if times else np.empty(0, np.int64),
    )


def _parse_page(page: bytes, data_offset: int) -> tuple[list[Indices], list[I64]]:
    """Return the byte offsets and times of a page's records, as runs."""
    time, commit = _HEADER.unpack_from(page)
    position = data_offset
    end = position + (commit & _COMMIT_MASK)
    words = np.frombuffer(page, np.uint32, len(page) // 4)
    runs: list[Indices] = []
    times: list[I64] = []
    starts: list[int] = []
    stamps: list[int] = []
    while position < end:
        (header,) = _U32.unpack_from(page, position)
        kind, delta = header & _TYPE_MASK, header >> _TYPE_BITS
        if kind == _PADDING:
            if delta == 0:
                break
            time += delta
            position += 4 + _U32.unpack_from(page, position + 4)[0]
        elif kind == _TIME_EXTEND:
            time += (_U32.unpack_from(page, position + 4)[0] << _DELTA_BITS) + delta
            position += 8
        elif kind == _TIME_STAMP:
            stamp = (_U32.unpack_from(page, position + 4)[0] << _DELTA_BITS) + delta
            time = (time & ~_STAMP_MASK) | stamp
            position += 8
        elif kind == _LARGE:
            length = _U32.unpack_from(page, position + 4)[0]
            time += delta
            starts.append(position + 8)
            stamps.append(time)
            position += 4 + length
        else:
            stride = 4 + 4 * kind
            count = _run_length(words, position, end, kind)
            if count < _SHORTEST_RUN:
                for offset in range(position, position + count * stride, stride):
                    time += int(words[offset // 4]) >> _TYPE_BITS
                    starts.append(offset + 4)
                    stamps.append(time)
            else:
                runs.append(np.array(starts, np.intp))
                times.append(np.array(stamps, np.int64))
                starts, stamps = [], []
                run = np.arange(position, position + count * stride, stride)
                run_times = time + np.cumsum(words[run // 4] >> _TYPE_BITS, dtype=np.int64)
                runs.append(run + 4)
                times.append(run_times)
                time = int(run_times[-1])
            position += count * stride
    runs.append(np.array(starts, np.intp))
    times.append(np.array(stamps, np.int64))
    return runs, times


def _run_length(words: U32, position: int, end: int, kind: int) -> int:
    """Return how many consecutive records, from this one on, have the same length."""
    step = 1 + kind
    first = position // 4
    following = first + step
    if following * 4 >= end or (int(words[following]) & _TYPE_MASK) != kind:
        return 1
    others = (words[first : end // 4 : step] & _TYPE_MASK) != kind
    return int(others.argmax()) if others.any() else len(others)
