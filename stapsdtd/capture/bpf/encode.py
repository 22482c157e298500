"""Encodes filters and calculations as the program in bpf/stapsdt.bpf.c reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stapsdtd.capture.bpf.layout import JUMP_END, JUMP_EXCLUDE, LINK_BITS, PACKED_TEST
from stapsdtd.functions.chain import Link, LinkKind
from stapsdtd.query.program import ACCEPT, ENDS, REJECT, Program, Relation, Source, Test

_ALL_BITS = (1 << 64) - 1

_NO_USER = 1 << 32
"""Equals no process's owner, nor NOBODY."""


@dataclass(frozen=True, slots=True)
class LinkOf:
    """What hits have to be to a chain, by its number."""

    chain: int
    link: Link

    @property
    def is_tested_first(self) -> bool:
        """Report whether that is tested in front of the predicate, rather than behind it."""
        return self.link.kind is LinkKind.RETURNED

    @property
    def packed(self) -> int:
        return self.link.kind << LINK_BITS | self.link.position


@dataclass(frozen=True, slots=True)
class Filter:
    """Which of a site's hits a subscription wants.

    pids: None for all, empty for none. program: None for all. excluded: pids whose hits are not counted at all.
    owners: uids; hits of other users' processes are not counted at all; None for everybody's. followed: the number of a
    scope, if only the processes that it follows are wanted. link: what hits have to be to a chain.
    """

    pids: frozenset[int] | None
    excluded: frozenset[int]
    program: Program | None
    owners: frozenset[int] | None = None
    followed: int | None = None
    link: LinkOf | None = None

    @property
    def accepts_all(self) -> bool:
        is_open = self.pids is None and self.owners is None and self.followed is None and self.link is None
        return is_open and not self.excluded and (self.program is None or self.program.start == ACCEPT)

    @property
    def arguments(self) -> tuple[int, ...]:
        """Return the indexes of the arguments that it reads."""
        return self.decision.arguments

    @property
    def steps(self) -> int:
        """Return the largest number of tests that a hit can take."""
        owners = 0 if self.owners is None else max(len(self.owners), 1)
        scope = len(self.pids or ()) + (self.followed is not None)
        tests = owners + scope + len(self.excluded) + len(self.decision.tests) + (self.link is not None)
        return 0 if self.accepts_all else max(tests, 1)

    @property
    def decision(self) -> Program:
        """Return the program for hits in processes that are wanted."""
        if self.pids is not None and not self.pids:
            return Program((), REJECT)
        return self.program or Program((), ACCEPT)


def encode_filters(filters: Sequence[tuple[int, Filter]], operand_indexes: Mapping[int, int]) -> bytes:
    """Encode the tests of several filters, each with its bit, one after the other.

    operand_indexes: of arguments' operands among the plan's, by argument index.
    """
    read = {index for _, site_filter in filters for index in site_filter.arguments}
    return _encoded(tuple(filters), tuple((index, operand_indexes[index]) for index in sorted(read)))


@lru_cache(maxsize=1 << 8)
def _encoded(filters: tuple[tuple[int, Filter], ...], indexes: tuple[tuple[int, int], ...]) -> bytes:
    """Kept, since thousands of sites have the same filters."""
    operand_indexes = dict(indexes)
    rows = b""
    for position, (bit, site_filter) in enumerate(filters):
        first = len(rows) // PACKED_TEST.size
        tests = _filter(site_filter, first, operand_indexes)
        end = JUMP_END if position == len(filters) - 1 else first + len(tests)
        link = 0 if site_filter.link is None else site_filter.link.packed
        rows += b"".join(_packed(test, bit, jumps, end, link) for test, jumps in tests)
    return rows


@dataclass(frozen=True, slots=True)
class Calculations:
    """What is calculated of hits that a filter accepts, or tested of the pairs that these make.

    pairing: which of those at the site tells the time elapsed.
    """

    bit: int
    program: Program
    pairing: int = 0


