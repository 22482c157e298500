"""Values and tests as the program in bpf/stapsdt.bpf.c reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stapsdtd.arch import ARCHITECTURES, word_bytes
from stapsdtd.capture.bpf.layout import JUMP_END, JUMP_EXCLUDE, OperandKind, Take
from stapsdtd.model import Address, Argument, Constant, Memory, Register, Unavailable
from stapsdtd.plan.values import Value
from stapsdtd.query.program import ACCEPT, REJECT, Program, Relation, Source, Test

_OPERAND = struct.Struct("=QI10B2x")
_TEST = struct.Struct("=QQ16s4BHHH6x")
"""As layout.OPERAND and layout.TEST; packing a row takes a tenth of filling one of numpy's."""

_ZERO = 0xFF
"""Any place beyond the registers reads as 0."""

_NO_USER = 1 << 32
"""What no process's owner is, nor NOBODY."""

_BITS = 64
_MOST_SCALE = 255


class NotEncodableError(ValueError):
    """An operand that the program cannot fetch; its text says why."""


def encode_value(value: Value, argument: Argument, architecture: str) -> bytes:
    """Raises NotEncodableError."""
    unused = _BITS - 8 * argument.size
    base = index = _ZERO
    scale = 1
    kind, constant, width, left, right = OperandKind.CONSTANT, 0, 0, 0, 0
    is_raw = value.is_text and not value.is_string
    match argument.operand:
        case Constant(number):
            constant = number % (1 << _BITS)
        case Register(name, first_bit):
            kind, base, left, right = OperandKind.REGISTER, _register(name, architecture), unused - first_bit, unused
        case Memory(base_name, displacement, index_name, scale):
            base, index = _register(base_name, architecture), _register(index_name, architecture)
            if scale > _MOST_SCALE:
                raise NotEncodableError(f"an index times {scale} is more than is added")
            constant = displacement % (1 << _BITS)
            if is_raw:
                kind = OperandKind.ADDRESS
            else:
                kind, width, left, right = OperandKind.MEMORY, argument.size, unused, unused
        case Address(base_name, displacement):
            kind, base, constant = OperandKind.ADDRESS, _register(base_name, architecture), displacement % (1 << _BITS)
            left, right = unused, unused
        case Unavailable(reason):
            raise NotEncodableError(reason)
    take = Take.STRING if value.is_string else Take.BYTES if is_raw else Take.NUMBER
    limit = value.limit + value.is_string
    is_signed = argument.signed and not argument.is_float
    is_narrow = word_bytes(architecture) == 4
    return _OPERAND.pack(constant, limit, take, kind, base, index, scale, width, left, right, is_signed, is_narrow)


def encode_abs_ip(architecture: str) -> bytes:
    """Return the operand whose value is the instruction's address."""
    place = _register(ARCHITECTURES[architecture].program_counter, architecture)
    return _OPERAND.pack(0, 0, Take.NUMBER, OperandKind.REGISTER, place, _ZERO, 1, 0, 0, 0, 0, 0)


def _register(name: str | None, architecture: str) -> int:
    if name is None:
        return _ZERO
    known = ARCHITECTURES.get(architecture)
    place = known.pt_regs.get(name) if known else None
    if place is None:
        raise NotEncodableError(f"%{name} is no register of {architecture} that the kernel saves at a probe")
    return place


@dataclass(frozen=True, slots=True)
class Filter:
    """What a subscription wants of a site's hits, beyond which processes are armed.

    pids: None for all, and nobody where it is empty. program: None for all. excluded: processes whose hits are as if
    they had never been; owners: users of whose processes that is not so, None for all.
    """

    pids: frozenset[int] | None
    excluded: frozenset[int]
    program: Program | None
    owners: frozenset[int] | None = None

    @property
    def accepts_all(self) -> bool:
        is_open = self.pids is None and self.owners is None and not self.excluded
        return is_open and (self.program is None or self.program.start == ACCEPT)

    @property
    def arguments(self) -> tuple[int, ...]:
        """Which arguments it reads."""
        return self.decision.arguments

    @property
    def steps(self) -> int:
        """Return how many tests it takes at most."""
        owners = 0 if self.owners is None else max(len(self.owners), 1)
        tests = owners + len(self.pids or ()) + len(self.excluded) + len(self.decision.tests)
        return 0 if self.accepts_all else max(tests, 1)

    @property
    def decision(self) -> Program:
        """What is asked of a hit in a process that is wanted."""
        if self.pids is not None and not self.pids:
            return Program((), REJECT)
        return self.program or Program((), ACCEPT)


def encode_filters(filters: Sequence[tuple[int, Filter]], places: Mapping[int, int]) -> bytes:
    """Lay out the tests of several filters, each with its bit, one behind the other.

    places: where an argument's operand is among the plan's.
    """
    rows = b""
    for number, (bit, wanted) in enumerate(filters):
        first = len(rows) // _TEST.size
        tests = _filter(wanted, first, places)
        end = JUMP_END if number == len(filters) - 1 else first + len(tests)
        rows += b"".join(
            _TEST.pack(each.mask, each.value, each.comm, each.source, each.index, each.relation, bit, *jumps, end)
            for each, jumps in tests
        )
    return rows


_Placed = tuple[Test, tuple[int, int]]
"""A test, and where it jumps to among the plan's tests when it is true and when it is false."""


def _filter(wanted: Filter, first: int, places: Mapping[int, int]) -> list[_Placed]:
    """Exclusions, then whose process it is, then the scope, then the predicate; each begins behind the one before."""
    program = wanted.decision
    excluded, pids = sorted(wanted.excluded), sorted(wanted.pids or ())
    owners = [] if wanted.owners is None else sorted(wanted.owners) or [_NO_USER]
    ownership = first + len(excluded)
    scope = ownership + len(owners)
    predicate = scope + len(pids)
    begin = _jump(program.start, predicate)
    tests: list[_Placed] = []
    for number, pid in enumerate(excluded, first + 1):
        tests.append((_is_pid(pid), (JUMP_EXCLUDE, begin if number == predicate else number)))
    for number, uid in enumerate(owners, ownership + 1):
        tests.append(
            (_is_owner(uid), (begin if scope == predicate else scope, JUMP_EXCLUDE if number == scope else number))
        )
    for number, pid in enumerate(pids, scope + 1):
        tests.append((_is_pid(pid), (begin, REJECT if number == predicate else number)))
    for test in program.tests:
        index = places[test.index] if test.source is Source.ARGUMENT else test.index
        jumps = _jump(test.on_true, predicate), _jump(test.on_false, predicate)
        tests.append((replace(test, index=index), jumps))
    return tests or [(_is_pid(0), (begin, begin))]


def _jump(target: int, start: int) -> int:
    return target if target in {ACCEPT, REJECT} else start + target


def _is_owner(uid: int) -> Test:
    return replace(_is_pid(uid), source=Source.OWNER)


def _is_pid(pid: int) -> Test:
    return Test(Source.PID, 0, Relation.EQ, (1 << _BITS) - 1, pid, bytes(16), ACCEPT, REJECT)
