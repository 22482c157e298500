"""How each subscription reads the records of a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stapsdtd.capture.bpf.constants import SiteConstants
from stapsdtd.capture.bpf.tables import PlanEntry
from stapsdtd.capture.engine import LossStage, Sink, SubscriptionKey
from stapsdtd.events.columns import Block, merge

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NumberAt:
    """The record's value at a position, extended to 64 bits by the program; of a floating-point number its bytes."""

    position: int
    is_signed: bool
    float_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TextAt:
    """A string or raw bytes; max_bytes is this subscription's bound, where another one's may be larger."""

    position: int
    max_bytes: int
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant, which the record need not hold; None where it cannot be had."""

    value: int | None
    is_signed: bool
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class NoText:
    """A string that cannot be had."""


Source = NumberAt | TextAt | Fixed | NoText
Layout = tuple[Source, ...]


@dataclass(slots=True, eq=False)
class Channel:
    """A subscription as the reader sees it.

    excluded: processes that may have come to map an object after the program was told whom to leave out. is_open: until
    then, what plans that could not be replaced still bring is nobody's.
    """

    subscription_key: SubscriptionKey
    sink: Sink
    excluded: frozenset[int] = frozenset()
    is_open: bool = True

    def deliver(self, blocks: Sequence[Block]) -> None:
        if not self.is_open:
            return
        kept = [found for block in blocks if len(found := self._without_excluded(block))]
        try:
            self.sink.deliver(merge(kept))
        except Exception:  # noqa: BLE001 - one subscription's trouble is not the others'
            _log.exception("events could not be delivered")
            self.lost(LossStage.DECODE, sum(map(len, kept)))

    def fired(self, count: int) -> None:
        self._tell(self.sink.fired, count)

    def filtered(self, count: int) -> None:
        self._tell(self.sink.filtered, count)

    def lost(self, stage: LossStage, count: int) -> None:
        self._tell(partial(self.sink.lost, stage), count)

    def _tell(self, tell: Callable[[int], None], count: int) -> None:
        if not self.is_open:
            return
        try:
            tell(count)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("a subscription could not be told its figures")

    def _without_excluded(self, block: Block) -> Block:
        if not self.excluded:
            return block
        outside = np.isin(block.pid, list(self.excluded))
        if not outside.any():
            return block
        self.filtered(int(np.count_nonzero(outside)))
        return block.take(np.flatnonzero(~outside))


@dataclass(frozen=True, slots=True)
class Reading:
    """How one subscription reads a plan's records: those with its bit, as events of its site_id."""

    channel: Channel
    bit: int
    site_id: int
    layout: Layout


@dataclass(slots=True, eq=False)
class ActivePlan:
    """A plan whose records may be met.

    channels: of all consumers, by their filters' bits. readings: of those that want events.
    constants: where what its hits cannot read may be found nevertheless; abs_ip_at: which of the record's values tells
    how far from them. received: by the filters' bits.
    """

    entry: PlanEntry
    channels: tuple[tuple[int, Channel], ...]
    readings: tuple[Reading, ...]
    tested: int
    constants: SiteConstants | None = None
    abs_ip_at: int = 0
    received: dict[int, int] = field(default_factory=dict)
