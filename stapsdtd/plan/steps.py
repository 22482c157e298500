"""(wanted, installed) -> steps.

An event is defined, and enabled in its instance (ring buffer), for one subscription. Steps are data; those that arm
have an undo.

Removing an event empties, in the kernel, the ring buffer that it was ever enabled in, other events' records and the
count of the dropped ones included (__trace_remove_event_call, Linux 3.11 and later). So an event that was enabled is
removed only when its instance is gone; until then a disabled one stays defined, and holds nothing but its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from stapsdtd.plan.events import EventSpec


class EventState(Enum):
    """What an event that exists in the kernel has been through."""

    DEFINED = "never enabled, or its instance is gone"
    ENABLED = "enabled"
    DISABLED = "disabled, and its instance lives"


@dataclass(frozen=True, slots=True)
class Define:
    """Write all definitions of an event; nothing is armed yet."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Enable:
    """Let an event write to its instance, which arms its sites."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Disable:
    """Disarm an event's sites."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an event and with it the kernel's hold on the object's file."""

    spec: EventSpec


Step = Define | Enable | Disable | Remove


def changes(wanted: AbstractSet[EventSpec], installed: Mapping[EventSpec, EventState]) -> list[Step]:
    """What leads from installed to wanted. Disarming comes first: it frees what arming may need."""
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
    """What takes an step back; None where there is nothing to take back."""
    match step:
        case Define(spec):
            return Remove(spec)
        case Enable(spec):
            return Disable(spec)
        case Disable() | Remove():
            return None