def encode_calculations(each: Sequence[Calculations], first: int, operand_indexes: Mapping[int, int]) -> bytes:
    """Encode calculations, or tests of pairs, one after the other, which begin as a plan's test number first."""
    rows = b""
    for position, calculations in enumerate(each):
        bit, start = calculations.bit, first + 1
        behind = start + len(calculations.program.tests)
        end = JUMP_END if position == len(each) - 1 else behind
        begin = _ended(calculations.program.start, start), JUMP_END, JUMP_END
        rows += _packed(replace(_IS_MATCHED, index=bit), bit, begin, end)
        for test in calculations.program.tests:
            indexed = _indexed(test, operand_indexes)
            indexed = replace(indexed, index=calculations.pairing) if test.source is Source.ELAPSED else indexed
            jumps = (_ended(target, start) for target in (test.on_true, test.on_false, test.on_missing))
            rows += _packed(indexed, bit, tuple(jumps), end)
        first = behind
    return rows


def _packed(test: Test, bit: int, jumps: tuple[int, ...], end: int, link: int = 0) -> bytes:
    """jumps: on_true, on_false, on_missing. end: where the next filter begins. link: for Source.LINK."""
    head = test.mask, test.value, test.comm, test.source, test.index, test.relation, bit
    return PACKED_TEST.pack(*head, *jumps, end, test.right, test.result, test.uses_words, link)


def _ended(target: int, start: int) -> int:
    return JUMP_END if target == ACCEPT else _jump(target, start)


def _indexed(test: Test, operand_indexes: Mapping[int, int]) -> Test:
    return replace(test, index=operand_indexes[test.index]) if test.source is Source.ARGUMENT else test


_LinkedTest = tuple[Test, tuple[int, int, int]]
"""A test, and the indexes of the plan's tests that it jumps to when it is true, false or unavailable."""


def _filter(site_filter: Filter, first: int, operand_indexes: Mapping[int, int]) -> list[_LinkedTest]:
    """Lay out tests from index first on: excluded pids, the process's owner, the scope, then the predicate.

    A call goes on a chain if it satisfies the predicate. It comes off that first, whatever is required of its return.
    """
    program, link = site_filter.decision, site_filter.link
    excluded, processes = sorted(site_filter.excluded), [_is_pid(pid) for pid in sorted(site_filter.pids or ())]
    if site_filter.followed is not None:
        processes.append(_is_followed(site_filter.followed))
    owners = [] if site_filter.owners is None else sorted(site_filter.owners) or [_NO_USER]
    ownership = first + len(excluded)
    scope = ownership + len(owners)
    behind = scope + len(processes)
    predicate = behind + (link is not None and link.is_tested_first)
    accept = ACCEPT if link is None or link.is_tested_first else predicate + len(program.tests)

    def jump(target: int) -> int:
        return accept if target == ACCEPT else _jump(target, predicate)

    begin = behind if behind < predicate else jump(program.start)
    tests: list[_LinkedTest] = []
    for following, pid in enumerate(excluded, first + 1):
        tests.append((_is_pid(pid), (JUMP_EXCLUDE, begin if following == behind else following, REJECT)))
    for following, uid in enumerate(owners, ownership + 1):
        on_true = begin if scope == behind else scope
        tests.append((_is_owner(uid), (on_true, JUMP_EXCLUDE if following == scope else following, REJECT)))
    for following, test in enumerate(processes, scope + 1):
        tests.append((test, (begin, REJECT if following == behind else following, REJECT)))
    if link is not None and link.is_tested_first:
        tests.append((_is_link(link), (jump(program.start), REJECT, REJECT)))
    tests += [
        (_indexed(test, operand_indexes), (jump(test.on_true), jump(test.on_false), jump(test.on_missing)))
        for test in program.tests
    ]
    if link is not None and not link.is_tested_first:
        tests.append((_is_link(link), (ACCEPT, REJECT, REJECT)))
    return tests or [(_is_pid(0), (begin, begin, REJECT))]


def _jump(target: int, start: int) -> int:
    return target if target in ENDS else start + target


def _is_owner(uid: int) -> Test:
    return replace(_is_pid(uid), source=Source.OWNER)


def _is_followed(scope: int) -> Test:
    return replace(_is_pid(1), source=Source.FOLLOWED, index=scope)


def _is_link(link: LinkOf) -> Test:
    return replace(_is_pid(1), source=Source.LINK, index=link.chain)


def _is_pid(pid: int) -> Test:
    return Test(Source.PID, 0, Relation.EQ, _ALL_BITS, pid, bytes(16), ACCEPT, REJECT)


_IS_MATCHED = replace(_is_pid(1), source=Source.MATCHED)
