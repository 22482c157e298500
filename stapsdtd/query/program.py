"""Compile an expression for one site into tests with forward jumps: short-circuit evaluation without a stack.

    arg0 > 100 && (pid == 7 || execname == "psql")

    0  arg0 > 100           true: 1       false: REJECT
    1  pid == 7             true: ACCEPT  false: 2
    2  execname == "psql"   true: ACCEPT  false: REJECT

Every jump leads to a later test, so that the kernel's verifier can prove termination. A test whose argument cannot be
read from the process's memory rejects the hit; one that is not reached does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from stapsdtd.model import Argument, Constant, Site, Unavailable
from stapsdtd.query.expression import (
    And,
    ArgumentValue,
    Cgroup,
    Comparison,
    Condition,
    Expression,
    Field,
    Not,
    Operator,
    Or,
    walk,
)

ACCEPT = 0xFFFF
REJECT = 0xFFFE
MAX_TESTS = 64
MAX_CGROUP_LEVEL = 255
"""Users can nest cgroups below those delegated to them; this is as deep as a test can look."""

_ALL_BITS = (1 << 64) - 1
_FIELD_BITS = (1 << 32) - 1
_COMM_BYTES = 16
_SIZES = frozenset({1, 2, 4, 8})


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


_SOURCES = {field: Source[field.name] for field in Field if field.name in Source.__members__}
_RELATIONS = {operator: Relation[operator.name] for operator in Operator}
_SIGNED_RELATIONS = {Relation[name]: Relation[f"SIGNED_{name}"] for name in ("LT", "LE", "GT", "GE")}
_COMPARE: dict[Operator, Callable[[int, int], bool]] = {
    Operator.EQ: operator.eq, Operator.NE: operator.ne, Operator.LT: operator.lt,
    Operator.LE: operator.le, Operator.GT: operator.gt, Operator.GE: operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Test:
    """(source & mask) relation value, all 64 bits wide, signed numbers in two's complement.

    index: an argument's, or the level of a cgroup, whose id is then the value. comm: for EXECNAME, NUL-padded to 16
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
    """start: the first test, or ACCEPT or REJECT if nothing needs to be tested."""

    tests: tuple[Test, ...]
    start: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """The indexes of the arguments that it reads, sorted, without duplicates."""
        return tuple(sorted({test.index for test in self.tests if test.source is Source.ARGUMENT}))


def is_testable(condition: Condition) -> bool:
    """Report whether a condition consists of comparisons with constants, which tests can express."""
    match condition:
        case Comparison():
            return True
        case Not(operand):
            return is_testable(operand)
        case And(operands) | Or(operands):
            return all(map(is_testable, operands))
        case _:
            return False


def compile_for(expression: Condition, site: Site) -> Program:
    """Compile for one site's arguments. Raises ValueError with `why_not`'s reason if that is impossible.

    Comparisons that an argument's size and sign decide (a uint32 is never negative) are decided here, not tested.
    """
    reason = _misfit(expression, site)
    if reason is not None:
        raise ValueError(reason)
    emitter = _Emitter(site)
    program = _reverse(emitter.tests, emitter.emit(expression, ACCEPT, REJECT))
    if len(program.tests) > MAX_TESTS:
        raise ValueError(f"the expression needs {len(program.tests)} tests here; the limit is {MAX_TESTS}")
    return program


def why_not(expression: Condition, site: Site) -> str | None:
    """Return why hits of a site cannot be tested, for users; None if they can."""
    try:
        compile_for(expression, site)
    except ValueError as error:
        return str(error)
    return None


def comparisons(expression: Expression) -> Iterator[Comparison]:
    """Yield an expression's comparisons with constants from left to right."""
    return (each for each in walk(expression) if isinstance(each, Comparison))


def _misfit(expression: Condition, site: Site) -> str | None:
    if not is_testable(expression):
        return "tests only compare arguments and fields with constants"
    for comparison in comparisons(expression):
        match comparison.value:
            case Cgroup(level=level) if level > MAX_CGROUP_LEVEL:
                return f"cannot filter by a cgroup {level} levels deep; the limit is {MAX_CGROUP_LEVEL}"
        if not isinstance(comparison.subject, ArgumentValue):
            continue
        index = comparison.subject.index
        if index >= len(site.arguments):
            return f"it has {len(site.arguments)} arguments, so there is no arg{index} to filter by"
        argument = site.arguments[index]
        if isinstance(argument.operand, Unavailable):
            return f"cannot filter by arg{index}: {argument.operand.reason}"
        if argument.is_float:
            return f"cannot filter by arg{index}: {argument.text} is a floating-point number"
        if argument.size not in _SIZES:
            return f"cannot filter by arg{index}: {argument.text} has {argument.size} bytes and is not an integer"
    return None


