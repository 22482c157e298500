"""Find the types of a clause's expressions.

Types are D's: integers of 8 to 64 bits, with C's conversions, strings, and addresses. A variable has the type of its
declaration, or of what is assigned to it first.
"""

from __future__ import annotations

from collections.abc import Callable as Function
from collections.abc import Sequence

from stapsdtd.query.d.checked import Checked, Declared
from stapsdtd.query.d.constants import constant
from stapsdtd.query.d.declared_types import parse_type
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.functions import (
    ACTIONS,
    AGGREGATING,
    BUILT_INS,
    FUNCTIONS,
    INT32,
    REFUSED,
    REFUSED_VARIABLES,
    STRING,
    Callable,
    Wanted,
)
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Call,
    Cast,
    Clause,
    Conditional,
    Expression,
    Integer,
    Macro,
    Member,
    Position,
    Scope,
    Step,
    String,
    Unary,
    Variable,
)
from stapsdtd.query.d.text import text_of_expression
from stapsdtd.query.d.values import INT64, Bytes, Pointer, Type
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import String as StringType

_COMPARING = frozenset(["<", "<=", ">", ">=", "==", "!="])
_LOGICAL = frozenset(["&&", "||", "^^"])

ArgumentTypes = Function[[Clause, int], Type | None]
"""Returns the type of args[N] in a clause, None if no probe that matches has so many."""


