"""Compile expressions for one site into programs that engines run at its hits.

What a program can have are integers, the thread's ids, command name and cgroup. Strings, bytes and floating-point
numbers are the daemon's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from stapsdtd.model import Argument, Site, Unavailable
from stapsdtd.query.emitter import Emitter, Exits, Next
from stapsdtd.query.expression import (
    STRING_FIELDS,
    And,
    ArgumentValue,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Condition,
    Conditional,
    Expression,
    Field,
    Literal,
    Not,
    Or,
    parts,
    walk,
)
from stapsdtd.query.needs import why_not_at
from stapsdtd.query.outcomes import ALL_BITS
from stapsdtd.query.program import ACCEPT, NO_WORD, REJECT, UNDECIDED, Operation, Program, Source, Test, in_order

MAX_TESTS = 64
"""Of comparisons with constants in a program."""

MAX_OPERATIONS = 32
"""Of what else a program may have."""

MAX_CGROUP_LEVEL = 255
"""Users can nest cgroups below those delegated to them; this is as deep as a test can look."""

MOST_STEPS = 4
"""That a program takes for one of these."""

NOT_INTEGER = "engines test and calculate integers, no strings, bytes or floating-point numbers"
TOO_LONG = f"engines do at most {MAX_OPERATIONS} operations for an expression"

_KEPT = 1 << 8
_SIZES = frozenset({1, 2, 4, 8})
_NUMBERS = frozenset(Field) - STRING_FIELDS


def is_testable(condition: Condition) -> bool:
    """Report whether a condition is one of integers, which programs can test if it is not too long."""
    return _is_integer(condition)


def untestable(whole: Iterable[Condition]) -> dict[Condition, str]:
    """Return which parts of a conjunction no program can test, whatever the site, and why."""
    left, reasons = MAX_OPERATIONS, dict[Condition, str]()
    for each in whole:
        if not is_testable(each):
            reasons[each] = NOT_INTEGER
        elif operations(each) > left:
            reasons[each] = TOO_LONG
        else:
            left -= operations(each)
    return reasons


def operations(expression: Expression) -> int:
    """Count what a program does for an expression besides comparisons with constants."""
    return sum(isinstance(each, Calculation | Compared | Conditional) for each in walk(expression))


@lru_cache(maxsize=_KEPT)
def _compiled(expression: Condition, arguments: tuple[Argument, ...]) -> Program | str:
    """Return a program, or why there is none.

    Kept, since clauses with the same filter, all sites with the same arguments, and each stage of arming ask for it.
    """
    if reason := _misfit(expression, arguments):
        return reason
    emitter = Emitter(arguments)
    program = in_order(emitter.tests, emitter.condition(expression, Exits(ACCEPT, REJECT, UNDECIDED)))
    limit = MAX_TESTS + MOST_STEPS * operations(expression)
    if len(program.tests) > limit:
        return f"the expression needs {len(program.tests)} tests here; the limit is {limit}"
    return program


def compile_for(expression: Condition, site: Site) -> Program:
    """Compile for one site's arguments. Raises ValueError with `why_not`'s reason if that is impossible.

    Comparisons that an argument's size and sign decide (a uint32 is never negative) are decided here, not tested.
    """
    match _compiled(expression, site.arguments):
        case Program() as program:
            return program
        case reason:
            raise ValueError(reason)


def why_not(expression: Condition, arguments: tuple[Argument, ...]) -> str | None:
    """Return why hits of sites with these arguments cannot be tested, for users; None if they can."""
    found = _compiled(expression, arguments)
    return found if isinstance(found, str) else None


def compile_numbers(expressions: Sequence[Expression], site: Site, first_word: int) -> Program:
    """Compile what puts each expression's number into a word, from first_word on, or notes that there is none.

    It always ends with ACCEPT. The expressions are some of which `why_not_calculated` says nothing.
    """
    emitter = Emitter(site.arguments, reads_all=True)
    then = ACCEPT
    for word in range(first_word + len(expressions) - 1, first_word - 1, -1):
        missing = emitter.emit(
            Test(Source.ZERO, 0, Operation.MISS, ALL_BITS, 0, bytes(16), then, then, then, NO_WORD, word)
        )
        then = emitter.number(expressions[word - first_word], word, Next(then, missing))
    return in_order(emitter.tests, then)


def is_unsigned(expression: Expression, site: Site) -> bool:
    """Report whether an expression's number at a site is unsigned, rather than signed."""
    return Emitter(site.arguments).is_unsigned(expression)


def why_not_calculated(expression: Expression, site: Site) -> str | None:
    """Return why a program cannot calculate an expression at a site's hits, or pairs that end there; None if it can."""
    if not _is_integer(expression):
        return NOT_INTEGER
    if operations(expression) > MAX_OPERATIONS:
        return TOO_LONG
    return why_not_at(expression, site.arguments) or _why_no_integers(expression, site.arguments)


def comparisons(expression: Expression) -> Iterator[Comparison]:
    """Yield an expression's comparisons with constants from left to right."""
    return (each for each in walk(expression) if isinstance(each, Comparison))


def _is_integer(expression: Expression) -> bool:
    """Report whether an expression is an integer, or a condition of integers."""
    match expression:
        case Literal(value):
            return isinstance(value, int)
        case Field():
            return expression in _NUMBERS
        case ArgumentValue() | Comparison():
            return True
        case Not() | And() | Or() | Conditional() | Compared() | Calculation():
            return all(map(_is_integer, parts(expression)))
        case _:
            return False


def _misfit(expression: Condition, arguments: tuple[Argument, ...]) -> str | None:
    if not is_testable(expression):
        return NOT_INTEGER
    if operations(expression) > MAX_OPERATIONS:
        return TOO_LONG
    for comparison in comparisons(expression):
        if reason := _misfit_of(comparison, arguments):
            return reason
    return why_not_at(expression, arguments) or _why_no_integers(expression, arguments)


def _misfit_of(comparison: Comparison, arguments: tuple[Argument, ...]) -> str | None:
    match comparison.value:
        case Cgroup(level=level) if level > MAX_CGROUP_LEVEL:
            return f"cannot filter by a cgroup {level} levels deep; the limit is {MAX_CGROUP_LEVEL}"
    if not isinstance(comparison.subject, ArgumentValue):
        return None
    index = comparison.subject.index
    if index >= len(arguments):
        return f"it has {len(arguments)} arguments, so there is no arg{index} to filter by"
    argument = arguments[index]
    if isinstance(argument.operand, Unavailable):
        return f"cannot filter by arg{index}: {argument.operand.reason}"
    if argument.is_float:
        return f"cannot filter by arg{index}: {argument.text} is a floating-point number"
    if argument.size not in _SIZES:
        return f"cannot filter by arg{index}: {argument.text} has {argument.size} bytes and is not an integer"
    return None


def _why_no_integers(expression: Expression, arguments: tuple[Argument, ...]) -> str | None:
    """Return which argument of an expression that can be evaluated at a site is no integer there."""
    for each in walk(expression):
        if isinstance(each, ArgumentValue) and arguments[each.index].is_float:
            return f"cannot filter by arg{each.index}: {arguments[each.index].text} is a floating-point number"
    return None
