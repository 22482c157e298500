"""Run the clauses of a checked program, hit by hit, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from stapsdtd.query.d.aggregates import increment_of
from stapsdtd.query.d.aggregations import MAX_ROWS, Aggregation
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.evaluate import Compiler, Evaluate
from stapsdtd.query.d.functions import ACTIONS
from stapsdtd.query.d.machine import Exit, Fault, Frame, Hit, Variables
from stapsdtd.query.d.nodes import Aggregation as AggregationNode
from stapsdtd.query.d.nodes import Assignment, Branch, Call, Clause, Statement
from stapsdtd.query.d.print_aggregations import Sorting, printed, remaining
from stapsdtd.query.d.records import Records

_Run = Callable[[Frame], None]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """prints: whether running it begins a record."""

    predicate: Evaluate | None
    run: Sequence[_Run]
    prints: bool


@dataclass(slots=True)
class Program:
    """A program that runs. tell_fault: called with a hit, and why its clause ended.

    exit_status: None until exit() was called.
    """

    checked: Checked
    records: Records
    sorting: Sorting
    tell_fault: Callable[[Hit, str], None]
    max_rows: int = MAX_ROWS
    variables: Variables = field(default_factory=Variables)
    exit_status: int | None = None
    aggregations: dict[str, Aggregation] = field(init=False)
    _clauses: dict[int, _Compiled] = field(init=False)

    def __post_init__(self) -> None:
        self.aggregations = {
            name: aggregate.empty(name, self.max_rows) for name, aggregate in self.checked.aggregates.items()
        }
        builder = _Builder(self)
        self._clauses = {id(clause): builder.clause(clause) for clause in self.checked.program.clauses}

    def run(self, clauses: Iterable[Clause], hit: Hit, *, is_end: bool = False) -> bool:
        """Run all clauses of one hit, which share its this-> variables, until one calls exit(), which ends its clause.

        is_end: run the other clauses all the same. Return whether exit() was called: then give no hit but END's.
        """
        frame = Frame(hit, self.variables, self.aggregations)
        self.variables.of_hit.clear()
        for clause in clauses:
            self._run(self._clauses[id(clause)], frame)
            if frame.has_exited and not is_end:
                break
        return frame.has_exited

    def _run(self, compiled: _Compiled, frame: Frame) -> None:
        hit, has_begun = frame.hit, False
        try:
            if compiled.predicate is not None and not compiled.predicate(frame):
                return
            if compiled.prints:
                self.records.start(hit.cpu, hit.probe_id, hit.function, hit.name)
                has_begun = True
            for step in compiled.run:
                step(frame)
        except Fault as fault:
            self.records.discard()
            self.tell_fault(hit, str(fault))
            return
        except Exit:
            frame.has_exited = True
        if has_begun:
            self.records.end()

    def finish(self) -> None:
        """Print the aggregations that the program has not printed."""
        self.records.text("\n" + remaining(self.aggregations.values(), self.sorting))


class _Builder:
    """Turns clauses into functions."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._compiler = Compiler(program.checked)

    def clause(self, clause: Clause) -> _Compiled:
        predicate = None if clause.predicate is None else self._compiler.compiled(clause.predicate)
        statements = clause.statements or ()
        return _Compiled(predicate, [self._statement(each) for each in statements], prints_record(clause))

    def _statement(self, statement: Statement) -> _Run:
        match statement:
            case Branch(condition, then, otherwise):
                which = self._compiler.compiled(condition)
                first, second = [self._statement(each) for each in then], [self._statement(each) for each in otherwise]

                def branch(frame: Frame) -> None:
                    for step in first if which(frame) else second:
                        step(frame)

                return branch
            case Assignment(target=AggregationNode() as target, value=Call() as call):
                return self._aggregate(target, call)
            case Call(name) if name in ACTIONS:
                return self._action(statement)
            case _:
                evaluate = self._compiler.compiled(statement)

                def ignore(frame: Frame) -> None:
                    evaluate(frame)

                return ignore

    def _aggregate(self, target: AggregationNode, call: Call) -> _Run:
        keys = [self._compiler.compiled(key) for key in target.keys]
        value = self._compiler.number(call.arguments[0]) if call.arguments else None
        by = increment_of(call)
        increment = None if by is None else self._compiler.number(by)
        name = target.name

        def add(frame: Frame) -> None:
            key = tuple([key(frame) for key in keys])
            frame.aggregations[name].add(
                key, 0 if value is None else value(frame), 1 if increment is None else increment(frame)
            )

        return add

    def _action(self, call: Call) -> _Run:
        program = self._program
        match call.name:
            case "trace":
                (argument,) = call.arguments
                evaluate, kind = self._compiler.compiled(argument), program.checked.type_of(argument)
                return lambda frame: program.records.trace(kind, evaluate(frame))
            case "tracemem":
                return self._tracemem(call)
            case "printf":
                return self._printf(call)
            case "printa":
                return self._printa(call)
            case "exit":
                status = self._compiler.number(call.arguments[0])

                def leave(frame: Frame) -> None:
                    program.exit_status = status(frame) & 0xFF
                    raise Exit

                return leave
            case _:
                return self._change(call)

    def _tracemem(self, call: Call) -> _Run:
        records, kind = self._program.records, self._program.checked.type_of(call.arguments[0])
        memory = self._compiler.compiled(call.arguments[0])
        size, *limits = map(self._compiler.number, call.arguments[1:])

        def trace(frame: Frame) -> None:
            data, most = cast("bytes", memory(frame)), size(frame)
            if not 0 < most <= len(data):
                raise Fault("invalid address")
            limit = limits[0](frame) if limits else most
            records.trace(kind, data[: limit if 0 <= limit < most else most])

        return trace

    def _printf(self, call: Call) -> _Run:
        records, printer = self._program.records, self._program.checked.printers[id(call)]
        arguments = [self._compiler.compiled(argument) for argument in call.arguments[1:]]
        if printer is None:
            raise TypeError("printf() has a format")
        return lambda frame: records.text(printer.text([argument(frame) for argument in arguments]))

    def _printa(self, call: Call) -> _Run:
        program, printer = self._program, self._program.checked.printers[id(call)]
        names = [each.name for each in call.arguments if isinstance(each, AggregationNode)]

        def print_all(frame: Frame) -> None:
            program.records.text(printed([frame.aggregations[name] for name in names], program.sorting, printer))

        return print_all

    def _change(self, call: Call) -> _Run:
        target, *rest = call.arguments
        name = cast("AggregationNode", target).name
        number = self._compiler.number(rest[0]) if rest else None

        def change(frame: Frame) -> None:
            aggregation, argument = frame.aggregations[name], 0 if number is None else number(frame)
            match call.name:
                case "clear":
                    aggregation.clear()
                case "trunc":
                    aggregation.truncate(argument)
                case "normalize":
                    if not argument:
                        raise Fault("divide-by-zero")
                    aggregation.normalize(argument)
                case _:
                    aggregation.denormalize()

        return change


def prints_record(clause: Clause) -> bool:
    """Report whether a clause makes a line of output, as each does that says nothing else."""
    if not clause.statements:
        return True
    return any(_has_action(statement) for statement in clause.statements)


def _has_action(statement: Statement) -> bool:
    if isinstance(statement, Branch):
        return any(map(_has_action, (*statement.then, *statement.otherwise)))
    return isinstance(statement, Call) and statement.name in ACTIONS
