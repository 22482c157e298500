"""What a lookup finds of kernel functions."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.functions.attaching import Attachability, Way
from stapsdtd.functions.passing import Passed
from stapsdtd.functions.shapes import TypeShape
from stapsdtd.functions.values import ResolvedValue


@dataclass(frozen=True, slots=True)
class FunctionArgument:
    """name: `return` for the result, and empty if the source has none. declared: its type. size: in bytes.

    record_size: of the struct or union that it points to, in bytes; 0 if it points to none.
    """

    name: str
    declared: str
    size: int
    passed: Passed
    is_signed: bool = False
    record_size: int = 0


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """module: `vmlinux` for the kernel itself. prototype: as C writes it."""

    name: str
    module: str
    prototype: str
    arguments: tuple[FunctionArgument, ...]
    result: FunctionArgument
    attachability: Attachability
    values: tuple[ResolvedValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfound:
    """A selector that names no function with a type. near: names that are like it."""

    selector: str
    reason: str
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """left_out: how many functions there are beyond those that one answer has. ways: of the host.

    shapes: the table of values' types; empty unless asked for.
    """

    functions: tuple[KernelFunction, ...] = ()
    unfound: tuple[Unfound, ...] = ()
    left_out: int = 0
    ways: tuple[Way, ...] = ()
    shapes: tuple[TypeShape, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundNames:
    """names: sorted."""

    names: tuple[str, ...] = ()
    left_out: int = 0
