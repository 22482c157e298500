"""The values that a site's record holds: all that any of its subscriptions captures, each once.

first captures  arg0, arg2:str[64]        ──►  numbers 0 1, then strings 2[256]
second captures arg0, arg1, arg2:str[256]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stapsdtd.arch import word_bytes
from stapsdtd.model import MAX_STRING_BYTES, Argument, Capture, Constant, Unavailable

_NUMBER_BYTES = frozenset({1, 2, 4, 8})


class Value(NamedTuple):
    """An argument as a number, as the string it points to, or as its raw bytes. limit: of the last two, in bytes."""

    argument_index: int
    is_string: bool = False
    limit: int = 0

    @property
    def is_text(self) -> bool:
        """Report whether it is written behind the numbers."""
        return self.limit > 0


def value_of(capture: Capture, argument: Argument, architecture: str) -> Value | Constant | Unavailable:
    """Return what a record has to hold for a capture, or the constant or reason that replaces it."""
    operand = argument.operand
    if isinstance(operand, Unavailable):
        return operand
    if capture.is_string:
        if argument.size != word_bytes(architecture):
            return Unavailable(f"{argument.text} is {argument.size} bytes wide, which is no pointer to a string")
        return Value(capture.index, is_string=True, limit=capture.max_bytes or MAX_STRING_BYTES)
    if isinstance(operand, Constant):
        return operand
    if argument.size in _NUMBER_BYTES:
        return Value(capture.index)
    return Value(capture.index, limit=argument.size)


def united(wanted: Iterable[Value]) -> tuple[Value, ...]:
    """Return each argument at most once as a number and once as a string, with the largest limit; numbers first."""
    limits: dict[tuple[int, bool], int] = {}
    for index, is_string, limit in wanted:
        limits[index, is_string] = max(limit, limits.get((index, is_string), 0))
    values = [Value(index, is_string, limit) for (index, is_string), limit in limits.items()]
    return tuple(sorted(values, key=lambda value: value.limit > 0))