class ExpressionTypes:
    """Of one clause. Its methods raise DError.

    Whoever needs a type asks for it, so that operands are asked for several times; each node is typed once.
    """

    def __init__(self, checked: Checked, clause: Clause, argument_types: ArgumentTypes) -> None:
        self._checked = checked
        self._clause = clause
        self._argument_types = argument_types
        self._types: dict[int, Type] = {}

    def type_of(self, expression: Expression) -> Type:
        # the program keeps the nodes, so that no other one gets the id
        if id(expression) not in self._types:
            self._types[id(expression)] = self._checked.types[id(expression)] = self._found(expression)
        return self._types[id(expression)]

    def _found(self, expression: Expression) -> Type:
        match expression:
            case Integer(value, suffix):
                bits = 64 if "l" in suffix or value > (0xFFFFFFFF if "u" in suffix else 0x7FFFFFFF) else 32
                return IntegerType(bits, is_signed="u" not in suffix and value < 1 << 63)
            case String():
                return STRING
            case Macro(name):
                raise DError(f"macro variable ${name} is not defined", expression.at)
            case Variable():
                return self._variable(expression)
            case Aggregation(name):
                raise DError(f"@{name} is an aggregation, whose result is only printed", expression.at)
            case Call():
                return self._call(expression)
            case Unary("*", operand):
                return self._dereferenced(operand, expression.at)
            case Unary(operator, operand):
                kind = self._integer(operand, f"the operand of {operator}")
                return INT32 if operator == "!" else _promoted(kind)
            case Step(operator, target):
                self._define(target, INT64)
                self._integer(target, f"the operand of {operator}")
                return self._assigned(target)
            case Binary():
                return self._binary(expression)
            case Conditional(condition, then, otherwise):
                self.scalar(condition, "the condition of ?:")
                return _common(self.type_of(then), self.type_of(otherwise), "?:", expression.at)
            case Assignment():
                return self._assignment(expression)
            case Cast(name, operand):
                return self._cast(name, operand, expression.at)
            case Member():
                raise DError("only args[] of kernel functions, of the provider fbt, have members", expression.at)

    def _cast(self, name: str, operand: Expression, at: Position) -> Type:
        wanted, given = parse_type(name, at), self.type_of(operand)
        match wanted, given:
            case Pointer(target), Bytes():
                return Bytes(target)
            case StringType(), Bytes():
                return STRING
        if isinstance(wanted, IntegerType | Pointer) != isinstance(given, IntegerType | Pointer):
            raise DError(f"cannot cast {given} to {wanted}; stringof() makes strings", at)
        return wanted

    def _dereferenced(self, operand: Expression, at: Position) -> Type:
        match self.type_of(operand):
            case Bytes(IntegerType() | Pointer() as target):
                return target
            case Pointer(target):
                text, name = text_of_expression(operand), target or "void"
                raise DError(
                    f"cannot dereference {text}: memory is captured when the probe fires; "
                    f"write *({name} *)copyin({text}, sizeof ({name}))",
                    at,
                )
            case kind:
                raise DError(f"cannot dereference a {kind}; write *(int *)copyin(arg0, sizeof (int))", at)

    def _integer(self, expression: Expression, what: str) -> Type:
        kind = self.type_of(expression)
        if not isinstance(kind, IntegerType | Pointer):
            raise DError(f"{what} must be an integer, and {text_of_expression(expression)} is a {kind}", expression.at)
        return kind

    def scalar(self, expression: Expression, what: str) -> None:
        self._integer(expression, what)

    def _variable(self, variable: Variable) -> Type:
        if variable.scope is Scope.GLOBAL and variable.name == "args":
            return self._argument(variable)
        if variable.scope is Scope.GLOBAL and variable.name in BUILT_INS:
            if variable.keys:
                raise DError(f"{variable.name} is no associative array", variable.at)
            return BUILT_INS[variable.name]
        if variable.scope is Scope.GLOBAL and (reason := REFUSED_VARIABLES.get(variable.name)):
            raise DError(f"{variable.name}: {reason}", variable.at)
        if variable.name.startswith("`"):
            raise DError(f"{variable.name}: variables of the kernel are not read", variable.at)
        check_array(variable.scope, variable.name, variable.keys, variable.at)
        keys = self.key_types(variable.keys)
        declared = self._checked.variables.get((variable.scope, variable.name))
        if declared is None:
            name = f"{variable.scope.value}{variable.name}"
            raise DError(f"failed to resolve {name}: unknown variable name", variable.at)
        check_keys(declared.keys, keys, f"{variable.scope.value}{variable.name}", variable.at)
        return declared.type

    def _argument(self, variable: Variable) -> Type:
        match variable.keys:
            case (Integer(number),):
                kind = self._argument_types(self._clause, number)
            case _:
                raise DError("args[] takes one integer constant", variable.at)
        if kind is None:
            raise DError(f"index {number} is out of range for the args[] of the probes that match", variable.at)
        return kind

    def key_types(self, keys: Sequence[Expression]) -> tuple[Type, ...]:
        kinds = tuple(map(self.type_of, keys))
        for key, kind in zip(keys, kinds, strict=True):
            if isinstance(kind, Bytes):
                raise DError("a key cannot be memory; use stringof(), or * of a pointer to an integer", key.at)
        return kinds

    def _assigned(self, target: Expression) -> Type:
        """Return the type of what is assigned to, which must be a variable."""
        if not isinstance(target, Variable) or (target.scope is Scope.GLOBAL and target.name in {*BUILT_INS, "args"}):
            raise DError(f"{text_of_expression(target)} cannot be assigned to", target.at)
        return self.type_of(target)

    def _define(self, target: Expression, kind: Type) -> None:
        """Declare a variable that is modified for the first time."""
        if not isinstance(target, Variable) or (target.scope, target.name) in self._checked.variables:
            return
        if target.scope is Scope.GLOBAL and target.name in {*BUILT_INS, *REFUSED_VARIABLES, "args"}:
            return
        check_array(target.scope, target.name, target.keys, target.at)
        self._checked.variables[target.scope, target.name] = Declared(kind, self.key_types(target.keys))

    def _assignment(self, assignment: Assignment) -> Type:
        target, value = assignment.target, self.type_of(assignment.value)
        if isinstance(target, Aggregation):
            raise DError("an assignment to an aggregation is a statement of its own", assignment.at)
        self._define(target, value)
        kind = self._assigned(target)
        _check_divisor(self._checked, assignment.operator.removesuffix("="), assignment.value)
        if not _are_alike(kind, value) or (assignment.operator != "=" and not _is_number(kind)):
            raise DError(f"operands have incompatible types: {kind} {assignment.operator} {value}", assignment.at)
        return kind

    def _binary(self, binary: Binary) -> Type:
        left, right = self.type_of(binary.left), self.type_of(binary.right)
        if binary.operator in _COMPARING:
            if isinstance(_common(left, right, binary.operator, binary.at), Bytes):
                raise DError("memory cannot be compared; use stringof(), or * of a pointer to an integer", binary.at)
            return INT32
        for operand in binary.left, binary.right:
            self._integer(operand, f"an operand of {binary.operator}")
        if binary.operator in _LOGICAL:
            return INT32
        _check_divisor(self._checked, binary.operator, binary.right)
        if binary.operator in {"<<", ">>"}:
            return _promoted(left)
        return _converted(left, right)

    def _call(self, call: Call) -> Type:
        if reason := REFUSED.get(call.name):
            raise DError(f"{call.name}(): {reason}", call.at)
        if call.name in ACTIONS:
            raise DError(f"{call.name}() is an action, and a statement of its own", call.at)
        if call.name in AGGREGATING:
            raise DError(f"{call.name}() must be assigned to an aggregation, as in @ = {call.name}()", call.at)
        function = FUNCTIONS.get(call.name)
        if function is None or function.result is None:
            raise DError(f"undefined function name: {call.name}", call.at)
        self.arguments(call, function, call.arguments)
        return function.result

    def arguments(self, call: Call, function: Callable, given: Sequence[Expression]) -> None:
        most = function.most
        if len(given) < function.least or (most is not None and len(given) > most):
            takes = str(most) if most == function.least else f"{function.least} to {most}"
            raise DError(f"{call.name}() takes {takes} arguments, and here are {len(given)}", call.at)
        wanted = function.wanted + tuple(filter(None, [function.rest])) * len(given)
        for number, (argument, kind) in enumerate(zip(given, wanted, strict=False), 1):
            self._check_argument(argument, kind, f"argument #{number} of {call.name}()")

    def _check_argument(self, argument: Expression, wanted: Wanted, what: str) -> None:
        if wanted is Wanted.AGGREGATION:
            if not isinstance(argument, Aggregation) or argument.keys:
                raise DError(f"{what} must be an aggregation without keys, such as @name", argument.at)
            if argument.name not in self._checked.aggregates:
                raise DError(f"undefined aggregation: @{argument.name}", argument.at)
            return
        kind = self.type_of(argument)
        is_right = {
            Wanted.INTEGER: _is_number(kind),
            Wanted.STRING: kind == STRING,
            Wanted.SCALAR: True,
            Wanted.MEMORY: isinstance(kind, Bytes),
            Wanted.CONSTANT: _is_constant(argument),
            Wanted.FORMAT: isinstance(argument, String),
        }[wanted]
        if not is_right:
            raise DError(f"{what} must be {wanted.value}", argument.at)


