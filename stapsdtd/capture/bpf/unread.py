"""What hits could not read: constants are taken from the file, and of the rest it is told where it lies.

A record has the address in the place of a missing value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np

from stapsdtd.capture.batch import U64, Bools, Indices
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.constants import SiteConstants
from stapsdtd.capture.bpf.reading import ActivePlan, TextAt
from stapsdtd.capture.bpf.rings import DISCARDED, Records
from stapsdtd.capture.bpf.tables import Generation

_T = TypeVar("_T")

_ALL_BITS = (1 << 64) - 1
_MOST_CONSTANTS = 256
"""That are read for one column of one plan, each at some microseconds."""
_MOST_PLACES = 64


class Unread:
    """Of the records of one batch. rows: which of them a column has, None for all."""

    def __init__(self, records: Records, plans: Mapping[Generation, ActivePlan]) -> None:
        """plans: of all records that are asked for."""
        self._records = records
        self._plans = plans

    def texts(self, addresses: U64, missing: Bools, source: TextAt, rows: Indices | None) -> dict[int, bytes]:
        """Return the texts that are constants, by their rows in the column."""

        def read(_: ActivePlan, constants: SiteConstants, distance: int) -> bytes | None:
            if source.is_raw:
                return constants.raw(distance, source.max_bytes)
            return constants.text(distance, source.max_bytes)

        return {row: text for found, text in self._constants(addresses, missing, rows, read) for row in found.tolist()}

    def fill_numbers(self, numbers: U64, missing: Bools, position: int, rows: Indices | None) -> None:
        """Put in those that are constants, which are missing no more, and 0 for the others."""

        def read(plan: ActivePlan, constants: SiteConstants, distance: int) -> np.uint64 | None:
            operand = _operands(plan)[position]
            data = constants.raw(distance, int(operand["width"]))
            return None if data is None else narrowed(data, operand)

        addresses = numbers & np.uint64(layout.ADDRESS_MASK)
        numbers[missing] = 0
        for found, number in self._constants(addresses, missing.copy(), rows, read):
            numbers[found] = number
            missing[found] = False

    def _constants(
        self,
        addresses: U64,
        missing: Bools,
        rows: Indices | None,
        read: Callable[[ActivePlan, SiteConstants, int], _T | None],
    ) -> Iterator[tuple[Indices, _T]]:
        """Give each constant with the rows that have it. read: takes its distance from the site."""
        wanted = np.flatnonzero(missing & (addresses < np.uint64(layout.UNREAD_OPERAND)))
        records = wanted if rows is None else rows[wanted]
        generations = self._records["generation"][records]
        distances = addresses[wanted] - self._records["abs_ip"][records]
        for generation in np.unique(generations).tolist():
            plan = self._plans[generation]
            constants = plan.constants
            if constants is None:
                continue
            own = np.flatnonzero(generations == generation)
            own = own[constants.has(distances[own])]
            distinct, whose = np.unique(distances[own], return_inverse=True)
            in_order = own[np.argsort(whose, kind="stable")]
            ends = np.cumsum(np.bincount(whose)).tolist()
            for begin, end, distance in zip([0, *ends], ends[:_MOST_CONSTANTS], distinct.tolist(), strict=False):
                value = read(plan, constants, distance)
                if value is not None:
                    yield wanted[in_order[begin:end]], value

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Give some of what was missing: a pid, an address there, and how many bytes were wanted."""
        # nothing in a discarded record can be relied on
        is_whole = self._records["length"] & DISCARDED == 0
        for row in np.flatnonzero(is_whole & (self._records["missing"] != 0))[:_MOST_PLACES].tolist():
            record = self._records[row]
            plan = self._plans.get(int(record["generation"]))
            if plan is None:
                continue
            for position, operand in enumerate(_operands(plan)[: layout.MAX_VALUES]):
                if int(record["missing"]) >> position & 1:
                    address = int(record["values"][position])
                    wanted = operand["width"] if address & layout.UNREAD_OPERAND else operand["limit"]
                    yield int(record["pid"]), address & layout.ADDRESS_MASK, int(wanted)


def _operands(plan: ActivePlan) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.frombuffer(plan.entry.operands, layout.OPERAND)


def narrowed(data: bytes, operand: np.void) -> np.uint64:
    """Cut a number out of its operand's memory as `fetch` in bpf/stapsdt.bpf.c does."""
    left, right = int(operand["left"]), int(operand["right"])
    bits = int.from_bytes(data, sys.byteorder) << left & _ALL_BITS
    if operand["is_signed"] and bits >> 63:
        bits -= 1 << 64
    return np.uint64(bits >> right & _ALL_BITS)
