"""The words of a hit's space, in which keys and values of its recipes are calculated."""

from __future__ import annotations

from dataclasses import dataclass, field

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import Consumer
from stapsdtd.capture.bpf.encode import Calculations
from stapsdtd.capture.bpf.recipes import Recipe
from stapsdtd.query.compile import MAX_OPERATIONS

_MAX_RESULTS = layout.MAX_WORDS - MAX_OPERATIONS - 1
"""What is calculated last may take a word for each operation on the way."""

_RESTRICTED_RESULTS = _MAX_RESULTS // 2
_RESTRICTED_STEPS = layout.MAX_STEPS // 2


@dataclass(slots=True)
class Words:
    """Shares them out. A part is kept for clients that may trace everybody's processes. used: by results so far."""

    used: int = 0
    calculations: list[Calculations] = field(default_factory=list)
    _steps: int = 0
    _restricted_words: int = 0
    _restricted_steps: int = 0

    def take(self, recipe: Recipe, consumer: Consumer, bit: int, pairing: int) -> None:
        """Take those of a recipe, which begin at `used`. Raises ValueError if there are not enough."""
        if recipe.program is None:
            return
        # with the test of its filter
        steps = len(recipe.program.tests) + 1
        self.used += recipe.words
        self._steps += steps
        if consumer.filter.owners is not None:
            self._restricted_words += recipe.words
            self._restricted_steps += steps
        if self._restricted_words > _RESTRICTED_RESULTS or self._restricted_steps > _RESTRICTED_STEPS:
            raise ValueError("its calculations are too many for clients that may not trace everybody's processes")
        if self.used > _MAX_RESULTS or self._steps > layout.MAX_STEPS:
            raise ValueError("the bpf engine cannot calculate that many keys and values at a site")
        self.calculations.append(Calculations(bit, recipe.program, pairing))
