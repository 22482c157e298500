"""Turn checked expressions into Python functions, which evaluate them for a hit.

No expression has a loop, so each ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import cast

from stapsdtd.query.byte_order import SIZES, turned
from stapsdtd.query.d import texts
from stapsdtd.query.d.captured import argument_index, number_in, place_of, text_in
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.conversion import converter
from stapsdtd.query.d.functions import BUILT_INS
from stapsdtd.query.d.machine import Element, Fault, Frame, Hit
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
from stapsdtd.query.d.probes import probe_name
from stapsdtd.query.d.values import Bytes, OwnText, Pointer, Type, Value, quotient
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import String as StringType

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


_PROBE_NAME = Variable("probename")
_NOTHING: dict[type[Type], Value] = {IntegerType: 0, Pointer: 0, StringType: "", Bytes: b""}


class Compiler:
    """Of the expressions of a program."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def compiled(self, expression: Expression) -> Evaluate:
        """Return a function that evaluates an expression, and raises Fault."""
        match expression:
            case Integer(value):
                number = self._converter(self._checked.type_of(expression))(value)
                return lambda _: number
            case String(value):
                text = OwnText(value.decode("utf-8", "backslashreplace")[: self._checked.string_bytes - 1])
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
                convert = self._converter(self._checked.type_of(expression))
                return lambda frame: convert(first(frame) if which(frame) else second(frame))
            case Cast(operand=operand):
                return self._cast(operand, self._checked.type_of(expression))
            case Assignment(sign, target, value):
                return self._assignment(sign, cast("Variable", target), value)
            case Step():
                return self._step(expression)
            case _:
                raise TypeError(f"{expression} has no value")

    def _converter(self, kind: Type) -> Callable[[Value], Value]:
        return converter(kind, self._checked.string_bytes)

    def number(self, expression: Expression) -> _Number:
        """Like compiled, for what the checker knows to be an integer."""
        return cast("_Number", self.compiled(expression))

    def _variable(self, variable: Variable) -> Evaluate:
        name, scope = variable.name, variable.scope
        if scope is Scope.GLOBAL and (name == "args" or (name.startswith("arg") and name in BUILT_INS)):
            return self._argument(variable)
        if scope is Scope.GLOBAL and name in BUILT_INS:
            built_in, convert = _BUILT_INS[name], self._converter(BUILT_INS[name])

            def read(frame: Frame) -> Value:
                if (value := built_in(frame.hit)) is None:
                    raise Fault(f"{name} is not known of this hit")
                return convert(value)

            return read
        element = self._element(variable)
        nothing = _NOTHING[type(self._checked.type_of(variable))]

        def get(frame: Frame) -> Value:
            found = frame.variables.get(scope, element(frame), frame.hit)
            return nothing if found is None else found

        return get

    def _element(self, variable: Variable) -> Callable[[Frame], Element]:
        name, keys = variable.name, [self.compiled(key) for key in variable.keys]
        alone: Element = name, ()
        return (lambda frame: (name, tuple([key(frame) for key in keys]))) if keys else (lambda _: alone)

    def _argument(self, variable: Variable) -> Evaluate:
        index = argument_index(variable)
        kind = self._checked.type_of(variable)
        is_string = not isinstance(kind, IntegerType | Pointer)
        convert = self._converter(kind)

        def read(frame: Frame) -> Value:
            values = frame.hit.strings if is_string else frame.hit.arguments
            if index not in values:
                # as DTrace has arguments that a probe lacks
                return "" if is_string else 0
            value = values[index]
            if value is None:
                raise Fault(f"arg{index}: {frame.hit.missing.get(index, 'invalid address')}")
            return convert(value)

        return read

    def _unary(self, sign: str, operand: Expression, kind: Type) -> Evaluate:
        if sign == "*":
            return self._dereferenced(operand, kind)
        inner, convert = self.number(operand), self._converter(kind)
        match sign:
            case "!":
                return lambda frame: int(not inner(frame))
            case "~":
                return lambda frame: convert(~inner(frame))
            case "-":
                return lambda frame: convert(-inner(frame))
            case _:
                return lambda frame: convert(inner(frame))

    def _cast(self, operand: Expression, kind: Type) -> Evaluate:
        inner, convert = self.compiled(operand), self._converter(kind)
        if isinstance(kind, StringType) and isinstance(self._checked.type_of(operand), Bytes):
            return lambda frame: convert(text_in(cast("bytes", inner(frame))))
        return lambda frame: convert(inner(frame))

    def _dereferenced(self, operand: Expression, kind: Type) -> Evaluate:
        inner = self.compiled(operand)

        def read(frame: Frame) -> Value:
            memory = inner(frame)
            if not isinstance(memory, bytes) or (number := number_in(memory, kind)) is None:
                raise Fault("invalid address")
            return number

        return read

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
            compare = _COMPARING[sign]
            convert = self._converter(_common(self._checked.type_of(left), self._checked.type_of(right)))
            if _PROBE_NAME in {left, right}:
                # whichever way a program spells it
                return lambda frame: int(compare(probe_name(str(first(frame))), probe_name(str(second(frame)))))
            return lambda frame: int(compare(convert(first(frame)), convert(second(frame))))
        return _calculating(sign, first, second, kind)

    def _assignment(self, sign: str, target: Variable, value: Expression) -> Evaluate:
        new, kind = self.compiled(value), self._checked.type_of(target)
        if sign != "=":
            calculate, number = _calculator(sign[:-1], kind), cast("_Number", new)
            return self._changed(target, lambda frame, before: calculate(before, number(frame)))
        scope, element, convert = target.scope, self._element(target), self._converter(kind)

        def store(frame: Frame) -> Value:
            value = convert(new(frame))
            frame.variables.set(scope, element(frame), frame.hit, value)
            return value

        return store

    def _step(self, step: Step) -> Evaluate:
        by = 1 if step.operator == "++" else -1
        target = cast("Variable", step.target)
        return self._changed(target, lambda _, before: before + by, is_postfix=step.is_postfix)

    def _changed(self, target: Variable, change: Callable[[Frame, int], int], *, is_postfix: bool = False) -> Evaluate:
        """Make the new value of a variable from the one before; its keys are evaluated once."""
        scope, element, convert = target.scope, self._element(target), self._converter(self._checked.type_of(target))

        def changed(frame: Frame) -> Value:
            place = element(frame)
            before = cast("int", frame.variables.get(scope, place, frame.hit) or 0)
            after = convert(change(frame, before))
            frame.variables.set(scope, place, frame.hit, after)
            return before if is_postfix else after

        return changed

    def _call(self, call: Call) -> Evaluate:
        if call.name == "copyinstr":
            return self._copied(call)
        if call.name == "copyin":
            return _memory(call)
        if call.name in SIZES:
            number = self.number(call.arguments[0])
            return lambda frame: turned(call.name, number(frame))
        arguments = [self.compiled(argument) for argument in call.arguments]
        name, convert = call.name, self._converter(self._checked.type_of(call))
        return lambda frame: convert(texts.applied(name, [argument(frame) for argument in arguments]))

    def _copied(self, call: Call) -> Evaluate:
        index = argument_index(call.arguments[0])
        limit = self.number(call.arguments[1]) if len(call.arguments) > 1 else None
        convert = self._converter(StringType())

        def copied(frame: Frame) -> Value:
            text = frame.hit.strings.get(index)
            if text is None:
                raise Fault(f"copyinstr(arg{index}): {frame.hit.missing.get(index, 'invalid address')}")
            return convert(text if limit is None else text[: max(limit(frame), 0)])

        return copied


