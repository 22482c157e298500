r"""Sites into few multi-probe events.

    p:GROUP/EVENT PATH:0x10c4(0x3030) site=\0:u32 comm=$comm q0=%ax:u64 q1=%dx:u64
    p:GROUP/EVENT PATH:0x11f0(0x3032) site=\1:u32 comm=$comm q0=%di:u64 q1=\0:u64

Definitions may share an event when their fields agree in name and type, and each event waits for a grace period of its
own when it is disabled, 49 s for 1,000 of them. So sites of about as many fields share one event: it has as many fields
of each kind as any of them needs, and what a site does not need is filled with an immediate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stapsdtd.model import Constant, ObjectKey, SiteCapture, Unavailable
from stapsdtd.plan.fetch import Fetch, SlotKind, fetch

_SIZES = (2, 6, 14)
_MAX_FIELDS = 120
"""The kernel takes 128 (MAX_TRACE_ARGS); site and comm are two of them."""

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


Instance = str
Counts = dict[SlotKind, int]
Shape = tuple[tuple[SlotKind, int], ...]


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One multi-probe event: sites of one object, told apart by their position.

    It belongs to one instance, so that the kernel's count of its hits is what fired for that instance's subscription.
    """

    instance: Instance
    object_key: ObjectKey
    shape: Shape
    sites: tuple[SitePlan, ...]

    def __hash__(self) -> int:
        # specs are keys of every plan, and hashing a thousand sites each time costs more than what is planned
        return hash((self.instance, self.object_key, self.shape, len(self.sites)))

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


def group_sites(
    instance: Instance, object_key: ObjectKey, architecture: str, captures: Sequence[SiteCapture], no_strings: str = ""
) -> tuple[EventSpec, ...]:
    """Group by size; the order of sites within an event is the given one.

    no_strings: why no string may be fetched, empty where they may.
    """
    groups: dict[tuple[int, int], list[tuple[SitePlan, Counts]]] = {}
    for capture in captures:
        plan, counts = _place(capture, architecture, no_strings)
        groups.setdefault(_size(counts), []).append((plan, counts))
    return tuple(
        EventSpec(instance, object_key, shape, tuple(plans[start : start + MAX_SITES_PER_EVENT]))
        for members in groups.values()
        for shape, plans in _shaped(members)
        for start in range(0, len(plans), MAX_SITES_PER_EVENT)
    )


def _size(counts: Counts) -> tuple[int, int]:
    """Events differ in how many strings they have, for which no immediate can stand, and in the order of the rest."""
    strings = counts[SlotKind.STRING]
    return strings, bisect_left(_SIZES, sum(counts.values()) - strings)


def _shaped(members: Sequence[tuple[SitePlan, Counts]]) -> Iterator[tuple[Shape, list[SitePlan]]]:
    """One shape for all members, or each its own where that has more fields than an event can have."""
    shape = _shape({kind: max(counts[kind] for _, counts in members) for kind in SlotKind})
    if sum(count for _, count in shape) <= _MAX_FIELDS:
        yield shape, [plan for plan, _ in members]
        return
    own: dict[Shape, list[SitePlan]] = {}
    for plan, counts in members:
        own.setdefault(_shape(counts), []).append(plan)
    yield from own.items()


def split(spec: EventSpec) -> tuple[EventSpec, EventSpec]:
    """Halve an event of two sites or more."""
    middle = len(spec.sites) // 2
    return replace(spec, sites=spec.sites[:middle]), replace(spec, sites=spec.sites[middle:])


def _place(capture: SiteCapture, architecture: str, no_strings: str) -> tuple[SitePlan, Counts]:
    counts = dict.fromkeys(SlotKind, 0)
    sources: list[Field | Constant | Unavailable] = []
    fetched = []
    for wanted in capture.captures:
        source = fetch(wanted, capture.site.arguments[wanted.index], architecture)
        if no_strings and wanted.is_string:
            source = Unavailable(no_strings)
        if isinstance(source, Fetch):
            field = Field(source.kind, counts[source.kind])
            counts[source.kind] += 1
            fetched.append((field, source.expression))
            sources.append(field)
        else:
            sources.append(source)
    return SitePlan(capture, tuple(sources), tuple(fetched)), counts


def _shape(counts: Counts) -> Shape:
    return tuple((kind, count) for kind, count in counts.items() if count)
