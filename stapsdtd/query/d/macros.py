"""Replace macro variables: `$target` and `$1` are integers, `$$1` is a string, and in descriptions both are text.

test-prov$target:::go /pid == $target && execname == $$1/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import (
    Clause,
    Description,
    Expression,
    Integer,
    Macro,
    Position,
    Program,
    String,
    Unary,
)
from stapsdtd.query.d.rewriting import rewritten

_MACRO = re.compile(r"\${1,2}([A-Za-z]+|\d+)")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")


def substituted(program: Program, values: Mapping[str, str]) -> Program:
    """Return a program without macro variables. values: by name, without `$`. Raises DError."""
    return replace(program, clauses=tuple(_Substitution(values).clause(each) for each in program.clauses))


class _Substitution:
    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def clause(self, clause: Clause) -> Clause:
        changed = rewritten(clause, self._expression)
        return replace(changed, descriptions=tuple(map(self._description, clause.descriptions)))

    def _value(self, name: str, at: Position) -> str:
        if name not in self._values:
            what = "macro argument" if name.isdigit() else "macro variable"
            raise DError(f"{what} ${name} is not defined", at)
        return self._values[name]

    def _description(self, given: Description) -> Description:
        def replaced(part: str) -> str:
            return _MACRO.sub(lambda macro: self._value(macro[1], given.at), part)

        provider, module, function, name = map(replaced, (given.provider, given.module, given.function, given.name))
        return Description(provider, module, function, name, given.at)

    def _expression(self, given: Expression) -> Expression:
        return self._constant(given) if isinstance(given, Macro) else given

    def _constant(self, macro: Macro) -> Expression:
        text = self._value(macro.name.removeprefix("$"), macro.at)
        if macro.name.startswith("$"):
            return String(text.encode(errors="surrogateescape"), macro.at)
        if not _INTEGER.fullmatch(text):
            raise DError(f"${macro.name} is {text!r}, which is no integer; $${macro.name} is the string", macro.at)
        digits = text.removeprefix("-")
        value = int(digits, 8) if digits.startswith("0") and digits.isdigit() else int(digits, 0)
        if value >= 1 << 64:
            raise DError(f"integer constant is too large: {text}", macro.at)
        integer = Integer(value, at=macro.at)
        return Unary("-", integer, macro.at) if text.startswith("-") else integer
