"""Plans the ftrace engine's steps: (wanted, installed) -> steps.

An event is defined, and enabled in its instance (ring buffer), for one subscription. Steps are data; those that arm
can be undone.

When the kernel removes an event, it empties every ring buffer that the event was ever enabled in, other events' records
and the count of dropped ones included (__trace_remove_event_call, Linux 3.11 and later). So an event that was enabled
is removed only after its instance; until then it stays defined but disabled, and holds nothing but its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from stapsdtd.plan.events import EventSpec


class EventState(Enum):
    """The state of an event that exists in the kernel."""

    DEFINED = "never enabled, or its instance is gone"
    ENABLED = "enabled"
    DISABLED = "disabled, and its instance lives"


@dataclass(frozen=True, slots=True)
class Define:
    """Write all definitions of an event; nothing is armed yet."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Enable:
    """Have an event write to its instance, which arms its sites."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Disable:
    """Disarm an event's sites."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an event, which releases the object's file."""

    spec: EventSpec


Step = Define | Enable | Disable | Remove


def changes(wanted: AbstractSet[EventSpec], installed: Mapping[EventSpec, EventState]) -> list[Step]:
    """Return the steps from installed to wanted. Disarming comes first: it frees what arming may need."""
    steps: list[Step] = []
    for spec, state in installed.items():
        if spec in wanted:
            continue
        if state is EventState.ENABLED:
            steps.append(Disable(spec))
        elif state is EventState.DEFINED:
            steps.append(Remove(spec))
    steps += [Define(spec) for spec in wanted if spec not in installed]
    steps += [Enable(spec) for spec in wanted if installed.get(spec) is not EventState.ENABLED]
    return steps


def undo(step: Step) -> Step | None:
    """Return the inverse of a step, or None if it needs none."""
    match step:
        case Define(spec):
            return Remove(spec)
        case Enable(spec):
            return Disable(spec)
        case Disable() | Remove():
            return None
