"""The program's pairings, in the table that it reads."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.capture.bpf.span_kinds import SMALL_SPAN, SpanKind


@dataclass(frozen=True, slots=True)
class PairingSpec:
    """bit: of the filter that chooses the hits. span: the number of its table. parts: operands of the key, none if that
    is the thread. words: operands of what is kept of a start. is_of_call: the parts are those of a call. kind: of the
    table. start_bit: of the filter that tells which starts make pairs that are wanted; None if all do. may_reject: it
    is an end, whose pair may not be wanted.
    """

    span: int
    bit: int
    is_end: bool
    is_of_thread: bool
    parts: tuple[bytes, ...]
    words: tuple[bytes, ...]
    timeout_ns: int
    kind: SpanKind
    takes_latest: bool = False
    is_of_call: bool = False
    start_bit: int | None = None
    may_reject: bool = False

    @property
    def is_small(self) -> bool:
        return self.kind == SMALL_SPAN

    @property
    def operands(self) -> tuple[bytes, ...]:
        return self.parts + self.words


@dataclass(frozen=True, slots=True)
class PairingRun:
    """A plan's pairings in the table."""

    first: int = 0
    count: int = 0

    @property
    def cells(self) -> int:
        return self.count * layout.COUNTERS_OF_PAIRING


class PairingRows:
    """Changed by one thread."""

    def __init__(self, rows: mmap.mmap, pool: Pool) -> None:
        self._rows = rows
        self._pool = pool

    def allocate(self, specs: Sequence[PairingSpec], first_operand: int, first_cell: int) -> PairingRun:
        """Write pairings: their operands follow each other from first_operand on, and counters from first_cell on.

        Raises TableFullError.
        """
        if not specs:
            return PairingRun()
        first = self._pool.allocate(len(specs))
        operand, cell = first_operand, first_cell
        for number, spec in enumerate(specs, first):
            counts = len(spec.parts), len(spec.words)
            flags = spec.bit, spec.is_end, spec.is_of_thread, *counts, spec.is_small, spec.takes_latest, spec.is_of_call
            numbers = spec.timeout_ns, spec.span, operand, cell
            begin = number * layout.PACKED_PAIRING.size
            start_filter = 0 if spec.start_bit is None else spec.start_bit + 1
            layout.PACKED_PAIRING.pack_into(self._rows, begin, *numbers, *flags, spec.kind.start_class, start_filter)
            operand += len(spec.operands)
            cell += layout.COUNTERS_OF_PAIRING
        return PairingRun(first, len(specs))

    def free(self, run: PairingRun) -> None:
        self._pool.free(run.first, run.count)