class _Emitter:
    """Emits tests from the last to the first, since each refers to later ones.

    A target is ACCEPT, REJECT or an index in `tests`, which is in order of emission.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.tests: list[Test] = []

    def emit(self, expression: Condition, on_true: int, on_false: int) -> int:
        """Emit an expression's tests and return the target at which its evaluation begins."""
        match expression:
            case Not(operand):
                return self.emit(operand, on_false, on_true)
            case And(operands):
                for operand in reversed(operands):
                    on_true = self.emit(operand, on_true, on_false)
                return on_true
            case Or(operands):
                for operand in reversed(operands):
                    on_false = self.emit(operand, on_true, on_false)
                return on_false
            case Comparison():
                return self._emit_comparison(expression, on_true, on_false)
            case _:
                raise TypeError(f"cannot compile {expression}")

    def _emit_comparison(self, comparison: Comparison, on_true: int, on_false: int) -> int:
        if on_true == on_false == REJECT:
            return REJECT
        source, index, relation, comm = Source.ARGUMENT, 0, _RELATIONS[comparison.operator], bytes(_COMM_BYTES)
        mask = _ALL_BITS if comparison.mask is None else comparison.mask
        match comparison.subject, comparison.value:
            case ArgumentValue(index), int(value):
                outcome = _outcome(comparison, value, *_range(self._site.arguments[index], comparison.mask))
                is_signed = self._site.arguments[index].signed and comparison.mask is None
                relation = _SIGNED_RELATIONS.get(relation, relation) if is_signed else relation
            case Field() as field, int(value):
                outcome = _outcome(comparison, value, 0, _FIELD_BITS & mask)
                source = _SOURCES[field]
            case Field() as field, bytes(name):
                outcome, source, value, comm = None, _SOURCES[field], 0, name.ljust(_COMM_BYTES, b"\0")
            case Field() as field, Cgroup() as cgroup:
                outcome, source, index, value = None, _SOURCES[field], cgroup.level, cgroup.id
            case _:
                raise TypeError(f"cannot compile {comparison}")
        if outcome is not None:
            return on_true if outcome else on_false
        self.tests.append(Test(source, index, relation, mask, value & _ALL_BITS, comm, on_true, on_false))
        return len(self.tests) - 1


def _range(argument: Argument, mask: int | None) -> tuple[int, int]:
    """Return the least and greatest values possible once the mask is applied."""
    bits = 8 * argument.size
    if isinstance(argument.operand, Constant):
        value = argument.operand.value % (1 << bits)
        if argument.signed and value >> (bits - 1):
            value -= 1 << bits
        value = value if mask is None else value & mask
        return value, value
    if mask is not None:
        # a negative number is sign-extended
        return 0, mask if argument.signed else mask & ((1 << bits) - 1)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if argument.signed else (0, (1 << bits) - 1)


def _outcome(comparison: Comparison, value: int, low: int, high: int) -> bool | None:
    """Return the comparison's result if it is the same for all numbers from low to high, else None."""
    if low == high:
        return _COMPARE[comparison.operator](low, value)
    match comparison.operator:
        case Operator.EQ | Operator.NE:
            impossible = not low <= value <= high or (comparison.mask is not None and bool(value & ~high))
            return comparison.operator is Operator.NE if impossible else None
        case _:
            # an ordering that holds, or fails, for both ends does so for all numbers between
            outcomes = {_COMPARE[comparison.operator](number, value) for number in (low, high)}
            return outcomes.pop() if len(outcomes) == 1 else None


def _reverse(emitted: list[Test], start: int) -> Program:
    """Reverse the order, so that jumps go forward, and drop the tests that no jump leads to."""
    reached = {start}
    for target in range(len(emitted) - 1, -1, -1):
        if target in reached:
            reached |= {emitted[target].on_true, emitted[target].on_false}
    order = [target for target in range(len(emitted) - 1, -1, -1) if target in reached]
    indexes = {target: index for index, target in enumerate(order)} | {ACCEPT: ACCEPT, REJECT: REJECT}
    tests = tuple(
        replace(emitted[target], on_true=indexes[emitted[target].on_true], on_false=indexes[emitted[target].on_false])
        for target in order
    )
    return Program(tests, indexes[start])
