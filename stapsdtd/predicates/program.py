"""An expression for one site, as tests with forward jumps: short-circuit evaluation without a stack.

    arg0 > 100 && (pid == 7 || execname == "psql")

    0  arg0 > 100           true: 1       false: REJECT
    1  pid == 7             true: ACCEPT  false: 2
    2  execname == "psql"   true: ACCEPT  false: REJECT

Every jump leads to a later test, so that the kernel's verifier sees an end. A test whose argument cannot be read in the
process's memory rejects the hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ACCEPT = 0xFFFF
REJECT = 0xFFFE
MAX_TESTS = 64


class Source(IntEnum):
    """What a test looks at; the numbers are those of bpf/stapsdt.h."""

    ARGUMENT = 0
    PID = 1
    TID = 2
    UID = 3
    GID = 4
    EXECNAME = 5
    CGROUP = 6


class Relation(IntEnum):
    """How it compares, unsigned but for the last four; the numbers are those of bpf/stapsdt.h."""

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


@dataclass(frozen=True, slots=True)
class Test:
    """(source & mask) relation value, all of 64 bits, signed numbers in two's complement.

    index: the argument's, or the level of a cgroup, whose id is then the value. comm: EXECNAME's, NUL-padded to 16
    bytes. on_true, on_false: the next test, ACCEPT or REJECT.
    """

    source: Source
    index: int
    relation: Relation
    mask: int
    value: int
    comm: bytes
    on_true: int
    on_false: int


@dataclass(frozen=True, slots=True)
class Program:
    """start: where evaluation begins, ACCEPT or REJECT where nothing needs to be tested."""

    tests: tuple[Test, ...]
    start: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """Which arguments it reads, each once, in rising order."""
        return tuple(sorted({test.index for test in self.tests if test.source is Source.ARGUMENT}))
