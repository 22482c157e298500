"""The values that a site's record holds: all that any of its subscriptions captures, each once.

first captures  arg0, arg2:str[64]        ──►  numbers 0 1, then strings 2[256]
second captures arg0, arg1, arg2:str[256]

A buffer is read as a whole or not at all, so that one of another length is another value.
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


class OfStart(NamedTuple):
    """All that was kept of a span's start, where that is a record of its own. pairing: as `OfPair`."""

    pairing: int


ValueKey = tuple[Subject | OfPair | OfStart, bool, int]
"""What tells a value from a record's others."""


class Value(NamedTuple):
    """What a record holds: an argument as a number, as the string or the buffer it points to, or as its raw bytes; or a
    built-in as a number, of which CGROUP is the cgroup's id.

    subject: the argument's index, the built-in, or what is of a pair. limit: of a string or raw bytes, in bytes. shown:
    how many of these the client wants; a string that has more was cut.
    """

    subject: Subject | OfPair | OfStart
    is_string: bool = False
    limit: int = 0
    is_buffer: bool = False
    shown: int = 0

    @property
    def key(self) -> ValueKey:
        return self.subject, self.is_string, self.limit if self.is_buffer else 0

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
    if capture.is_pointed_to:
        shown = capture.max_bytes or MAX_STRING_BYTES
        # one byte more tells whether there is more
        limit = shown + capture.is_string
        if argument.characters:
            limit = min(limit, argument.characters)
        elif argument.characters == 0 or argument.size != word_bytes(architecture):
            return no_pointer(argument, capture)
        return Value(capture.subject, capture.is_string, limit, capture.is_buffer, min(shown, limit))
    if isinstance(operand, Constant):
        return operand
    if argument.size in _NUMBER_BYTES:
        return Value(capture.subject)
    return Value(capture.subject, limit=argument.size, shown=argument.size)


def no_pointer(argument: Argument, capture: Capture) -> Unavailable:
    if argument.characters == 0:
        return Unavailable(f"{argument.text} is neither a pointer nor an array of bytes")
    what = "a string" if capture.is_string else "bytes"
    return Unavailable(f"{argument.text} is {argument.size} bytes wide, which is no pointer to {what}")


def value_of_built_in(built_in: BuiltIn) -> Value:
    """Return what a record has to hold for a built-in: a container's is known by its cgroup."""
    return Value(BuiltIn.CGROUP if built_in is BuiltIn.CONTAINER else built_in)


def united(wanted: Iterable[Value]) -> tuple[Value, ...]:
    """Return each value once, a string with the largest limit; numbers first."""
    values: dict[ValueKey, Value] = {}
    for value in wanted:
        values[value.key] = max(value, values.get(value.key, value), key=lambda each: each.limit)
    return tuple(sorted(values.values(), key=lambda value: value.is_text))
