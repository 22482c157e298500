"""Where a record has what was captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberAt:
    """The number at a position of the record's values, which the program extended to 64 bits.

    float_bytes: the size of a floating-point number, whose bytes these are; 0 for an integer.
    """

    position: int
    is_signed: bool
    float_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TextAt:
    """A string or raw bytes. max_bytes is this subscription's limit; a string of which the record has more was cut."""

    position: int
    max_bytes: int
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant, which is not in the record. value is None if the argument is unavailable."""

    value: int | None
    is_signed: bool
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class NoText:
    """A string that is unavailable."""


@dataclass(frozen=True, slots=True)
class CgroupAt:
    """The path of the cgroup whose id is at a position of the record's values, or the container that it is part of."""

    position: int
    is_container: bool = False


@dataclass(frozen=True, slots=True)
class OfStartAt:
    """A value of the record that was kept of a start, which is itself a value of its end's.

    position: of that record. source: where the value is in it.
    """

    position: int
    source: NumberAt | TextAt


Source = NumberAt | TextAt | Fixed | NoText | CgroupAt | OfStartAt
Layout = tuple[Source, ...]
