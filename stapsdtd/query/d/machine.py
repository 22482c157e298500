"""What a D program has while it runs: variables, aggregations, and the hit that it looks at.

An integer is kept as its type has it: `uint8_t x = 300` is 44. An element that was never assigned, or is assigned 0, is
not there, and reads as 0 or the empty string.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stapsdtd.query.d.aggregations import Aggregation
from stapsdtd.query.d.captured import Place
from stapsdtd.query.d.nodes import Scope
from stapsdtd.query.d.values import Value

MAX_ELEMENTS = 1 << 17
"""Of all associative arrays and self-> variables together."""

Element = tuple[str, tuple[Value, ...]]
"""A variable's name, and the keys of an associative array's element."""
_Name = TypeVar("_Name")


class Fault(Exception):  # noqa: N818 - DTrace's own word
    """Why a clause ended before its end. The next one runs all the same."""


class Exit(Exception):  # noqa: N818 - no error
    """The program has called exit(): its clause ends here."""


# frozen, it would take three times as long to make
@dataclass(slots=True)
class Hit:
    """A hit, or a moment of the program itself, in which the fields are those of the command.

    arguments, strings: of the probe, by position; None for what could not be read, with the reason in missing. memory:
    likewise, by place.
    """

    probe_id: int
    provider: str
    module: str
    function: str
    name: str
    pid: int = 0
    tid: int = 0
    uid: int | None = None
    gid: int | None = None
    cpu: int = 0
    execname: str = ""
    timestamp: int = 0
    walltimestamp: int = 0
    arguments: Mapping[int, int | None] = field(default_factory=dict)
    strings: Mapping[int, str | None] = field(default_factory=dict)
    memory: Mapping[Place, bytes | None] = field(default_factory=dict)
    missing: Mapping[int | Place, str] = field(default_factory=dict)


@dataclass(slots=True)
class Variables:
    """of_hit: this-> variables of the hit that is looked at. dropped: assignments for which there was no room."""

    shared: dict[Element, Value] = field(default_factory=dict)
    of_threads: dict[tuple[int, int, Element], Value] = field(default_factory=dict)
    of_hit: dict[Element, Value] = field(default_factory=dict)
    dropped: int = 0
    max_elements: int = MAX_ELEMENTS

    def get(self, scope: Scope, element: Element, hit: Hit) -> Value | None:
        """Return a value, None if there is none."""
        if scope is Scope.GLOBAL:
            return self.shared.get(element)
        if scope is Scope.SELF:
            return self.of_threads.get((hit.pid, hit.tid, element))
        return self.of_hit.get(element)

    def set(self, scope: Scope, element: Element, hit: Hit, value: Value) -> None:
        if scope is Scope.GLOBAL:
            self._set(self.shared, element, value)
        elif scope is Scope.SELF:
            self._set(self.of_threads, (hit.pid, hit.tid, element), value)
        else:
            self.of_hit[element] = value

    def _set(self, variables: dict[_Name, Value], name: _Name, value: Value) -> None:
        if not value:
            variables.pop(name, None)
        elif name in variables or len(self.shared) + len(self.of_threads) < self.max_elements:
            variables[name] = value
        else:
            self.dropped += 1


@dataclass(slots=True)
class Frame:
    """What the clauses of one hit are run in."""

    hit: Hit
    variables: Variables
    aggregations: Mapping[str, Aggregation]
    has_exited: bool = False
