"""Random expressions of every type, and what they mean for one event, told a second time in plain Python."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hypothesis import strategies as st

from stapsdtd.model import Capture, Site
from stapsdtd.query.expression import (
    And,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Compared,
    Condition,
    Conditional,
    Expression,
    Field,
    Literal,
    Matched,
    Not,
    Operator,
    Or,
    StringAt,
    Value,
)
from stapsdtd.query.needs import capture_of
from tests.unit.samples import argument, site

SITE = site(
    arguments=[
        argument(size=4, signed=True), argument(size=8), argument(size=4), argument(size=8, signed=True),
        argument(size=1), argument(size=2, signed=True),
    ]
)  # fmt: skip
EDGES = [edge + near for bits in (0, 7, 8, 31, 32, 63, 64) for edge in (1 << bits, -(1 << bits)) for near in (-1, 0, 1)]
TEXTS = st.sampled_from([b"", b"a", b"aa", b"psql", b"SELECT 1", b"*", b'\xff["\\']) | st.binary(max_size=4)
LITERAL_TEXTS = st.sampled_from([b"", b"a", b"psql", b"SELECT 1", b"\xff\"\\'"])
GLOBS = st.sampled_from([b"", b"*", b"a*", b"?", b"*L*", b"[a-p]*", b"\xff*", b"[*]", b"*\\*"])
Scalar = int | float | bytes | bool

_COMPARE: dict[Operator, Callable[[Scalar, Scalar], bool]] = {
    Operator.EQ: operator.eq, Operator.NE: operator.ne, Operator.LT: operator.lt,
    Operator.LE: operator.le, Operator.GT: operator.gt, Operator.GE: operator.ge,
}  # fmt: skip


def integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from([edge for edge in EDGES if low <= edge <= high]) | st.integers(low, high)


_NUMBER_LITERALS = st.one_of(
    st.integers(-3, 70), integers(64, signed=True), integers(64, signed=False)
).map(Literal)  # fmt: skip
_FIELDS = (Field.PID, Field.CPU, Field.TIMESTAMP)


def numbers(fields: Sequence[Field] = _FIELDS) -> st.SearchStrategy[Value]:
    """Numbers that are no constants."""
    leaves: st.SearchStrategy[Value] = st.builds(ArgumentValue, st.integers(0, len(SITE.arguments) - 1))
    return st.recursive(leaves | st.sampled_from(fields), _grown_numbers, max_leaves=6)


def _grown_numbers(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    either = inner | _NUMBER_LITERALS
    infix = st.sampled_from([how for how in Arithmetic if how is not Arithmetic.SWAP])
    calculations = st.builds(Calculation, infix, inner, either).filter(_is_accepted)
    calculations |= st.builds(Calculation, st.just(Arithmetic.SWAP), inner, st.sampled_from([48, 32, 0]).map(Literal))
    mirrored = st.builds(Calculation, infix, either, inner)
    compared = st.builds(Compared, st.sampled_from(Operator), inner, either)
    return st.one_of(calculations, mirrored, st.builds(Conditional, compared, inner, either))


def _is_accepted(calculation: Calculation) -> bool:
    """Whether it is no division by the constant 0, which the parser refuses."""
    divides = calculation.operator in {Arithmetic.DIVIDE, Arithmetic.REMAINDER}
    return not (divides and calculation.right == Literal(0))


def strings() -> st.SearchStrategy[Value]:
    at = st.builds(ArgumentValue, st.sampled_from([1, 3]))
    lengths = st.none() | st.integers(1, 8).map(Literal) | numbers()
    leaves: st.SearchStrategy[Value] = st.builds(StringAt, at, lengths) | st.sampled_from(
        [Field.EXECNAME, Field.PROVIDER, Field.NAME, Field.FUNCTION, Field.MODULE]
    )
    chosen = st.builds(Conditional, conditions(simple=True), leaves, leaves | LITERAL_TEXTS.map(Literal))
    return leaves | chosen


SIZES = st.integers(1, 4)


def buffers(sizes: st.SearchStrategy[int] = SIZES) -> st.SearchStrategy[Value]:
    leaves: st.SearchStrategy[Value] = st.builds(BytesAt, st.builds(ArgumentValue, st.sampled_from([1, 3])), sizes)
    return leaves | st.builds(Conditional, conditions(simple=True), leaves, leaves)


def of_one_size(size: int) -> st.SearchStrategy[Condition]:
    """Bytes compared with others of their size, since the parser refuses to compare them with those of another."""
    constants = st.binary(min_size=size, max_size=size).map(Literal)
    same = buffers(st.just(size))
    return st.builds(Compared, st.sampled_from([Operator.EQ, Operator.NE]), same, same | constants)


def conditions(*, simple: bool = False, fields: Sequence[Field] = _FIELDS) -> st.SearchStrategy[Condition]:
    leaves: st.SearchStrategy[Condition] = st.builds(
        Compared, st.sampled_from(Operator), numbers(fields), numbers(fields) | _NUMBER_LITERALS
    )
    if not simple:
        equal = st.sampled_from([Operator.EQ, Operator.NE])
        leaves |= st.builds(Compared, equal, strings(), strings() | LITERAL_TEXTS.map(Literal))
        leaves |= SIZES.flatmap(of_one_size)
        leaves |= st.builds(Matched, strings() | buffers(), GLOBS)

    def grown(inner: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(
            st.builds(Not, inner), several.map(And), several.map(Or), st.builds(Conditional, inner, inner, inner)
        )

    return st.recursive(leaves, grown, max_leaves=4)


class UnavailableError(Exception):
    """A value that the result needs is not there."""


@dataclass(frozen=True, slots=True)
class Row:
    """One event. values: of captures, None where unavailable."""

    pid: int
    cpu: int
    time_ns: int
    comm: bytes
    values: Mapping[Capture, Scalar | None]


def result(expression: Expression, at: Site, row: Row) -> Scalar | None:
    try:
        value = _of(expression, at, row)
    except UnavailableError:
        return None
    return value[0] if isinstance(value, tuple) else value


_Typed = tuple[int, bool]
"""An integer, and whether it is an unsigned one of 64 bits."""


def _of(expression: Expression, at: Site, row: Row) -> Scalar | _Typed:
    match expression:
        case Literal(value):
            return (value, value >= 1 << 63) if isinstance(value, int) else value
        case ArgumentValue(index):
            number = _known(row.values[Capture(index)])
            assert isinstance(number, int)
            return number, is_unsigned(expression, at)
        case StringAt(_, length):
            text = _known(row.values[capture_of(expression)])
            assert isinstance(text, bytes)
            if length is None or isinstance(length, Literal):
                return text
            return text[: max(_integer(length, at, row)[0], 0)]
        case BytesAt():
            return _known(row.values[capture_of(expression)])
        case Field():
            return _field(expression, at, row)
        case Calculation(how, left, right):
            return calculated(how, _integer(left, at, row), _integer(right, at, row))
        case Conditional(condition, then, otherwise):
            return _chosen(condition, then, otherwise, at, row)
        case Not(operand):
            return not _of(operand, at, row)
        case And(operands):
            return all(_of(each, at, row) for each in operands)
        case Or(operands):
            return any(_of(each, at, row) for each in operands)
        case Matched(subject, pattern):
            matched = _of(subject, at, row)
            assert isinstance(matched, bytes)
            return fnmatchcase(matched.decode("latin-1"), pattern.decode("latin-1"))
        case Compared(how, left, right):
            return _COMPARE[how](_plain(_of(left, at, row)), _plain(_of(right, at, row)))
        case _:
            raise TypeError(expression)


def _known(value: Scalar | None) -> Scalar:
    if value is None:
        raise UnavailableError
    return value


def _plain(value: Scalar | _Typed) -> Scalar:
    return value[0] if isinstance(value, tuple) else value


def _integer(value: Value, at: Site, row: Row) -> _Typed:
    found = _of(value, at, row)
    assert isinstance(found, tuple)
    return found


def _field(field: Field, at: Site, row: Row) -> bytes | _Typed:
    texts = {
        Field.EXECNAME: row.comm, Field.PROVIDER: at.provider.encode(), Field.NAME: at.name.encode(),
        Field.FUNCTION: b"", Field.MODULE: b"app",
    }  # fmt: skip
    numbers = {Field.PID: row.pid, Field.CPU: row.cpu, Field.TIMESTAMP: row.time_ns}
    return (numbers[field], False) if field in numbers else texts[field]


def _chosen(condition: Condition, then: Expression, otherwise: Expression, at: Site, row: Row) -> Scalar | _Typed:
    value = _of(then if _of(condition, at, row) else otherwise, at, row)
    if isinstance(value, tuple) and (is_unsigned(then, at) or is_unsigned(otherwise, at)):
        return value[0] % (1 << 64), True
    return value


def is_unsigned(value: Expression, at: Site) -> bool:
    """Whether a number is an unsigned one of 64 bits, whatever its value."""
    match value:
        case Literal(int(number)):
            return number >= 1 << 63
        case ArgumentValue(index):
            return at.arguments[index].size == 8 and not at.arguments[index].signed
        case Calculation(Arithmetic.AND | Arithmetic.OR | Arithmetic.XOR | Arithmetic.SWAP):
            return True
        case Calculation(Arithmetic.LEFT | Arithmetic.RIGHT, left):
            return is_unsigned(left, at)
        case Calculation(_, left, right) | Conditional(_, left, right):
            return is_unsigned(left, at) or is_unsigned(right, at)
        case _:
            return False


def calculated(how: Arithmetic, one: _Typed, other: _Typed) -> _Typed:
    """As in C with 64 bits that wrap around. Raises UnavailableError for a division by 0."""
    left, right = one[0], other[0]
    unsigned = one[1] or other[1]
    if how in {Arithmetic.LEFT, Arithmetic.RIGHT}:
        count = right % 64
        return _wrapped(left << count if how is Arithmetic.LEFT else left >> count, unsigned=one[1])
    if how in {Arithmetic.AND, Arithmetic.OR, Arithmetic.XOR}:
        bits = {Arithmetic.AND: operator.and_, Arithmetic.OR: operator.or_, Arithmetic.XOR: operator.xor}[how]
        return _wrapped(bits(left, right), unsigned=True)
    if how is Arithmetic.SWAP:
        number = left % (1 << 64)
        reverse = sum((number >> 8 * byte & 0xFF) << 8 * (7 - byte) for byte in range(8))
        return reverse >> right % 64, True
    if unsigned:
        left, right = left % (1 << 64), right % (1 << 64)
    match how:
        case Arithmetic.ADD:
            found = left + right
        case Arithmetic.SUBTRACT:
            found = left - right
        case Arithmetic.MULTIPLY:
            found = left * right
        case _:
            if right == 0:
                raise UnavailableError
            found = abs(left) // abs(right) * (1 if (left < 0) is (right < 0) else -1)
            if how is Arithmetic.REMAINDER:
                found = left - found * right
    return _wrapped(found, unsigned=unsigned)


def _wrapped(value: int, *, unsigned: bool) -> _Typed:
    value %= 1 << 64
    return (value, True) if unsigned else (value - (value >> 63 << 64), False)
