"""(wanted, installed) -> actions.

An event is defined once and enabled in an instance (ring buffer) of each subscription that wants it. Actions are data;
those that arm have an undo.

Removing an event empties, in the kernel, every ring buffer that it was ever enabled in, other events' records and the
count of the dropped ones included (__trace_remove_event_call, Linux 3.11 and later). So an event is removed only when
all instances that it touched are gone; until then a disabled one stays defined, and holds nothing but its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.plan.events import EventSpec

Instance = str
Wanted = Mapping[EventSpec, frozenset[Instance]]
"""Which instances want an event; an event that nobody wants is not in it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Where an event is enabled, and in which living instances it ever was."""

    enabled: frozenset[Instance]
    touched: frozenset[Instance]


@dataclass(frozen=True, slots=True)
class Define:
    """Write all definitions of an event; nothing is armed yet."""

    spec: EventSpec


@dataclass(frozen=True, slots=True)
class Enable:
    """Let an event write to an instance; the first one arms its sites."""

    spec: EventSpec
    instance: Instance


@dataclass(frozen=True, slots=True)
class Disable:
    """Stop an event's writing to an instance; the last one disarms its sites."""

    spec: EventSpec
    instance: Instance


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete a disabled event and with it the kernel's hold on the object's file."""

    spec: EventSpec


Action = Define | Enable | Disable | Remove


def changes(wanted: Wanted, installed: Mapping[EventSpec, Installed]) -> list[Action]:
    """What leads from installed to wanted. Disarming comes first: it frees what arming may need."""
    actions: list[Action] = []
    for spec, state in installed.items():
        still = wanted.get(spec, frozenset())
        actions += [Disable(spec, instance) for instance in sorted(state.enabled - still)]
        if not still and not state.touched:
            actions.append(Remove(spec))
    for spec, instances in wanted.items():
        state = installed.get(spec, Installed(frozenset(), frozenset()))
        if spec not in installed:
            actions.append(Define(spec))
        actions += [Enable(spec, instance) for instance in sorted(instances - state.enabled)]
    return actions


def undo(action: Action) -> Action | None:
    """What takes an action back; None where there is nothing to take back."""
    match action:
        case Define(spec):
            return Remove(spec)
        case Enable(spec, instance):
            return Disable(spec, instance)
        case Disable() | Remove():
            return None
