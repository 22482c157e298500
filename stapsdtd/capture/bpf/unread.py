"""What hits could not read: constants are taken from the file, and of the rest it is told where it lies.

A record has the address in the place of a missing value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.constants import SiteConstants
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.rings import DISCARDED, Records
from stapsdtd.capture.bpf.sources import TextAt
from stapsdtd.capture.bpf.tables import Generation
from stapsdtd.events.columns import U64, Bools, Indices

_T = TypeVar("_T")

_ALL_BITS = (1 << 64) - 1
_MOST_CONSTANTS = 256
"""That are read for one column of one plan, each at some microseconds; ..."""
_MOST_READS = 1024
"""... and for all of a batch. Whoever has pages unmapped decides how many are wanted, and others' records wait."""
_MOST_BYTES = 16 << 20
"""That a batch grows by: a record without its texts is small, and has up to 60 KiB of them filled in."""
_MOST_PLACES = 64
"""In the memory of processes: of a batch, and for each a worker has to be asked."""


@dataclass(slots=True)
class _Share:
    """What is left for the records of one plan. The first constant of each column may be read in any case."""

    reads: int
    bytes: int

    def take(self, rows: Indices, byte_count: int) -> list[int]:
        """Return the rows in which so many bytes may be filled in, the earliest ones."""
        taken: list[int] = rows[: self.bytes // byte_count if byte_count else None].tolist()
        self.bytes -= len(taken) * byte_count
        return taken


class Unread:
    """Of the records of one batch. rows: which of them a column has, None for all."""

    def __init__(self, records: Records, plans: Mapping[Generation, ActivePlan]) -> None:
        """plans: of all records that are asked for."""
        self._records = records
        self._plans = plans
        self._shares: dict[Generation, _Share] = {}

    def texts(self, addresses: U64, missing: Bools, source: TextAt, rows: Indices | None) -> dict[int, bytes]:
        """Return the texts that are constants, by their rows in the column."""

        def read(_: ActivePlan, constants: SiteConstants, distance: int) -> bytes | None:
            if source.is_raw:
                return constants.raw(distance, source.max_bytes)
            return constants.text(distance, source.max_bytes)

        return {
            row: text
            for found, text, share in self._constants(addresses, missing, rows, read)
            for row in share.take(found, len(text))
        }

    def fill_numbers(self, numbers: U64, missing: Bools, position: int, rows: Indices | None) -> None:
        """Put in those that are constants, which are missing no more, and 0 for the others."""

        def read(plan: ActivePlan, constants: SiteConstants, distance: int) -> np.uint64 | None:
            operand = _operands(plan)[position]
            data = constants.raw(distance, int(operand["width"]))
            return None if data is None else narrowed(data, operand)

        addresses = numbers & np.uint64(layout.ADDRESS_MASK)
        numbers[missing] = 0
        for found, number, _ in self._constants(addresses, missing.copy(), rows, read):
            numbers[found] = number
            missing[found] = False

    def _constants(
        self,
        addresses: U64,
        missing: Bools,
        rows: Indices | None,
        read: Callable[[ActivePlan, SiteConstants, int], _T | None],
    ) -> Iterator[tuple[Indices, _T, _Share]]:
        """Give each constant with the rows that have it, and their plan's share.

        read: takes its distance from the site.
        """
        wanted = np.flatnonzero(missing & (addresses < np.uint64(layout.UNREAD_OPERAND)))
        records = wanted if rows is None else rows[wanted]
        generations = self._records["generation"][records]
        for generation in np.unique(generations).tolist():
            plan = self._plans[generation]
            constants = plan.constants
            if constants is None:
                continue
            own = np.flatnonzero(generations == generation)
            distances = addresses[wanted[own]] - self._records["values"][records[own], plan.abs_ip_at]
            is_within = constants.has(distances)
            own = own[is_within]
            distinct, whose = np.unique(distances[is_within], return_inverse=True)
            in_order = own[np.argsort(whose, kind="stable")]
            share = self._share_of(generation)
            most = min(max(share.reads, 1), _MOST_CONSTANTS)
            ends = np.cumsum(np.bincount(whose)).tolist()[:most]
            share.reads -= len(ends)
            for begin, end, distance in zip([0, *ends], ends, distinct.tolist(), strict=False):
                value = read(plan, constants, distance)
                if value is not None:
                    yield wanted[in_order[begin:end]], value, share

    def _share_of(self, generation: Generation) -> _Share:
        """Each plan has the same, so that one with many constants leaves others theirs."""
        if not self._shares:
            missing = self._records["missing"] != 0
            plans = np.unique(self._records["generation"][missing]).tolist()
            reads, byte_count = _MOST_READS // len(plans), _MOST_BYTES // len(plans)
            self._shares = {each: _Share(reads, byte_count) for each in plans}
        return self._shares[generation]

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Give some of what was missing: a pid, an address there, and how many bytes were wanted."""
        return islice(self._places(), _MOST_PLACES)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        # nothing in a discarded record can be relied on
        is_whole = self._records["length"] & DISCARDED == 0
        rows = np.flatnonzero(is_whole & (self._records["missing"] != 0))
        # one of each process comes first, since another one may have thousands
        _, firsts = np.unique(self._records["pid"][rows], return_index=True)
        rows = np.concatenate([rows[np.sort(firsts)], np.delete(rows, firsts)])
        for row in rows[:_MOST_PLACES].tolist():
            record = self._records[row]
            plan = self._plans.get(int(record["generation"]))
            if plan is None:
                continue
            for position, operand in enumerate(_operands(plan)[: layout.MAX_VALUES]):
                # nobody brings memory of the kernel in
                if int(record["missing"]) >> position & 1 and not operand["is_kernel"]:
                    address = int(record["values"][position])
                    wanted = operand["width"] if address & layout.UNREAD_OPERAND else operand["limit"]
                    # what was missing at a span's start has no address
                    if wanted:
                        yield int(record["pid"]), address & layout.ADDRESS_MASK, int(wanted)


def _operands(plan: ActivePlan) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.frombuffer(plan.entry.operands, layout.OPERAND)


def narrowed(data: bytes, operand: np.void) -> np.uint64:
    """Cut a number out of its operand's memory as `fetch` in bpf/fetch.h does."""
    left, right = int(operand["left"]), int(operand["right"])
    bits = int.from_bytes(data, sys.byteorder) << left & _ALL_BITS
    if operand["is_signed"] and bits >> 63:
        bits -= 1 << 64
    return np.uint64(bits >> right & _ALL_BITS)
