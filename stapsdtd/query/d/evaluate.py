"""Turn checked expressions into Python functions, which evaluate them for a hit.

No expression has a loop, so each ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import cast

from stapsdtd.query.d import texts
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.declared_types import parse_type
from stapsdtd.query.d.functions import BUILT_INS
from stapsdtd.query.d.machine import Fault, Frame, Hit
from stapsdtd.query.d.nodes import (
    Assignment,
    Binary,
    Call,
    Cast,
    Conditional,
    Expression,
    Integer,
    Scope,
    Step,
    String,
    Unary,
    Variable,
)
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import Pointer, Type, Value, quotient, signed, unsigned

Evaluate = Callable[[Frame], Value]
_Number = Callable[[Frame], int]

_COMPARING: dict[str, Callable[[Value, Value], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def _remainder(left: int, right: int) -> int:
    return left - quotient(left, right) * right


_CALCULATING: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": quotient, "%": _remainder, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "<<": lambda left, right: left << (right & 63),
    ">>": lambda left, right: left >> (right & 63),
}  # fmt: skip
_BUILT_INS: dict[str, Callable[[Hit], Value | None]] = {
    "pid": lambda hit: hit.pid,
    "tid": lambda hit: hit.tid,
    "uid": lambda hit: hit.uid,
    "gid": lambda hit: hit.gid,
    "cpu": lambda hit: hit.cpu,
    "id": lambda hit: hit.probe_id,
    "execname": lambda hit: hit.execname,
    "timestamp": lambda hit: hit.timestamp,
    "walltimestamp": lambda hit: hit.walltimestamp,
    "probeprov": lambda hit: hit.provider,
    "probemod": lambda hit: hit.module,
    "probefunc": lambda hit: hit.function,
    "probename": lambda hit: hit.name,
}


def converted(value: Value, kind: Type) -> Value:
    """Return a value as its type has it."""
    if isinstance(kind, IntegerType) and isinstance(value, int):
        return signed(value, kind.bits) if kind.is_signed else unsigned(value, kind.bits)
    if isinstance(kind, Pointer) and isinstance(value, int):
        return unsigned(value)
    return texts.cut(value) if isinstance(value, str) else value


class Compiler:
    """Of the expressions of a program."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def compiled(self, expression: Expression) -> Evaluate:
        """Return a function that evaluates an expression, and raises Fault."""
        match expression:
            case Integer(value):
                number = converted(value, self._checked.type_of(expression))
                return lambda _: number
            case String(value):
                text = texts.cut(value.decode("utf-8", "backslashreplace"))
                return lambda _: text
            case Variable():
                return self._variable(expression)
            case Call():
                return self._call(expression)
            case Unary(sign, operand):
                return self._unary(sign, operand, self._checked.type_of(expression))
            case Binary(sign, left, right):
                if sign in {"&&", "||", "^^"}:
                    return self._logical(sign, left, right)
                return self._calculation(sign, left, right, self._checked.type_of(expression))
            case Conditional(condition, then, otherwise):
                which, first, second = self.number(condition), self.compiled(then), self.compiled(otherwise)
                kind = self._checked.type_of(expression)
                return lambda frame: converted(first(frame) if which(frame) else second(frame), kind)
            case Cast(name, operand):
                inner, kind = self.compiled(operand), parse_type(name, expression.at)
                return lambda frame: converted(inner(frame), kind)
            case Assignment(sign, target, value):
                return self._assignment(sign, cast("Variable", target), value)
            case Step():
                return self._step(expression)
            case _:
                raise TypeError(f"{expression} has no value")

    def number(self, expression: Expression) -> _Number:
        """Like compiled, for what the checker knows to be an integer."""
        return cast("_Number", self.compiled(expression))

    def _variable(self, variable: Variable) -> Evaluate:
        name, scope = variable.name, variable.scope
        if scope is Scope.GLOBAL and (name == "args" or (name.startswith("arg") and name in BUILT_INS)):
            return self._argument(variable)
        if scope is Scope.GLOBAL and name in BUILT_INS:
            built_in = _BUILT_INS[name]

            def read(frame: Frame) -> Value:
                if (value := built_in(frame.hit)) is None:
                    raise Fault(f"{name} is not known of this hit")
                return value

            return read
        keys = [self.compiled(key) for key in variable.keys]
        nothing: Value = 0 if isinstance(self._checked.type_of(variable), IntegerType | Pointer) else ""

        def get(frame: Frame) -> Value:
            found = frame.variables.get(scope, name, tuple(key(frame) for key in keys), frame.hit)
            return nothing if found is None else found

        return get

    def _argument(self, variable: Variable) -> Evaluate:
        index = argument_index(variable)
        kind = self._checked.type_of(variable)
        is_string = not isinstance(kind, IntegerType | Pointer)

        def read(frame: Frame) -> Value:
            values = frame.hit.strings if is_string else frame.hit.arguments
            if index not in values:
                # as DTrace has arguments that a probe lacks
                return "" if is_string else 0
            value = values[index]
            if value is None:
                raise Fault(f"arg{index}: {frame.hit.missing.get(index, 'invalid address')}")
            return converted(value, kind)

        return read

    def _unary(self, sign: str, operand: Expression, kind: Type) -> Evaluate:
        inner = self.number(operand)
        match sign:
            case "!":
                return lambda frame: int(not inner(frame))
            case "~":
                return lambda frame: converted(~inner(frame), kind)
            case "-":
                return lambda frame: converted(-inner(frame), kind)
            case _:
                return lambda frame: converted(inner(frame), kind)

    def _logical(self, sign: str, left: Expression, right: Expression) -> Evaluate:
        first, second = self.number(left), self.number(right)
        match sign:
            case "&&":
                return lambda frame: int(bool(first(frame) and second(frame)))
            case "||":
                return lambda frame: int(bool(first(frame) or second(frame)))
            case _:
                return lambda frame: int(bool(first(frame)) != bool(second(frame)))

    def _calculation(self, sign: str, left: Expression, right: Expression, kind: Type) -> Evaluate:
        first, second = self.compiled(left), self.compiled(right)
        if sign in _COMPARING:
            compare, common = _COMPARING[sign], _common(self._checked.type_of(left), self._checked.type_of(right))
            return lambda frame: int(compare(converted(first(frame), common), converted(second(frame), common)))
        return _calculating(sign, first, second, kind)

    def _assignment(self, sign: str, target: Variable, value: Expression) -> Evaluate:
        new = self.compiled(value)
        if sign != "=":
            new = _calculating(sign[:-1], self.compiled(target), new, self._checked.type_of(target))
        return self._stored(target, new)

    def _stored(self, target: Variable, new: Evaluate) -> Evaluate:
        keys, kind = [self.compiled(key) for key in target.keys], self._checked.type_of(target)

        def store(frame: Frame) -> Value:
            value = converted(new(frame), kind)
            frame.variables.set(target.scope, target.name, tuple(key(frame) for key in keys), frame.hit, value)
            return value

        return store

    def _step(self, step: Step) -> Evaluate:
        target = cast("Variable", step.target)
        before = self.number(target)
        by = 1 if step.operator == "++" else -1
        store = self._stored(target, lambda frame: before(frame) + by)
        if not step.is_postfix:
            return store

        def postfix(frame: Frame) -> Value:
            value = before(frame)
            store(frame)
            return value

        return postfix

    def _call(self, call: Call) -> Evaluate:
        if call.name == "copyinstr":
            return self._copied(call)
        arguments = [self.compiled(argument) for argument in call.arguments]
        name, kind = call.name, self._checked.type_of(call)
        return lambda frame: converted(_applied(name, [argument(frame) for argument in arguments]), kind)

    def _copied(self, call: Call) -> Evaluate:
        index = argument_index(call.arguments[0])
        limit = self.number(call.arguments[1]) if len(call.arguments) > 1 else None

        def copied(frame: Frame) -> Value:
            text = frame.hit.strings.get(index)
            if text is None:
                raise Fault(f"copyinstr(arg{index}): {frame.hit.missing.get(index, 'invalid address')}")
            return text if limit is None else text[: max(limit(frame), 0)]

        return copied


