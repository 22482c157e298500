"""A BPF ring buffer of records of one size, as an array (kernel/bpf/ringbuf.c).

    page 0: consumer's position │ page 1: producer's position │ data │ the same data again

The data is mapped twice in a row, so records that wrap around need no care. In front of each record stand its length,
whose top bit says that it is still being written, and a page number.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.layout import RECORD, RECORD_HEADER
from stapsdtd.kernel.host_calls import BUFFER_MMAP, host_call
from stapsdtd.kernel.libbpf import create_ring

Records = npt.NDArray[np.void]

_BUSY = np.uint32(1 << 31)
DISCARDED = np.uint32(1 << 30)
"""BPF_RINGBUF_DISCARD_BIT of a record's length: the program gave it up."""

_PAGE = mmap.PAGESIZE


def record_dtype(stride: int) -> np.dtype[np.void]:
    """Return the type of a ring's entry: the kernel's header, the record, and as many values as fit."""
    values = (stride - RECORD_HEADER - RECORD.itemsize) // 8
    return np.dtype([("length", "u4"), ("page", "u4"), *RECORD.descr, ("values", "u8", values)])


class Ring:
    """Read by one thread. Making one raises OSError if the kernel has no memory for it.

    is_held_up: the last peek ended at a record that was still being written. Those behind it may be complete.
    """

    def __init__(self, stride: int, size: int, *, create: Callable[[int], int] = create_ring) -> None:
        """size: in bytes, a power of two and a multiple of the page size. create: returns the ring's descriptor."""
        self.stride = stride
        self.size = size
        self._dtype = record_dtype(stride)
        self._descriptor = create(size)
        try:
            with host_call(BUFFER_MMAP, f"a ring of {size} bytes"):
                self._consumer_page = mmap.mmap(self._descriptor, _PAGE)
                self._rest = mmap.mmap(self._descriptor, _PAGE + 2 * size, prot=mmap.PROT_READ, offset=_PAGE)
        except OSError:
            os.close(self._descriptor)
            raise
        # looked at many times a second, which costs a third of what an element of an array does
        self._consumer = memoryview(self._consumer_page).cast("Q")
        self._producer = memoryview(self._rest)[:_PAGE].cast("Q")
        self._nothing: Records = np.empty(0, self._dtype)
        self._position = 0
        self.is_held_up = False

    def fileno(self) -> int:
        return self._descriptor

    @property
    def produced(self) -> int:
        """How many bytes were ever reserved by the program."""
        return self._producer[0]

    @property
    def consumed(self) -> int:
        """How many of them have been read."""
        return self._position

    @property
    def filled(self) -> int:
        """How many bytes wait to be read."""
        return self._producer[0] - self._position

    def peek(self, most: int) -> Records:
        """Return up to so many of the oldest records, all complete. They are valid until they are consumed."""
        count = min((self._producer[0] - self._position) // self.stride, most)
        self.is_held_up = False
        if not count:
            return self._nothing
        at = _PAGE + self._position % self.size
        records: Records = np.frombuffer(self._rest, self._dtype, count, at)
        busy = records["length"] & _BUSY
        self.is_held_up = bool(np.count_nonzero(busy))
        return records[: int(busy.argmax())] if self.is_held_up else records

    def raw(self) -> memoryview:
        """Return the memory from the first record of the last peek on."""
        return memoryview(self._rest)[_PAGE + self._position % self.size :]

    def consume(self, count: int) -> None:
        self._position += count * self.stride
        self._consumer[0] = self._position

    def close(self) -> None:
        # records that were peeked at keep the memory mapped, and the kernel's ring lives as long as its last mapping
        os.close(self._descriptor)
