"""An expression for one site, as tests with forward jumps: short-circuit evaluation without a stack.

    arg0 > 100 && (pid == 7 || execname == "psql")

    0  arg0 > 100           true: 1       false: REJECT
    1  pid == 7             true: ACCEPT  false: 2
    2  execname == "psql"   true: ACCEPT  false: REJECT

Every jump leads to a later test, so that the kernel's verifier sees an end. A test whose argument cannot be read in the
process's memory rejects the hit; one that is not reached does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from stapsdtd.model import Argument, Constant, Site, Unavailable
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Expression, Field, Not, Operator, Or

ACCEPT = 0xFFFF
REJECT = 0xFFFE
MAX_TESTS = 64
MAX_CGROUP_LEVEL = 255
"""As deep as a test can look; users make cgroups of their own below those that they were given."""

_ALL_BITS = (1 << 64) - 1
_FIELD_BITS = (1 << 32) - 1
_COMM_BYTES = 16
_SIZES = frozenset({1, 2, 4, 8})


class Source(IntEnum):
    """What a test looks at; the numbers are those of bpf/stapsdt.h."""

    ARGUMENT = 0
    PID = 1
    TID = 2
    UID = 3
    GID = 4
    EXECNAME = 5
    CGROUP = 6
    OWNER = 7


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


_SOURCES = {field: Source[field.name] for field in Field}
_RELATIONS = {each: Relation[each.name] for each in Operator}
_SIGNED_RELATIONS = {Relation[name]: Relation[f"SIGNED_{name}"] for name in ("LT", "LE", "GT", "GE")}
_COMPARE: dict[Operator, Callable[[int, int], bool]] = {
    Operator.EQ: operator.eq, Operator.NE: operator.ne, Operator.LT: operator.lt,
    Operator.LE: operator.le, Operator.GT: operator.gt, Operator.GE: operator.ge,
}  # fmt: skip


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


def compile_for(expression: Expression, site: Site) -> Program:
    """Translate for one site's arguments; raise ValueError with what `why_not` says where that is not possible.

    What an argument's size and sign decide alone (a uint32 is never negative) is decided here, and is not tested.
    """
    reason = _misfit(expression, site)
    if reason is not None:
        raise ValueError(reason)
    emitter = _Emitter(site)
    program = _in_order(emitter.tests, emitter.emit(expression, ACCEPT, REJECT))
    if len(program.tests) > MAX_TESTS:
        raise ValueError(f"the expression takes {len(program.tests)} tests here, and {MAX_TESTS} are possible")
    return program


def why_not(expression: Expression, site: Site) -> str | None:
    """Answer why hits of a site cannot be tested, fit to be shown to a user; None where they can."""
    try:
        compile_for(expression, site)
    except ValueError as error:
        return str(error)
    return None


def comparisons(expression: Expression) -> Iterator[Comparison]:
    """All of an expression's comparisons, as they stand from left to right."""
    match expression:
        case Comparison():
            yield expression
        case Not(operand):
            yield from comparisons(operand)
        case And(operands) | Or(operands):
            for operand in operands:
                yield from comparisons(operand)


def _misfit(expression: Expression, site: Site) -> str | None:
    for comparison in comparisons(expression):
        match comparison.value:
            case Cgroup(level=level) if level > MAX_CGROUP_LEVEL:
                return f"a cgroup that lies {level} levels deep cannot be filtered by: {MAX_CGROUP_LEVEL} are possible"
        if not isinstance(comparison.subject, ArgumentValue):
            continue
        index = comparison.subject.index
        if index >= len(site.arguments):
            return f"it has {len(site.arguments)} arguments, so there is no arg{index} to filter by"
        argument = site.arguments[index]
        if isinstance(argument.operand, Unavailable):
            return f"arg{index} cannot be filtered by: {argument.operand.reason}"
        if argument.is_float:
            return f"arg{index} cannot be filtered by: {argument.text} is a floating-point number"
        if argument.size not in _SIZES:
            return f"arg{index} cannot be filtered by: {argument.text} has {argument.size} bytes, which is no integer"
    return None


class _Emitter:
    """Emits tests from the last to the first, since each names the ones behind it.

    A place is ACCEPT, REJECT or a position in `tests`, which has the order of emission.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.tests: list[Test] = []

    def emit(self, expression: Expression, on_true: int, on_false: int) -> int:
        """Answer the place where the evaluation of an expression begins."""
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
                raise TypeError(f"{comparison} compares what cannot be compared")
        if outcome is not None:
            return on_true if outcome else on_false
        self.tests.append(Test(source, index, relation, mask, value & _ALL_BITS, comm, on_true, on_false))
        return len(self.tests) - 1


def _range(argument: Argument, mask: int | None) -> tuple[int, int]:
    """The least and the greatest number that can be met, once the mask is applied."""
    bits = 8 * argument.size
    if isinstance(argument.operand, Constant):
        value = argument.operand.value % (1 << bits)
        if argument.signed and value >> (bits - 1):
            value -= 1 << bits
        value = value if mask is None else value & mask
        return value, value
    if mask is not None:
        # a negative number has all the bits above its own set
        return 0, mask if argument.signed else mask & ((1 << bits) - 1)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if argument.signed else (0, (1 << bits) - 1)


def _outcome(comparison: Comparison, value: int, low: int, high: int) -> bool | None:
    """What the comparison of any number from low to high comes to; None where that depends on the number."""
    if low == high:
        return _COMPARE[comparison.operator](low, value)
    match comparison.operator:
        case Operator.EQ | Operator.NE:
            impossible = not low <= value <= high or (comparison.mask is not None and bool(value & ~high))
            return comparison.operator is Operator.NE if impossible else None
        case _:
            # an order that holds, or fails, for both ends does so for all between
            outcomes = {_COMPARE[comparison.operator](number, value) for number in (low, high)}
            return outcomes.pop() if len(outcomes) == 1 else None


def _in_order(emitted: list[Test], start: int) -> Program:
    """Turn the order round, so that jumps go forward, and drop the tests that no jump leads to."""
    reached = {start}
    for place in range(len(emitted) - 1, -1, -1):
        if place in reached:
            reached |= {emitted[place].on_true, emitted[place].on_false}
    order = [place for place in range(len(emitted) - 1, -1, -1) if place in reached]
    numbers = {place: number for number, place in enumerate(order)} | {ACCEPT: ACCEPT, REJECT: REJECT}
    tests = tuple(
        replace(emitted[place], on_true=numbers[emitted[place].on_true], on_false=numbers[emitted[place].on_false])
        for place in order
    )
    return Program(tests, numbers[start])