def _memory(call: Call) -> Evaluate:
    place = place_of(call)

    def copied(frame: Frame) -> Value:
        if (memory := frame.hit.memory.get(place)) is None:
            raise Fault(f"copyin(arg{place.argument}): {frame.hit.missing.get(place, 'invalid address')}")
        return memory

    return copied


def _common(left: Type, right: Type) -> Type:
    """Return the type in which two values are compared."""
    if not isinstance(left, IntegerType) or not isinstance(right, IntegerType):
        return left
    bits = max(left.bits, right.bits, 32)
    are_signed = [kind.is_signed or kind.bits < bits for kind in (left, right)]
    return IntegerType(bits, is_signed=all(are_signed))


def _calculating(sign: str, left: Evaluate, right: Evaluate, kind: Type) -> Evaluate:
    calculate, first, second = _calculator(sign, kind), cast("_Number", left), cast("_Number", right)
    return lambda frame: calculate(first(frame), second(frame))


def _calculator(sign: str, kind: Type) -> Callable[[int, int], int]:
    """Return a function of two numbers, which raises Fault."""
    calculate, convert = _CALCULATING[sign], cast("Callable[[int], int]", converter(kind))
    if sign in {"<<", ">>"}:
        return lambda one, other: convert(calculate(one, other))
    if sign not in {"/", "%"}:
        return lambda one, other: convert(calculate(convert(one), convert(other)))

    def divided(one: int, other: int) -> int:
        divisor = convert(other)
        if not divisor:
            raise Fault("divide-by-zero")
        return convert(calculate(convert(one), divisor))

    return divided
