r"""Packs sites into few multi-probe events.

    p:GROUP/EVENT PATH:0x10c4(0x3030) site=\0:u32 comm=$comm q0=%ax:u64 q1=%dx:u64
    p:GROUP/EVENT PATH:0x11f0(0x3032) site=\1:u32 comm=$comm q0=%di:u64 q1=\0:u64

Definitions may share an event if their fields agree in name and type, and disabling an event takes a grace period of
its own, 49 s for 1,000 of them. So sites with about as many fields share an event. It has as many fields of each kind
as any of its sites needs, and those that a site does not need are filled with an immediate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stapsdtd.model import Constant, ObjectKey, SiteCapture, StartArgument, Unavailable
from stapsdtd.plan.fetch import Fetch, SlotKind, fetch

_SIZES = (2, 6, 14)
_MAX_FIELDS = 120
"""The kernel takes 128 (MAX_TRACE_ARGS); site and comm are two of them."""

MAX_SITES_PER_EVENT = 1024
"""Bounds the search for the site on whose account the kernel refuses an event."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an event that holds a captured value: the index-th of its kind."""

    kind: SlotKind
    index: int

    @property
    def name(self) -> str:
        return f"{self.kind.letter}{self.index}"


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One definition of an event. sources: parallel to capture.captures."""

    capture: SiteCapture
    sources: tuple[Field | Constant | Unavailable, ...]
    fetched: tuple[tuple[Field, str], ...]


Instance = str
Counts = dict[SlotKind, int]
Shape = tuple[tuple[SlotKind, int], ...]


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One multi-probe event: sites of one object, told apart by their position.

    It belongs to one instance, so that the kernel's count of its hits is that of the instance's subscription.
    """

    instance: Instance
    object_key: ObjectKey
    shape: Shape
    sites: tuple[SitePlan, ...]

    def __hash__(self) -> int:
        # specs are keys everywhere, and hashing a thousand sites each time would cost more than planning
        return hash((self.instance, self.object_key, self.shape, len(self.sites)))

    def fetch_arguments(self, position: int) -> str:
        """Return the part of a site's definition after the address."""
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
    """Group sites by their number of fields. Sites keep their order within an event.

    no_strings: why no strings may be fetched; empty if they may.
    """
    groups: dict[tuple[int, int], list[tuple[SitePlan, Counts]]] = {}
    for capture in captures:
        plan, counts = _site_plan(capture, architecture, no_strings)
        groups.setdefault(_size_class(counts), []).append((plan, counts))
    return tuple(
        EventSpec(instance, object_key, shape, tuple(plans[start : start + MAX_SITES_PER_EVENT]))
        for members in groups.values()
        for shape, plans in _by_shape(members)
        for start in range(0, len(plans), MAX_SITES_PER_EVENT)
    )


def _size_class(counts: Counts) -> tuple[int, int]:
    """Return the exact number of strings, which no immediate can replace, and the size class of the other fields."""
    strings = counts[SlotKind.STRING]
    return strings, bisect_left(_SIZES, sum(counts.values()) - strings)


def _by_shape(members: Sequence[tuple[SitePlan, Counts]]) -> Iterator[tuple[Shape, list[SitePlan]]]:
    """Yield one shape for all members, or each member's own if the common one has too many fields for an event."""
    shape = _shape({kind: max(counts[kind] for _, counts in members) for kind in SlotKind})
    if sum(count for _, count in shape) <= _MAX_FIELDS:
        yield shape, [plan for plan, _ in members]
        return
    by_shape: dict[Shape, list[SitePlan]] = {}
    for plan, counts in members:
        by_shape.setdefault(_shape(counts), []).append(plan)
    yield from by_shape.items()


def split(spec: EventSpec) -> tuple[EventSpec, EventSpec]:
    """Halve an event of two or more sites."""
    middle = len(spec.sites) // 2
    return replace(spec, sites=spec.sites[:middle]), replace(spec, sites=spec.sites[middle:])


def _site_plan(capture: SiteCapture, architecture: str, no_strings: str) -> tuple[SitePlan, Counts]:
    counts = dict.fromkeys(SlotKind, 0)
    sources: list[Field | Constant | Unavailable] = []
    fetched = []
    for position, wanted in enumerate(capture.captures):
        subject = capture.subject(position)
        if isinstance(subject, StartArgument):
            raise TypeError("the ftrace engine pairs nothing")
        source = fetch(wanted, subject, architecture)
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
