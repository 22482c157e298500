"""Emits the tests of a condition, and the calculations of numbers, for the arguments of one site.

From the last to the first, since each refers to later ones. A target is ACCEPT, REJECT or an index in `Emitter.tests`,
which is in order of emission. A number is calculated in a word, and what it is made of in that one and those behind it.
"""

from __future__ import annotations

from typing import NamedTuple

from stapsdtd.model import Argument
from stapsdtd.query.expression import (
    BITWISE,
    UNSIGNED,
    And,
    ArgumentValue,
    Arithmetic,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Conditional,
    Expression,
    Field,
    Literal,
    Not,
    Operator,
    Or,
    Value,
)
from stapsdtd.query.outcomes import ALL_BITS, outcome
from stapsdtd.query.program import NO_WORD, REJECT, UNDECIDED, Operation, Relation, Source, Test

_COMM_BYTES = 16
_NO_COMM = bytes(_COMM_BYTES)
_SOURCES = {field: Source[field.name] for field in Field if field.name in Source.__members__}
_RELATIONS = {operator: Relation[operator.name] for operator in Operator}
_SIGNED_RELATIONS = {Relation[name]: Relation[f"SIGNED_{name}"] for name in ("LT", "LE", "GT", "GE")}
_OPERATIONS = {how: Operation[how.name] for how in Arithmetic}
_SIGNED_OPERATIONS = {Operation[name]: Operation[f"SIGNED_{name}"] for name in ("DIVIDE", "REMAINDER", "RIGHT")}
_COMMUTATIVE = BITWISE | {Arithmetic.ADD, Arithmetic.MULTIPLY}
_SHIFTS = frozenset({Arithmetic.LEFT, Arithmetic.RIGHT})
_LESS = frozenset({Operator.LT, Operator.LE, Operator.NE})
_GREATER = frozenset({Operator.GT, Operator.GE, Operator.NE})


class Exits(NamedTuple):
    """Where to go on when a condition is true, false, or unavailable."""

    true: int
    false: int
    missing: int

    def of(self, result: bool) -> int:
        return self.true if result else self.false


class Next(NamedTuple):
    """Where to go on when a number has been calculated, and when it is unavailable."""

    then: int
    missing: int


class _Left(NamedTuple):
    source: Source
    number: int = 0


class _Right(NamedTuple):
    """A constant, or a word."""

    value: int
    word: int = NO_WORD


