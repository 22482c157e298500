"""Clauses that only add up, as aggregations that the kernel can compute.

    p:::a /arg1 > 9/ { @[copyinstr(arg0), pid] = count(); }     where arg1 > 9, by str(arg0, 255) and pid

A clause is lowered if all that it does is to assign to aggregations that no other clause but END's looks at, and if
what it needs means the same in both languages: arguments and fields as they are, and comparisons with constants. Two
clauses that take the time between probes are lowered together (pairs.py). The interpreter runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stapsdtd.aggregate.buckets import linear, log_linear
from stapsdtd.query.d.aggregates import Aggregate, increment_of
from stapsdtd.query.d.aggregations import Function
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.lower_expressions import Lowering, NotLoweredError, Sites
from stapsdtd.query.d.nodes import Aggregation, Assignment, Call, Clause, Expression, Statement, walk
from stapsdtd.query.d.pairs import Candidate, candidates
from stapsdtd.query.d.probes import Moment, meaning

_FUNCTIONS = {
    Function.COUNT: ("count",),
    Function.SUM: ("values", "sum"),
    Function.AVG: ("values", "sum"),
    Function.STDDEV: ("values", "sum"),
    Function.MIN: ("values", "min"),
    Function.MAX: ("values", "max"),
    Function.QUANTIZE: ("values", "quantize"),
}
_SQUARES = {"({0} * {0}) >> 32": 1 << 32, "({0} * {0}) & 4294967295": 1}
"""Two sums that do not exceed 64 bits, of squares of numbers of 32 bits, and what they are multiplied by."""
_MAX_OF_TIMES = 2
"""Each has a span of its own, and at a site four are possible, for all clients together."""


@dataclass(frozen=True, slots=True)
class Start:
    """Of the spans whose times are added up. where: as of Lowered. takes_latest: as of Span."""

    clause: Clause
    where: str
    takes_latest: bool


@dataclass(frozen=True, slots=True)
class Lowered:
    """What to aggregate for an assignment. where, value, by: expressions of the daemon's language.

    squares: by what the sum is to be multiplied, which is of squares; 0 if it is of the values themselves. start: None
    if hits are added up, rather than spans that the clause ends.
    """

    clause: Clause
    aggregation: str
    functions: tuple[str, ...]
    where: str
    value: str
    by: tuple[str, ...]
    squares: int = 0
    start: Start | None = None


@dataclass(slots=True)
class Plan:
    """What becomes of clauses, by `id`. lowered: nothing of a clause that is a start. reasons: why the interpreter runs
    the others.
    """

    lowered: dict[int, tuple[Lowered, ...]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def planned(checked: Checked, sites: Sites) -> Plan:
    """Return which clauses can be lowered, and to what."""
    plan, observed = Plan(), _observed(checked)
    if any(map(_exits, checked.program.clauses)):
        # the kernel would add up hits behind that one until the command has seen it
        return Plan(reasons=dict.fromkeys(map(id, checked.program.clauses), "a hit may call exit()"))
    for candidate in candidates(checked):
        try:
            parts = tuple(_of_times(checked, sites, candidate, observed))
            plan.lowered |= {id(candidate.start): (), id(candidate.end): parts}
        except NotLoweredError as error:
            plan.reasons |= dict.fromkeys((id(candidate.start), id(candidate.end)), str(error))
    for clause in checked.program.clauses:
        if id(clause) in plan.lowered or id(clause) in plan.reasons:
            continue
        try:
            plan.lowered[id(clause)] = tuple(_of_hits(checked, sites, clause, observed))
        except NotLoweredError as error:
            plan.reasons[id(clause)] = str(error)
    return plan


def _exits(clause: Clause) -> bool:
    """Report whether a clause of probes calls exit()."""
    return any(meaning(each) is None for each in clause.descriptions) and any(
        isinstance(node, Call) and node.name == "exit"
        for statement in clause.statements or ()
        for node, _ in walk(statement)
    )


def _observed(checked: Checked) -> frozenset[str]:
    """Return the aggregations that a clause looks at, or changes, while the program runs."""
    return frozenset(
        argument.name
        for clause in checked.program.clauses
        if any(meaning(each) is not Moment.END for each in clause.descriptions)
        for statement in clause.statements or ()
        for node, _ in walk(statement)
        if isinstance(node, Call)
        for argument in node.arguments
        if isinstance(argument, Aggregation)
    )


def _of_hits(checked: Checked, sites: Sites, clause: Clause, observed: frozenset[str]) -> Iterator[Lowered]:
    _check_probes(clause)
    if not clause.statements:
        raise NotLoweredError("it prints each hit")
    assignments = [_assignment(each, observed) for each in clause.statements]
    lowering = Lowering(checked, clause, sites)
    where = lowering.where(clause.predicate)
    for target, call in assignments:
        functions, by = _functions(checked.aggregates[target.name]), tuple(map(lowering.key, target.keys))
        value = _value(call, lowering.number)
        yield Lowered(clause, target.name, functions, where, value, by)
        if call.name == Function.STDDEV.value:
            lowering.number(call.arguments[0], 32)
            for square, factor in _SQUARES.items():
                yield Lowered(clause, target.name, functions, where, square.format(value), by, factor)


def _of_times(checked: Checked, sites: Sites, candidate: Candidate, observed: frozenset[str]) -> Iterator[Lowered]:
    _check_probes(candidate.start)
    _check_probes(candidate.end)
    pair = candidate.pair(checked, sites)
    if len(pair.assignments) > _MAX_OF_TIMES:
        raise NotLoweredError(f"it adds up times more than {_MAX_OF_TIMES} times")
    starting, ending = Lowering(checked, pair.start, sites), Lowering(checked, pair.end, sites)
    start = Start(pair.start, starting.where(pair.start_condition), pair.takes_latest)
    where = ending.where(pair.end_condition)
    for statement in pair.assignments:
        target, call = _assignment(statement, observed)
        if call.name == Function.STDDEV.value:
            raise NotLoweredError("squares of times have too many bits")
        functions, by = _functions(checked.aggregates[target.name]), tuple(map(ending.key, target.keys))
        yield Lowered(pair.end, target.name, functions, where, _value(call, pair.elapsed), by, start=start)


def _check_probes(clause: Clause) -> None:
    if any(meaning(each) is not None for each in clause.descriptions):
        raise NotLoweredError("it is not of static probes alone")


def _assignment(statement: Statement, observed: frozenset[str]) -> tuple[Aggregation, Call]:
    match statement:
        case Assignment(target=Aggregation(name) as target, value=Call() as call):
            if name in observed:
                raise NotLoweredError(f"@{name} is printed or changed while the program runs")
            if increment_of(call) is not None:
                raise NotLoweredError(f"{call.name}() counts each value more than once")
            return target, call
    raise NotLoweredError("it does more than add up")


def _value(call: Call, text_of: Callable[[Expression], str]) -> str:
    """Return what is added up; nothing for count()."""
    return "".join(map(text_of, call.arguments[:1]))


def _functions(aggregate: Aggregate) -> tuple[str, ...]:
    """Return what the server calls a function. Raises NotLoweredError if the server has not the same buckets."""
    function, scale, parameters = aggregate.function, aggregate.scale, aggregate.parameters
    if function in _FUNCTIONS or scale is None:
        return _FUNCTIONS[function]
    try:
        if function is Function.LQUANTIZE:
            low, following, high = scale.edges[0], scale.edges[1], scale.edges[-1]
            # a rest that is less than a step has no bin of its own
            parameters = low, high, following - low
            buckets = linear(*parameters)
        else:
            buckets = log_linear(*parameters)
    except ValueError:
        raise NotLoweredError("the server has not so many bins") from None
    if buckets.edges != scale.edges:
        raise NotLoweredError("the server has other bins")
    return "values", f"{function.value}({', '.join(map(str, parameters))})"
