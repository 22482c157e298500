"""The values that a site's record holds: all that any of its subscriptions captures, each once.

first captures  arg0, arg2:str[64]        ──►  numbers 0 1, then strings 2[256]
second captures arg0, arg1, arg2:str[256]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stapsdtd.arch import word_bytes
from stapsdtd.model import MAX_STRING_BYTES, Argument, BuiltIn, Capture, Constant, Subject, Unavailable

_NUMBER_BYTES = frozenset({1, 2, 4, 8})


class OfPair(NamedTuple):
    """A number that is known of a span's start and end. pairing: which of those at a site pairs them. word: 0 for the
    time elapsed, then what was kept of the start.
    """

    pairing: int
    word: int
    is_signed: bool


class Value(NamedTuple):
    """What a record holds: an argument as a number, as the string it points to, or as its raw bytes; or a built-in as a
    number, of which CGROUP is the cgroup's id.

    subject: the argument's index, the built-in, or what is of a pair. limit: of a string or raw bytes, in bytes.
    """

    subject: Subject | OfPair
    is_string: bool = False
    limit: int = 0

    @property
    def is_text(self) -> bool:
        """Report whether it is written behind the numbers."""
        return self.limit > 0


def value_of(capture: Capture, subject: Argument | BuiltIn, architecture: str) -> Value | Constant | Unavailable:
    """Return what a record has to hold for a capture, or the constant or reason that replaces it."""
    if isinstance(subject, BuiltIn):
        return value_of_built_in(subject)
    argument, operand = subject, subject.operand
    if isinstance(operand, Unavailable):
        return operand
    if capture.is_string:
        if argument.size != word_bytes(architecture):
            return Unavailable(f"{argument.text} is {argument.size} bytes wide, which is no pointer to a string")
        return Value(capture.subject, is_string=True, limit=capture.max_bytes or MAX_STRING_BYTES)
    if isinstance(operand, Constant):
        return operand
    if argument.size in _NUMBER_BYTES:
        return Value(capture.subject)
    return Value(capture.subject, limit=argument.size)


def value_of_built_in(built_in: BuiltIn) -> Value:
    """Return what a record has to hold for a built-in: a container's is known by its cgroup."""
    return Value(BuiltIn.CGROUP if built_in is BuiltIn.CONTAINER else built_in)


def united(wanted: Iterable[Value]) -> tuple[Value, ...]:
    """Return each subject at most once as a number and once as a string, with the largest limit; numbers first."""
    limits: dict[tuple[Subject | OfPair, bool], int] = {}
    for subject, is_string, limit in wanted:
        limits[subject, is_string] = max(limit, limits.get((subject, is_string), 0))
    values = [Value(subject, is_string, limit) for (subject, is_string), limit in limits.items()]
    return tuple(sorted(values, key=lambda value: value.limit > 0))
