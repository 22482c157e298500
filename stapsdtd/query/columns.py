"""Evaluate a program on many hits at once, for engines that do not filter in the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stapsdtd.query.program import ACCEPT, REJECT, Program, Relation, Source, Test

Bools = npt.NDArray[np.bool_]
_COMPARE: dict[Relation, tuple[np.ufunc, bool]] = {
    Relation.EQ: (np.equal, False), Relation.NE: (np.not_equal, False),
    Relation.LT: (np.less, False), Relation.LE: (np.less_equal, False),
    Relation.GT: (np.greater, False), Relation.GE: (np.greater_equal, False),
    Relation.SIGNED_LT: (np.less, True), Relation.SIGNED_LE: (np.less_equal, True),
    Relation.SIGNED_GT: (np.greater, True), Relation.SIGNED_GE: (np.greater_equal, True),
}  # fmt: skip
Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]


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

    def __len__(self) -> int:
        return len(self.pid)


def evaluate(program: Program, hits: Hits) -> Bools:
    """Return which hits are accepted. Raises ValueError for a test on a source that Hits lacks."""
    next_test = np.full(len(hits), program.start, np.uint16)
    for index, test in enumerate(program.tests):
        reached = next_test == index
        if not reached.any():
            continue
        following = np.where(_outcomes(test, hits), np.uint16(test.on_true), np.uint16(test.on_false))
        if test.source is Source.ARGUMENT:
            unreadable = hits.arguments[test.index].unreadable
            if unreadable is not None:
                following[unreadable] = REJECT
        np.copyto(next_test, following, where=reached)
    accepted: Bools = next_test == ACCEPT
    return accepted


def _outcomes(test: Test, hits: Hits) -> Bools:
    if test.source is Source.EXECNAME:
        equal: Bools = hits.comm == np.bytes_(test.comm)
        return equal if test.relation is Relation.EQ else ~equal
    left = _source_column(test, hits) & np.uint64(test.mask)
    right = np.uint64(test.value)
    compare, is_signed = _COMPARE[test.relation]
    outcomes: Bools = compare(left.view(np.int64), right.view(np.int64)) if is_signed else compare(left, right)
    return outcomes


def _source_column(test: Test, hits: Hits) -> npt.NDArray[np.uint64]:
    match test.source:
        case Source.ARGUMENT:
            return hits.arguments[test.index].data.view(np.uint64)
        case Source.PID:
            return hits.pid.view(np.uint32).astype(np.uint64)
        case Source.TID:
            return hits.tid.view(np.uint32).astype(np.uint64)
        case _:
            raise ValueError(f"{test.source.name} is not available in columns")