def check_keys(wanted: Sequence[Type], given: Sequence[Type], name: str, at: Position, where: str = "here") -> None:
    """Raises DError if keys are not those that a variable or an aggregation has."""
    if len(wanted) != len(given):
        raise DError(f"{name} has {len(wanted)} keys, and {where} are {len(given)}", at)
    for position, (one, other) in enumerate(zip(wanted, given, strict=True), 1):
        if _is_number(one) != _is_number(other):
            raise DError(f"key #{position} of {name} is a {one}, and {where} a {other}", at)


def check_array(scope: Scope, name: str, keys: Sequence[object], at: Position) -> None:
    """Raises DError if a variable has keys, and is of a hit."""
    if keys and scope is Scope.THIS:
        raise DError(f"this->{name} cannot be an associative array; self->{name} and {name} can", at)


def _check_divisor(checked: Checked, operator: str, divisor: Expression) -> None:
    if operator in {"/", "%"} and constant(divisor, checked) == 0:
        raise DError("expression contains division by zero", divisor.at)


def _is_number(kind: Type) -> bool:
    return isinstance(kind, IntegerType | Pointer)


def _are_alike(left: Type, right: Type) -> bool:
    return left == right or (_is_number(left) and _is_number(right))


def _common(left: Type, right: Type, operator: str, at: Position) -> Type:
    if _is_number(left) and _is_number(right):
        return _converted(left, right)
    if not _are_alike(left, right):
        raise DError(f"operands have incompatible types: {left} {operator} {right}", at)
    return left


def _is_constant(expression: Expression) -> bool:
    return isinstance(expression, Integer) or (
        isinstance(expression, Unary) and isinstance(expression.operand, Integer)
    )


def _promoted(kind: Type) -> Type:
    return INT32 if isinstance(kind, IntegerType) and kind.bits < INT32.bits else kind


def _converted(left: Type, right: Type) -> Type:
    """Return the type of what two numbers make: C's usual conversions."""
    left, right = _promoted(left), _promoted(right)
    if not isinstance(left, IntegerType) or not isinstance(right, IntegerType):
        return Pointer()
    if left.bits != right.bits:
        return max(left, right, key=lambda kind: kind.bits)
    return IntegerType(left.bits, is_signed=left.is_signed and right.is_signed)
