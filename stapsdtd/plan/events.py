r"""Sites into few multi-probe events.

    p:GROUP/EVENT PATH:0x10c4(0x3030) site=\0:u32 comm=$comm q0=%ax:u64 q1=%dx:u64
    p:GROUP/EVENT PATH:0x11f0(0x3032) site=\1:u32 comm=$comm q0=%di:u64 q1=\0:u64

Definitions may share an event when their fields agree in name and type, and each event waits for a grace period of
its own when it is disabled, 49 s for 1,000 of them. So sites are brought to few shapes: the count of fields of each
kind is rounded up, and what a site does not need is filled with an immediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.model import Constant, ObjectKey, SiteCapture, Unavailable
from stapsdtd.plan.fetch import Fetch, SlotKind, fetch

_ROUNDED = (0, 2, 4, 8, 16, 32, 64, 96)
MAX_SITES_PER_EVENT = 1024
"""So that one event that the kernel refuses costs a bounded search for the culprit."""


@dataclass(frozen=True, slots=True)
class Field:
    """Where a captured value is in the event: the index-th field of its kind."""

    kind: SlotKind
    index: int

    @property
    def name(self) -> str:
        return f"{self.kind.letter}{self.index}"


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One definition of an event; sources is parallel to capture.captures."""

    capture: SiteCapture
    sources: tuple[Field | Constant | Unavailable, ...]
    fetched: tuple[tuple[Field, str], ...]


Shape = tuple[tuple[SlotKind, int], ...]


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One multi-probe event: sites of one object, told apart by their position. Equal specs share one event."""

    object_key: ObjectKey
    shape: Shape
    sites: tuple[SitePlan, ...]

    def __hash__(self) -> int:
        # specs are keys of every plan, and hashing a thousand sites each time costs more than what is planned
        return hash((self.object_key, self.shape, len(self.sites)))

    def fetch_arguments(self, position: int) -> str:
        """The part of a definition behind the address."""
        expressions = {field.name: expression for field, expression in self.sites[position].fetched}
        fields = [f"site=\\{position}:u32", "comm=$comm"]
        for kind, count in self.shape:
            for index in range(count):
                name = f"{kind.letter}{index}"
                filler = f"\\0:{kind.type}"
                fields.append(f"{name}={expressions.get(name, filler)}")
        return " ".join(fields)


def group_sites(object_key: ObjectKey, architecture: str, captures: Sequence[SiteCapture]) -> tuple[EventSpec, ...]:
    """Group by shape; the order of sites within an event is the given one, so that equal wishes give equal specs."""
    shapes: dict[Shape, list[SitePlan]] = {}
    for capture in captures:
        plan, counts = _place(capture, architecture)
        shapes.setdefault(_shape(counts), []).append(plan)
    return tuple(
        EventSpec(object_key, shape, tuple(plans[start : start + MAX_SITES_PER_EVENT]))
        for shape, plans in shapes.items()
        for start in range(0, len(plans), MAX_SITES_PER_EVENT)
    )


def split(spec: EventSpec) -> tuple[EventSpec, EventSpec]:
    """Halve an event of two sites or more."""
    middle = len(spec.sites) // 2
    first, second = spec.sites[:middle], spec.sites[middle:]
    return EventSpec(spec.object_key, spec.shape, first), EventSpec(spec.object_key, spec.shape, second)


def _place(capture: SiteCapture, architecture: str) -> tuple[SitePlan, dict[SlotKind, int]]:
    counts = dict.fromkeys(SlotKind, 0)
    sources: list[Field | Constant | Unavailable] = []
    fetched = []
    for wanted in capture.captures:
        source = fetch(wanted, capture.site.arguments[wanted.index], architecture)
        if isinstance(source, Fetch):
            field = Field(source.kind, counts[source.kind])
            counts[source.kind] += 1
            fetched.append((field, source.expression))
            sources.append(field)
        else:
            sources.append(source)
    return SitePlan(capture, tuple(sources), tuple(fetched)), counts


def _shape(counts: dict[SlotKind, int]) -> Shape:
    """Strings are not rounded: an immediate cannot stand for one."""
    rounded = ((kind, count if kind is SlotKind.STRING else _round_up(count)) for kind, count in counts.items())
    return tuple((kind, count) for kind, count in rounded if count)


def _round_up(count: int) -> int:
    return next((size for size in _ROUNDED if size >= count), count)