def argument_index(expression: Expression) -> int:
    """Return which argument arg3, or args[3], is. Raises TypeError if it is something else."""
    match expression:
        case Variable("args", Scope.GLOBAL, (Integer(index),)):
            return index
        case Variable(name, Scope.GLOBAL, ()) if name in BUILT_INS and name[3:].isdigit():
            return int(name[3:])
        case Cast(operand=operand):
            return argument_index(operand)
        case _:
            raise TypeError(f"{expression} is no argument of a probe")


def _common(left: Type, right: Type) -> Type:
    """Return the type in which two values are compared."""
    if not isinstance(left, IntegerType) or not isinstance(right, IntegerType):
        return left
    bits = max(left.bits, right.bits, 32)
    are_signed = [kind.is_signed or kind.bits < bits for kind in (left, right)]
    return IntegerType(bits, is_signed=all(are_signed))


def _calculating(sign: str, left: Evaluate, right: Evaluate, kind: Type) -> Evaluate:
    calculate = _CALCULATING[sign]
    first, second = cast("_Number", left), cast("_Number", right)

    def calculated(frame: Frame) -> Value:
        one, other = first(frame), second(frame)
        if sign not in {"<<", ">>"}:
            one, other = cast("int", converted(one, kind)), cast("int", converted(other, kind))
        if not other and sign in {"/", "%"}:
            raise Fault("divide-by-zero")
        return converted(calculate(one, other), kind)

    return calculated


def _applied(name: str, values: Sequence[Value]) -> Value:
    """Return what a function of strings makes of its arguments."""
    match name, values:
        case "stringof", [str(text)]:
            return text
        case "strlen", [str(text)]:
            return len(text)
        case "strjoin", [str(one), str(other)]:
            return one + other
        case "substr", [str(text), int(start)]:
            return texts.substr(text, start)
        case "substr", [str(text), int(start), int(length)]:
            return texts.substr(text, start, length)
        case "index", [str(text), str(part)]:
            return texts.index(text, part)
        case "index", [str(text), str(part), int(start)]:
            return texts.index(text, part, start)
        case "strstr", [str(text), str(part)]:
            return texts.strstr(text, part)
        case "basename", [str(path)]:
            return texts.basename(path)
        case "dirname", [str(path)]:
            return texts.dirname(path)
        case _:
            raise Fault(f"{name}(): kernel memory is not read")
