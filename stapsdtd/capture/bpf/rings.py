"""A BPF ring buffer of records of one size, as an array (kernel/bpf/ringbuf.c).

    page 0: consumer's position │ page 1: producer's position │ data │ the same data again

The data is mapped twice in a row, so records that wrap around need no care. In front of each record stand its length,
whose top bit says that it is still being written, and a page number.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.layout import RECORD, RECORD_HEADER
from stapsdtd.kernel.libbpf import create_ring

Records = npt.NDArray[np.void]

_BUSY = np.uint32(1 << 31)
DISCARDED = np.uint32(1 << 30)
"""BPF_RINGBUF_DISCARD_BIT of a record's length: it was begun and came to nothing."""

_PAGE = mmap.PAGESIZE


def record_dtype(stride: int) -> np.dtype[np.void]:
    """A ring's entry: the kernel's header, the record, and as many values as there is room for."""
    values = (stride - RECORD_HEADER - RECORD.itemsize) // 8
    return np.dtype([("length", "u4"), ("page", "u4"), *RECORD.descr, ("values", "u8", values)])


class Ring:
    """Read by one thread. Raises OSError where the kernel has no room for it."""

    def __init__(self, stride: int, size: int) -> None:
        """The size, in bytes, is a power of two and a multiple of the page."""
        self.stride = stride
        self.size = size
        self._dtype = record_dtype(stride)
        self._descriptor = create_ring(size)
        try:
            self._consumer_page = mmap.mmap(self._descriptor, _PAGE)
            self._rest = mmap.mmap(self._descriptor, _PAGE + 2 * size, prot=mmap.PROT_READ, offset=_PAGE)
        except OSError:
            os.close(self._descriptor)
            raise
        self._consumer: npt.NDArray[np.uint64] = np.frombuffer(self._consumer_page, "u8", 1)
        self._producer: npt.NDArray[np.uint64] = np.frombuffer(self._rest, "u8", 1)
        self._nothing: Records = np.empty(0, self._dtype)
        self._position = 0

    def fileno(self) -> int:
        return self._descriptor

    @property
    def produced(self) -> int:
        """How many bytes have ever been written, or begun to be."""
        return int(self._producer[0])

    @property
    def consumed(self) -> int:
        """How many of them have been read."""
        return self._position

    @property
    def filled(self) -> int:
        """How many bytes wait to be read."""
        return self.produced - self._position

    def peek(self, most: int) -> Records:
        """Return the oldest records, complete ones only. They are valid until they are consumed."""
        count = min(self.filled // self.stride, most)
        if not count:
            return self._nothing
        at = _PAGE + self._position % self.size
        records: Records = np.frombuffer(self._rest, self._dtype, count, at)
        busy = records["length"] & _BUSY
        return records[: int(busy.argmax())] if busy.any() else records

    def raw(self) -> memoryview:
        """Return the memory in which the records returned by the last peek lie, from the first one on."""
        return memoryview(self._rest)[_PAGE + self._position % self.size :]

    def consume(self, count: int) -> None:
        self._position += count * self.stride
        self._consumer[0] = self._position

    def close(self) -> None:
        # what was peeked at keeps the memory mapped until it is forgotten; the kernel's ring goes with the last mapping
        os.close(self._descriptor)
