"""Find what is wrong with a program before anything is armed, and the types of its expressions."""

from __future__ import annotations

from collections.abc import Sequence

from stapsdtd.query.d import formats
from stapsdtd.query.d.aggregates import aggregate_of
from stapsdtd.query.d.checked import Checked, Declared
from stapsdtd.query.d.declared_types import parse_type
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.expression_types import ArgumentTypes, ExpressionTypes, check_array, check_keys
from stapsdtd.query.d.functions import ACTIONS, AGGREGATING, BUILT_INS
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Branch,
    Call,
    Clause,
    Declaration,
    Program,
    Statement,
    String,
)
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.printing import Printer


def check(program: Program, argument_types: ArgumentTypes) -> Checked:
    """Raises DError."""
    checked = Checked(program, options_of(program.options).string_bytes)
    for declaration in program.declarations:
        _declare(checked, declaration)
    for clause in program.clauses:
        _Clause(checked, clause, ExpressionTypes(checked, clause, argument_types)).check()
    return checked


def _declare(checked: Checked, declaration: Declaration) -> None:
    if declaration.name in BUILT_INS:
        raise DError(f"identifier {declaration.name} is a built-in variable", declaration.at)
    check_array(declaration.scope, declaration.name, declaration.keys, declaration.at)
    keys = tuple(parse_type(key, declaration.at) for key in declaration.keys)
    declared = Declared(parse_type(declaration.type, declaration.at), keys)
    if checked.variables.setdefault((declaration.scope, declaration.name), declared) != declared:
        raise DError(f"identifier {declaration.name} was declared otherwise before", declaration.at)


class _Clause:
    """Checks one clause. Its methods raise DError."""

    def __init__(self, checked: Checked, clause: Clause, types: ExpressionTypes) -> None:
        self._checked = checked
        self._clause = clause
        self._types = types

    def check(self) -> None:
        if (predicate := self._clause.predicate) is not None:
            self._types.scalar(predicate, "the predicate")
        self._statements(self._clause.statements or ())

    def _statements(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, Branch):
                self._types.scalar(statement.condition, "the condition")
                self._statements(statement.then)
                self._statements(statement.otherwise)
            elif isinstance(statement, Call) and statement.name in ACTIONS:
                self._action(statement)
            elif isinstance(statement, Assignment) and isinstance(statement.target, Aggregation):
                self._aggregate(statement, statement.target)
            else:
                self._types.type_of(statement)

    def _action(self, call: Call) -> None:
        arguments = call.arguments
        text = arguments[0].value if arguments and isinstance(arguments[0], String) else None
        if call.name == "printa" and text is not None:
            arguments = arguments[1:]
        self._types.arguments(call, ACTIONS[call.name], arguments)
        try:
            if call.name == "printf" and text is not None:
                types = tuple(map(self._checked.type_of, arguments[1:]))
                self._checked.printers[id(call)] = Printer(_format(text), types)
                formats.check_printf(_format(text), types)
            elif call.name == "printa":
                self._printa(call, text, [each.name for each in arguments if isinstance(each, Aggregation)])
        except formats.FormatError as error:
            raise DError(str(error), call.at) from None

    def _printa(self, call: Call, text: bytes | None, names: Sequence[str]) -> None:
        if not names:
            raise DError("printa() takes at least one aggregation", call.at)
        keys = [self._checked.aggregates[name].keys for name in names]
        if any(len(each) != len(keys[0]) for each in keys):
            raise DError("printa(): the aggregations have different numbers of keys", call.at)
        for name, each in zip(names[1:], keys[1:], strict=True):
            check_keys(keys[0], each, f"@{names[0]}", call.at, f"in @{name}")
        printer = None if text is None else Printer(_format(text), keys[0])
        if printer is not None:
            formats.check_printa(printer.format, keys[0])
        self._checked.printers[id(call)] = printer

    def _aggregate(self, assignment: Assignment, target: Aggregation) -> None:
        call = assignment.value
        if assignment.operator != "=" or not isinstance(call, Call) or call.name not in AGGREGATING:
            raise DError(f"@{target.name} must be assigned one of {', '.join(AGGREGATING)}", assignment.at)
        self._types.arguments(call, AGGREGATING[call.name], call.arguments)
        keys = self._types.key_types(target.keys)
        found = aggregate_of(call, keys)
        known = self._checked.aggregates.setdefault(target.name, found)
        if (known.function, known.scale) != (found.function, found.scale):
            raise DError(f"@{target.name} was {known.function.value}() before, or had other parameters", assignment.at)
        check_keys(known.keys, keys, f"@{target.name}", assignment.at)


def _format(text: bytes) -> formats.Format:
    return formats.parse(text.decode("utf-8", "surrogateescape"))
