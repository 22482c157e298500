"""Run a program on many hits at once, for engines that do not filter in the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stapsdtd.events.columns import I64, U64, Numbers
from stapsdtd.query.expression import Arithmetic
from stapsdtd.query.numbers import calculate
from stapsdtd.query.program import ACCEPT, NO_WORD, UNDECIDED, Operation, Program, Relation, Source, Test

Bools = npt.NDArray[np.bool_]
_COMPARE: dict[Relation, tuple[np.ufunc, bool]] = {
    Relation.EQ: (np.equal, False), Relation.NE: (np.not_equal, False),
    Relation.LT: (np.less, False), Relation.LE: (np.less_equal, False),
    Relation.GT: (np.greater, False), Relation.GE: (np.greater_equal, False),
    Relation.SIGNED_LT: (np.less, True), Relation.SIGNED_LE: (np.less_equal, True),
    Relation.SIGNED_GT: (np.greater, True), Relation.SIGNED_GE: (np.greater_equal, True),
}  # fmt: skip
_CALCULATE: dict[Operation, tuple[Arithmetic, bool]] = {
    Operation[f"{sign}{how.name}"]: (how, bool(sign))
    for how in Arithmetic
    for sign in ("", "SIGNED_")
    if f"{sign}{how.name}" in Operation.__members__
}
Integers = I64 | U64


@dataclass(frozen=True, slots=True)
class Values:
    """One argument of every hit; unreadable is None if it could be read for all of them."""

    data: Integers
    unreadable: Bools | None = None


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits of one site, one row each. comm is NUL-padded to 16 bytes; arguments are by index."""

    pid: npt.NDArray[np.int32]
    tid: npt.NDArray[np.int32]
    comm: npt.NDArray[np.bytes_]
    arguments: Mapping[int, Values]
    cpu: npt.NDArray[np.uint16]
    time_ns: I64

    def __len__(self) -> int:
        return len(self.pid)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of each hit. words: what was calculated."""

    accepted: Bools
    undecided: Bools
    words: Mapping[int, Values]


def run(program: Program, hits: Hits) -> Outcome:
    """Run a program. Raises ValueError for a test on a source that Hits lacks."""
    return _Run(hits).run(program)


class _Run:
    def __init__(self, hits: Hits) -> None:
        self._hits = hits
        self._words: dict[int, U64] = {}
        self._missed: dict[int, Bools] = {}

    def run(self, program: Program) -> Outcome:
        next_test = np.full(len(self._hits), program.start, np.uint16)
        for index, test in enumerate(program.tests):
            reached = next_test == index
            if reached.any():
                np.copyto(next_test, self._following(test, reached), where=reached)
        words = {word: Values(data, self._missed[word]) for word, data in self._words.items()}
        return Outcome(next_test == ACCEPT, next_test == UNDECIDED, words)

    def _following(self, test: Test, reached: Bools) -> npt.NDArray[np.uint16]:
        """Return where to go on, and note what was calculated."""
        left, missing = self._source(test)
        if isinstance(test.relation, Operation):
            following = np.full(len(self._hits), test.on_true, np.uint16)
            missing = missing | self._calculate(test.relation, left, self._right(test), test.result, reached & ~missing)
        else:
            outcomes = self._outcomes(test, test.relation, left)
            following = np.where(outcomes, np.uint16(test.on_true), np.uint16(test.on_false))
        following[missing] = test.on_missing
        return following

    def _calculate(self, how: Operation, left: U64, right: U64, word: int, where: Bools) -> Bools:
        """Put the results into a word, and return which there are none of."""
        count = len(self._hits)
        words = self._words.setdefault(word, np.zeros(count, np.uint64))
        missed = self._missed.setdefault(word, np.zeros(count, np.bool_))
        if how is Operation.MISS:
            missed |= where
            return np.zeros(count, np.bool_)
        arithmetic, is_signed = _CALCULATE[how]
        sides = (Numbers(each.view(np.int64) if is_signed else each) for each in (left, right))
        result = calculate(arithmetic, *sides)
        np.copyto(words, result.data.view(np.uint64), where=where)
        missed &= ~where
        return np.zeros(count, np.bool_) if result.unavailable is None else result.unavailable

    def _outcomes(self, test: Test, relation: Relation, left: U64) -> Bools:
        if test.source is Source.EXECNAME:
            equal: Bools = self._hits.comm == np.bytes_(test.comm)
            return equal if relation is Relation.EQ else ~equal
        right = self._right(test)
        compare, is_signed = _COMPARE[relation]
        outcomes: Bools = compare(left.view(np.int64), right.view(np.int64)) if is_signed else compare(left, right)
        return outcomes

    def _source(self, test: Test) -> tuple[U64, Bools]:
        """Return the masked left side, and which of it cannot be read."""
        hits, mask, missing = self._hits, np.uint64(test.mask), np.zeros(len(self._hits), np.bool_)
        match test.source:
            case Source.ARGUMENT:
                argument = hits.arguments[test.index]
                unreadable = missing if argument.unreadable is None else argument.unreadable
                return argument.data.view(np.uint64) & mask, unreadable
            case Source.PID:
                return hits.pid.view(np.uint32).astype(np.uint64) & mask, missing
            case Source.TID:
                return hits.tid.view(np.uint32).astype(np.uint64) & mask, missing
            case Source.CPU:
                return hits.cpu.astype(np.uint64) & mask, missing
            case Source.TIMESTAMP:
                return hits.time_ns.view(np.uint64) & mask, missing
            case Source.WORD:
                return self._words[test.index] & mask, missing
            case Source.ZERO | Source.EXECNAME:
                return np.zeros(len(hits), np.uint64), missing
            case _:
                raise ValueError(f"{test.source.name} is not available in columns")

    def _right(self, test: Test) -> U64:
        return self._words[test.right] if test.right != NO_WORD else np.full(len(self._hits), test.value, np.uint64)
