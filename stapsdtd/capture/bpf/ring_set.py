"""The rings that hits write to: one for each size of record, and a spare for each."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable
from functools import partial

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.rings import Ring
from stapsdtd.capture.engine import RingMetrics

_log = logging.getLogger(__name__)

_MIN_RECORDS = 4
_SPARE_BYTES = 64 << 10
_KEPT_BYTES = 16 << 20


class RingSet:
    """All subscriptions share the rings. Each is as large as the largest that any subscription asked for.

    Changed by one thread; metrics() may be called by any.
    """

    def __init__(self, loaded: Loaded, reader: Reader, max_total_bytes: int) -> None:
        """max_total_bytes: of all rings together."""
        self._max_bytes = 1 << (max_total_bytes // len(layout.STRIDES)).bit_length() - 1
        self._loaded = loaded
        self._reader = reader
        self._rings: dict[int, Ring] = {}
        self._make_spares()

    def provide(self, classes: Iterable[int], buffer_bytes: int) -> None:
        """Make rings of these record classes, of at least buffer_bytes or the allowed maximum.

        A smaller ring stays if there is no room for a larger one. Raises OSError if there is none at all.
        """
        wanted = min(buffer_bytes, self._max_bytes)
        for record_class in classes:
            stride = layout.STRIDES[record_class]
            size = 1 << (max(wanted, _MIN_RECORDS * stride, mmap.PAGESIZE) - 1).bit_length()
            old = self._rings.get(record_class)
            if old is None:
                self._rings[record_class] = self._new(stride, size, partial(self._loaded.put_ring, record_class))
            elif old.size < size:
                try:
                    self._rings[record_class] = self._new(stride, size, partial(self._loaded.put_ring, record_class))
                except OSError as error:
                    _log.info("a ring stays at %d bytes instead of %d: %s", old.size, size, error)
                else:
                    self._reader.retire_ring(old)

    def drop_large(self) -> None:
        """Free large rings when nobody is subscribed. Small ones stay, since putting one in place takes a while."""
        for record_class, ring in list(self._rings.items()):
            if ring.size > _KEPT_BYTES:
                self._loaded.take_ring(record_class)
                self._reader.retire_ring(ring)
                del self._rings[record_class]

    def metrics(self) -> tuple[RingMetrics, ...]:
        return tuple(
            RingMetrics(str(ring.stride), min(max(ring.filled, 0), ring.size), ring.size)
            for _, ring in sorted(self._rings.copy().items())
        )

    def _new(self, stride: int, size: int, put: Callable[[int], None]) -> Ring:
        """put: hands the ring's descriptor to the program. Raises OSError."""
        ring = self._loaded.make_ring(stride, size)
        # first, since hits write to it before put() returns, and plans may end meanwhile, which need their records read
        self._reader.add_ring(ring)
        try:
            put(ring.fileno())
        except OSError:
            self._reader.retire_ring(ring)
            raise
        return ring

    def _make_spares(self) -> None:
        """Put the spare rings in place, once, since that takes the kernel a while."""
        for record_class, stride in enumerate(layout.STRIDES):
            size = max(_SPARE_BYTES, _MIN_RECORDS * stride)
            try:
                self._new(stride, size, partial(self._loaded.put_spare, record_class))
            except OSError as error:
                _log.warning("no spare rings, so that a process that fires too fast can cost others events: %s", error)
                return
