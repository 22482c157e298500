"""Bounds on processor time, which is longer where the processor is slow or shared with others."""

from __future__ import annotations

import time
from collections.abc import Callable

_USUAL_SECONDS = 0.08
_NUMBERS = 200_000
_ATTEMPTS = 3


def seconds_beyond(bound: float, work: Callable[[], object]) -> float:
    """Return the processor time of `work`, or 0 where one of three runs took less than `bound`.

    Processor time is longer while neighbors use the caches, so one slow run says little; work that has
    become quadratic is slow each time.
    """
    took = 0.0
    for _ in range(_ATTEMPTS):
        begin = time.process_time()
        work()
        took = time.process_time() - begin
        if took < bound or took < bound * _slowness():
            return 0.0
    return took


def _slowness() -> float:
    """Return how many times as long as usual plain Python takes at the moment; at least 1."""
    begin = time.process_time()
    assert len({str(number) for number in range(_NUMBERS)}) == _NUMBERS
    return max(1.0, (time.process_time() - begin) / _USUAL_SECONDS)