class Emitter:
    def __init__(self, arguments: tuple[Argument, ...], *, reads_all: bool = False) -> None:
        """reads_all: a comparison whose outcome is known is unavailable nevertheless if its argument is."""
        self._arguments = arguments
        self._reads_all = reads_all
        self.tests: list[Test] = []

    def emit(self, test: Test) -> int:
        self.tests.append(test)
        return len(self.tests) - 1

    def condition(self, condition: Expression, exits: Exits, word: int = 0) -> int:
        """Emit a condition's tests, and return the target at which its evaluation begins. word: the first to use."""
        match condition:
            case Not(operand):
                return self.condition(operand, Exits(exits.false, exits.true, exits.missing), word)
            case And(operands):
                for operand in reversed(operands):
                    exits = exits._replace(true=self.condition(operand, exits, word))
                return exits.true
            case Or(operands):
                for operand in reversed(operands):
                    exits = exits._replace(false=self.condition(operand, exits, word))
                return exits.false
            case Conditional(which, then, otherwise):
                chosen = self.condition(then, exits, word), self.condition(otherwise, exits, word)
                return self.condition(which, Exits(*chosen, exits.missing), word)
            case Comparison():
                return self._comparison(condition, exits)
            case Compared(how, left, right):
                return self._compared(how, left, right, exits, word)
            case _:
                raise TypeError(f"cannot compile {condition}")

    def number(self, value: Expression, word: int, following: Next) -> int:
        """Emit what puts a number into a word, 1 or 0 for a condition. Return the target at which that begins."""
        match value:
            case Literal(int(number)):
                return self._calculate(Operation.ADD, _Left(Source.ZERO), _Right(number), word, following)
            case ArgumentValue() | Field():
                return self._calculate(Operation.ADD, _left(value, word), _Right(0), word, following)
            case Calculation(how, Literal() as left, right) if how in _COMMUTATIVE and not isinstance(right, Literal):
                return self.number(Calculation(how, right, left), word, following)
            case Calculation(how, left, right):
                operation = _OPERATIONS[how]
                is_signed = not self.is_unsigned(left if how in _SHIFTS else value)
                operation = _SIGNED_OPERATIONS.get(operation, operation) if is_signed else operation
                last = self._calculate(operation, *_sides(left, right, word), word, following)
                return self._sides(left, right, word, following._replace(then=last))
            case Conditional(which, one, other):
                then, otherwise = self.number(one, word, following), self.number(other, word, following)
                return self.condition(which, Exits(then, otherwise, following.missing), word)
            case _:
                true, false = (self.number(Literal(result), word, following) for result in (1, 0))
                return self.condition(value, Exits(true, false, following.missing), word)

    def is_unsigned(self, value: Expression) -> bool:
        """Report whether a number is an unsigned one of 64 bits, as `query.numbers` has it. All others are signed."""
        match value:
            case Literal(int(number)):
                return number >= 1 << 63
            case ArgumentValue(index):
                return not self._arguments[index].signed and self._arguments[index].size == 8
            case Calculation(how, left, right):
                if how in _SHIFTS:
                    return self.is_unsigned(left)
                return how in UNSIGNED or self.is_unsigned(left) or self.is_unsigned(right)
            case Conditional(_, then, otherwise):
                return self.is_unsigned(then) or self.is_unsigned(otherwise)
            case _:
                return False

    def _calculate(self, how: Operation, left: _Left, right: _Right, word: int, following: Next) -> int:
        then, missing = following
        value = right.value & ALL_BITS
        return self.emit(
            Test(left.source, left.number, how, ALL_BITS, value, _NO_COMM, then, then, missing, right.word, word)
        )

    def _sides(self, left: Value, right: Value, word: int, following: Next) -> int:
        """Emit what calculates the sides that need it."""
        one, other = _sides(left, right, word)
        if other.word != NO_WORD:
            following = following._replace(then=self.number(right, other.word, following))
        return self.number(left, word, following) if one.source is Source.WORD else following.then

    def _compared(self, how: Operator, left: Value, right: Value, exits: Exits, word: int) -> int:
        one, other = _sides(left, right, word)
        relation, signs = _RELATIONS[how], (self.is_unsigned(left), self.is_unsigned(right))
        if not any(signs):
            relation = _SIGNED_RELATIONS.get(relation, relation)
        value = other.value & ALL_BITS
        then = self.emit(Test(one.source, one.number, relation, ALL_BITS, value, _NO_COMM, *exits, other.word))
        # a number below 0 is less than any unsigned one
        if signs == (False, True):
            then = self._if_negative(one, exits.of(how in _LESS), then, exits.missing)
        elif signs == (True, False) and other.word != NO_WORD:
            known = self._if_known(one, exits.of(how in _GREATER), exits.missing)
            then = self._if_negative(_Left(Source.WORD, other.word), known, then, exits.missing)
        elif signs == (True, False) and other.value < 0:
            then = self._if_known(one, exits.of(how in _GREATER), exits.missing)
        return self._sides(left, right, word, Next(then, exits.missing))

    def _if_known(self, side: _Left, then: int, missing: int) -> int:
        if _is_alike(then, missing):
            return then
        return self.emit(Test(side.source, side.number, Relation.EQ, 0, 0, _NO_COMM, then, then, missing))

    def _if_negative(self, side: _Left, then: int, otherwise: int, missing: int) -> int:
        return self.emit(
            Test(side.source, side.number, Relation.SIGNED_LT, ALL_BITS, 0, _NO_COMM, then, otherwise, missing)
        )

    def _comparison(self, comparison: Comparison, exits: Exits) -> int:
        if exits.true == exits.false and _is_alike(exits.true, exits.missing):
            return exits.true
        source, index, comm = Source.ARGUMENT, 0, _NO_COMM
        relation = _RELATIONS[comparison.operator]
        mask = ALL_BITS if comparison.mask is None else comparison.mask
        match comparison.subject, comparison.value:
            case ArgumentValue(index), int(value):
                is_signed = self._arguments[index].signed and comparison.mask is None
                relation = _SIGNED_RELATIONS.get(relation, relation) if is_signed else relation
            case Field() as field, int(value):
                source = _SOURCES[field]
            case Field() as field, bytes(name):
                source, value, comm = _SOURCES[field], 0, name.ljust(_COMM_BYTES, b"\0")
            case Field() as field, Cgroup() as cgroup:
                source, index, value = _SOURCES[field], cgroup.level, cgroup.id
            case _:
                raise TypeError(f"cannot compile {comparison}")
        if (known := outcome(comparison, self._arguments)) is not None:
            if not self._reads_all:
                return exits.of(known)
            exits = exits._replace(true=exits.of(known), false=exits.of(known))
        return self.emit(Test(source, index, relation, mask, value & ALL_BITS, comm, *exits))


def _is_alike(then: int, missing: int) -> bool:
    """Report whether nobody needs to know if a value is unavailable."""
    return missing in {then, UNDECIDED if then == REJECT else then}


def _left(value: Value, word: int) -> _Left:
    """Return where a left side is found: an argument or a field, where it is, and what is calculated, in a word."""
    match value:
        case ArgumentValue(index):
            return _Left(Source.ARGUMENT, index)
        case Field():
            return _Left(_SOURCES[value])
        case _:
            return _Left(Source.WORD, word)


def _sides(left: Value, right: Value, word: int) -> tuple[_Left, _Right]:
    """Return where both sides are found, of which what is no constant on the right is in a word."""
    one = _left(left, word)
    if isinstance(right, Literal) and isinstance(right.value, int):
        return one, _Right(right.value)
    return one, _Right(0, word + (one.source is Source.WORD))
