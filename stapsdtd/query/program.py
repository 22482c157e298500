"""Programs for hits: tests with forward jumps, and calculations. Short-circuit evaluation without a stack.

    arg0 > 100 && (pid == 7 || arg1 - 1 == arg2 * 4)

    0  arg0 > 100           true: 1       false: REJECT
    1  pid == 7             true: ACCEPT  false: 2
    2  word 0 = arg1 - 1    next: 3
    3  word 1 = arg2 * 4    next: 4
    4  word 0 == word 1     true: ACCEPT  false: REJECT

Every jump leads to a later test, so that the kernel's verifier can prove termination. A test whose argument cannot be
read from the process's memory leaves the hit undecided, as a division by 0 does; one that is not reached does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

ACCEPT = 0xFFFF
REJECT = 0xFFFE
UNDECIDED = 0xFFFA
"""Rejects a hit of which the outcome is not known."""
ENDS = frozenset({ACCEPT, REJECT, UNDECIDED})
NO_WORD = 0xFF


class Source(IntEnum):
    """What a test examines; the values are those of bpf/stapsdt.h."""

    ARGUMENT = 0
    PID = 1
    TID = 2
    UID = 3
    GID = 4
    EXECNAME = 5
    CGROUP = 6
    OWNER = 7
    FOLLOWED = 8
    WORD = 9
    ZERO = 10
    CPU = 11
    TIMESTAMP = 12
    ELAPSED = 13
    MATCHED = 14
    LINK = 15


class Relation(IntEnum):
    """How a test compares, unsigned except for the last four; the values are those of bpf/stapsdt.h."""

    EQ = 0
    NE = 1
    LT = 2
    LE = 3
    GT = 4
    GE = 5
    SIGNED_LT = 6
    SIGNED_LE = 7
    SIGNED_GT = 8
    SIGNED_GE = 9


class Operation(IntEnum):
    """What is calculated in place of a test; the values are those of bpf/stapsdt.h.

    MISS notes that there is no result.
    """

    ADD = 16
    SUBTRACT = 17
    MULTIPLY = 18
    DIVIDE = 19
    REMAINDER = 20
    AND = 21
    OR = 22
    XOR = 23
    LEFT = 24
    RIGHT = 25
    SIGNED_DIVIDE = 26
    SIGNED_REMAINDER = 27
    SIGNED_RIGHT = 28
    MISS = 29
    SWAP = 30


_DIVIDING = frozenset({Operation.DIVIDE, Operation.REMAINDER, Operation.SIGNED_DIVIDE, Operation.SIGNED_REMAINDER})


@dataclass(frozen=True, slots=True)
class Test:
    """(source & mask) relation value, all 64 bits wide, signed numbers in two's complement.

    index: an argument's, a word's, or the level of a cgroup, whose id is then the value. comm: for EXECNAME, NUL-padded
    to 16 bytes. on_true, on_false: the next test, ACCEPT or REJECT. on_missing: the same, if the source cannot be read.
    right: the word that stands in the value's place, if not NO_WORD.

    With an Operation, the word `result` becomes what is calculated of both sides. on_true is next then; on_missing
    after a division by 0.
    """

    source: Source
    index: int
    relation: Relation | Operation
    mask: int
    value: int
    comm: bytes
    on_true: int
    on_false: int
    on_missing: int = UNDECIDED
    right: int = NO_WORD
    result: int = NO_WORD

    @property
    def may_be_undecided(self) -> bool:
        """Report whether what it needs may be missing, and the hit is undecided then."""
        return self.on_missing == UNDECIDED and (self.source is Source.ARGUMENT or self.relation in _DIVIDING)

    @property
    def uses_words(self) -> bool:
        """Report whether it takes space where numbers are calculated."""
        return self.source is Source.WORD or self.right != NO_WORD or isinstance(self.relation, Operation)


@dataclass(frozen=True, slots=True)
class Program:
    """start: the first test, ACCEPT or REJECT.

    Its hash is computed once, since a plan is made for each of thousands of sites that have the same program.
    """

    tests: tuple[Test, ...]
    start: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.tests, self.start)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def arguments(self) -> tuple[int, ...]:
        """The indexes of the arguments that it reads, sorted, without duplicates."""
        return tuple(sorted({test.index for test in self.tests if test.source is Source.ARGUMENT}))

    @property
    def words(self) -> int:
        """How many words there have to be."""
        return max((test.result + 1 for test in self.tests if test.result != NO_WORD), default=0)

    @property
    def may_be_undecided(self) -> bool:
        return any(test.may_be_undecided for test in self.tests)

    @property
    def uses_words(self) -> bool:
        return any(test.uses_words for test in self.tests)


def in_order(emitted: list[Test], start: int) -> Program:
    """Return the program of tests that were emitted from the last to the first, without those that no jump leads to.

    start, and what they jump to: ACCEPT, REJECT or an index in `emitted`.
    """
    reached = {start}
    for target in range(len(emitted) - 1, -1, -1):
        if target in reached:
            reached |= {emitted[target].on_true, emitted[target].on_false, emitted[target].on_missing}
    order = [target for target in range(len(emitted) - 1, -1, -1) if target in reached]
    indexes = {target: index for index, target in enumerate(order)} | {target: target for target in ENDS}

    def jumping(test: Test) -> Test:
        on_true, on_false, on_missing = indexes[test.on_true], indexes[test.on_false], indexes[test.on_missing]
        return replace(test, on_true=on_true, on_false=on_false, on_missing=on_missing)

    return Program(tuple(jumping(emitted[target]) for target in order), indexes[start])
