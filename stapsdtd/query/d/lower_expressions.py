"""Predicates, keys and values of D clauses as expressions of the daemon's language, where both mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Protocol

from stapsdtd.query.byte_order import SIZES
from stapsdtd.query.d.captured import argument_index
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.nodes import Binary, Call, Clause, Expression, Integer, Scope, String, Unary, Variable
from stapsdtd.query.d.text import text_of_expression
from stapsdtd.query.d.values import STRING_BYTES, UINT64
from stapsdtd.query.d.values import String as StringType

PROBE_NAME = "name"
"""What the daemon's language calls probename, with `__` where D has `-`."""
_MAX_DASHES = 4
_EVEN_UNSIGNED = 65
"""Bits of any integer, with a sign."""
_COMPARING = frozenset(["==", "!=", "<", "<=", ">", ">="])
_NUMBERS = frozenset(["pid", "tid", "uid", "gid", "cpu"])
_STRINGS = {"execname": "execname", "probemod": "module", "probefunc": "function", "probename": PROBE_NAME}


class NotLoweredError(Exception):
    """Why the interpreter has to run a clause, for users."""


class Sites(Protocol):
    """What is known of the probes that clauses mean."""

    def fits(self, clause: Clause, index: int, bits: int) -> bool:
        """Report whether an argument of all of them is a number that fits into so many bits with a sign."""

    def are_apart(self, clause: Clause, other: Clause) -> bool:
        """Report whether no probe is of both clauses."""


class Lowering:
    """Of one clause. Its methods raise NotLoweredError."""

    def __init__(self, checked: Checked, clause: Clause, sites: Sites) -> None:
        self._checked = checked
        self._clause = clause
        self._sites = sites
        self._length = checked.string_bytes - 1

    def where(self, predicate: Expression | None) -> str:
        return "" if predicate is None else self._condition(predicate)

    def _condition(self, expression: Expression) -> str:
        match expression:
            case Binary("&&" | "||" as operator, left, right):
                return f"({self._condition(left)}) {operator} ({self._condition(right)})"
            case Unary("!", operand):
                return f"!({self._condition(operand)})"
            case Binary("==" | "!=" as operator, Variable("probename", Scope.GLOBAL), String() as name) | Binary(
                "==" | "!=" as operator, String() as name, Variable("probename", Scope.GLOBAL)
            ):
                if len(name.value) >= self._length:
                    raise NotLoweredError(f"a string has {self._length} characters at most")
                names = " || ".join(f"{PROBE_NAME} == {_constant(each)}" for each in _spellings(name))
                return names if operator == "==" else f"!({names})"
            case Binary(operator, left, right) if operator in _COMPARING:
                if _is_constant(right):
                    return f"{self._compared(left, operator, right)} {operator} {_constant(right)}"
                return f"{_constant(left)} {operator} {self._compared(right, operator, left)}"
            case _:
                raise NotLoweredError(f"{text_of_expression(expression)} is no comparison with a constant")

    def _compared(self, subject: Expression, operator: str, constant: Expression) -> str:
        if isinstance(constant, Integer):
            # where no sign matters
            is_alike = operator in {"==", "!="} or self._checked.type_of(subject) == UINT64
            return self.number(subject, _EVEN_UNSIGNED if is_alike else 64)
        if not isinstance(constant, String):
            return self.number(subject)
        if operator not in {"==", "!="}:
            raise NotLoweredError("it compares the order of strings")
        # a constant that is longer than a captured string is equal to none
        if len(constant.value) >= self._length:
            raise NotLoweredError(f"a string has {self._length} characters at most")
        return self._string(subject)

    def key(self, key: Expression) -> str:
        if isinstance(self._checked.type_of(key), StringType):
            return self._string(key)
        # what comes back is converted to D's type
        return self.number(key, _EVEN_UNSIGNED)

    def number(self, expression: Expression, bits: int = 64) -> str:
        match expression:
            case Variable(name, Scope.GLOBAL) if name in _NUMBERS and bits >= 64:
                return name
            case Variable(name, Scope.GLOBAL) if name == "args" or (name.startswith("arg") and name[3:].isdigit()):
                index = argument_index(expression)
                if self._sites.fits(self._clause, index, bits):
                    return f"arg{index}"
                raise NotLoweredError(
                    f"{text_of_expression(expression)} is not everywhere a number of {bits} bits with a sign"
                )
            case Call(name, (operand,)) if name in SIZES and 8 * SIZES[name] < bits:
                return f"{name}({self.number(operand, _EVEN_UNSIGNED)})"
        raise NotLoweredError(f"it needs {text_of_expression(expression)}")

    def _string(self, expression: Expression) -> str:
        if self._length < STRING_BYTES - 1:
            raise NotLoweredError(f"strsize is {self._checked.string_bytes}")
        match expression:
            case Variable(name, Scope.GLOBAL) if name in _STRINGS:
                return _STRINGS[name]
            case Variable("args", Scope.GLOBAL):
                return _text_at(expression, self._length)
            case Call("copyinstr", (pointer,)):
                return _text_at(pointer, self._length)
            case Call("copyinstr", (pointer, Integer(length))) if 0 < length <= self._length:
                return _text_at(pointer, length)
        raise NotLoweredError(f"it needs {text_of_expression(expression)}")


def _spellings(name: String) -> Iterator[String]:
    """Yield what probes with a name can be called in files."""
    parts = name.value.replace(b"__", b"-").split(b"-")
    if len(parts) > _MAX_DASHES + 1:
        raise NotLoweredError(f"a name has more than {_MAX_DASHES} dashes")
    for dashes in product((b"__", b"-"), repeat=len(parts) - 1):
        yield String(b"".join(chain.from_iterable(zip(parts, (*dashes, b""), strict=True))))


def _text_at(pointer: Expression, length: int) -> str:
    try:
        return f"str(arg{argument_index(pointer)}, {length})"
    except TypeError:
        raise NotLoweredError(f"{text_of_expression(pointer)} is no argument") from None


def _is_constant(expression: Expression) -> bool:
    operand = expression.operand if isinstance(expression, Unary) and expression.operator == "-" else expression
    return isinstance(operand, Integer | String)


def _constant(expression: Expression) -> str:
    match expression:
        case Integer(value) if value < 1 << 63:
            return str(value)
        case Unary("-", Integer(value)) if value < 1 << 63:
            return f"-{value}"
        case String(value) if value.isascii() and value.decode().isprintable() and not set(value) & set(b"\"\\'"):
            return f'"{value.decode()}"'
    raise NotLoweredError(f"it compares with {text_of_expression(expression)}")
