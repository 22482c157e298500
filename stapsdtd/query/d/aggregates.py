"""What a program's aggregations compute, as it says when it assigns to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.query.d import scales
from stapsdtd.query.d.aggregations import Aggregation, Function
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import Call, Expression, Integer, Unary
from stapsdtd.query.d.values import Type


@dataclass(frozen=True, slots=True)
class Aggregate:
    """scale, parameters: of functions that make a distribution; empty for the others."""

    function: Function
    keys: tuple[Type, ...]
    scale: scales.Scale | None = None
    parameters: tuple[int, ...] = ()

    def empty(self, name: str, max_rows: int) -> Aggregation:
        return Aggregation(name, self.function, self.keys, self.scale, max_rows)


def aggregate_of(call: Call, keys: tuple[Type, ...]) -> Aggregate:
    """Return what a call that was checked computes. Raises DError if its parameters make no scale."""
    function = Function(call.name)
    try:
        match function:
            case Function.QUANTIZE:
                return Aggregate(function, keys, scales.quantize())
            case Function.LQUANTIZE:
                parameters = _constants(call.arguments[1:4])
                return Aggregate(function, keys, scales.lquantize(*parameters), parameters)
            case Function.LLQUANTIZE:
                parameters = _constants(call.arguments[1:5])
                return Aggregate(function, keys, scales.llquantize(*parameters), parameters)
            case _:
                return Aggregate(function, keys)
    except ValueError as error:
        raise DError(f"{call.name}(): {error}", call.at) from None


def increment_of(call: Call) -> Expression | None:
    """Return by how much a value counts in a distribution, None if by 1."""
    position = {"quantize": 1, "lquantize": 4, "llquantize": 5}.get(call.name)
    return call.arguments[position] if position is not None and len(call.arguments) > position else None


def _constants(arguments: Sequence[Expression]) -> tuple[int, ...]:
    return tuple(map(_constant, arguments))


def _constant(argument: Expression) -> int:
    match argument:
        case Integer(value):
            return value
        case Unary("-", Integer(value)):
            return -value
        case _:
            raise ValueError("its parameters must be integer constants")
