"""A program over many hits at once: what the BPF engine does in the kernel, for engines that filter afterwards."""

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
    """One argument of every hit; unreadable is None where each could be read."""

    data: Integers
    unreadable: Bools | None = None


@dataclass(frozen=True, slots=True)
class Hits:
    """What is known of hits of one site, a row each. comm is NUL-padded to 16 bytes; arguments are by index."""

    pid: npt.NDArray[np.int32]
    tid: npt.NDArray[np.int32]
    comm: npt.NDArray[np.bytes_]
    arguments: Mapping[int, Values]

    def __len__(self) -> int:
        return len(self.pid)


def evaluate(program: Program, hits: Hits) -> Bools:
    """Answer which hits are accepted. Raises ValueError for a test of what Hits does not know."""
    place = np.full(len(hits), program.start, np.uint16)
    for number, test in enumerate(program.tests):
        here = place == number
        if not here.any():
            continue
        following = np.where(_outcomes(test, hits), np.uint16(test.on_true), np.uint16(test.on_false))
        if test.source is Source.ARGUMENT:
            unreadable = hits.arguments[test.index].unreadable
            if unreadable is not None:
                following[unreadable] = REJECT
        np.copyto(place, following, where=here)
    accepted: Bools = place == ACCEPT
    return accepted


def _outcomes(test: Test, hits: Hits) -> Bools:
    if test.source is Source.EXECNAME:
        equal: Bools = hits.comm == np.bytes_(test.comm)
        return equal if test.relation is Relation.EQ else ~equal
    found = _source(test, hits) & np.uint64(test.mask)
    value = np.uint64(test.value)
    compare, is_signed = _COMPARE[test.relation]
    outcomes: Bools = compare(found.view(np.int64), value.view(np.int64)) if is_signed else compare(found, value)
    return outcomes


def _source(test: Test, hits: Hits) -> npt.NDArray[np.uint64]:
    match test.source:
        case Source.ARGUMENT:
            return hits.arguments[test.index].data.view(np.uint64)
        case Source.PID:
            return hits.pid.view(np.uint32).astype(np.uint64)
        case Source.TID:
            return hits.tid.view(np.uint32).astype(np.uint64)
        case _:
            raise ValueError(f"{test.source.name} is not known of hits in columns")
