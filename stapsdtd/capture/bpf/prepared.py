"""Plans that are made before their sites are armed, in steps between which others may change what is armed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stapsdtd.capture.bpf.armed import ArmedObject, ArmedSite, Consumer
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.span_tables import SpanTable
from stapsdtd.model import Site


class _Ready(NamedTuple):
    """kept: what was kept of the starts of each consumer's span."""

    armed: ArmedObject
    consumers: Sequence[Consumer]
    kept: Sequence[object]
    plan: ActivePlan

    def fits(self, site: ArmedSite) -> bool:
        consumers = list(site.consumers.values())
        return (
            self.armed is site.object
            and _are_same(self.consumers, consumers)
            and _are_same(self.kept, _kept(consumers))
        )


class Prepared:
    """What is made for sites that are to be armed. consumers: the new ones."""

    def __init__(self) -> None:
        self.consumers: dict[Site, Consumer] = {}
        self._ready: dict[Site, _Ready] = {}

    def add(self, site: ArmedSite, plan: ActivePlan) -> None:
        consumers = list(site.consumers.values())
        self._ready[site.site] = _Ready(site.object, consumers, _kept(consumers), plan)

    def take(self, site: ArmedSite) -> ActivePlan | None:
        """Return the plan of a site that still is as it was to be, for the caller to use and to free."""
        ready = self._ready.get(site.site)
        if ready is None or not ready.fits(site):
            return None
        del self._ready[site.site]
        return ready.plan

    def take_all(self) -> list[ActivePlan]:
        """Return the plans that were not taken, for the caller to free."""
        ready, self._ready = self._ready, {}
        return [each.plan for each in ready.values()]


NOTHING = Prepared()


def _kept(consumers: Sequence[Consumer]) -> list[object]:
    return [_kept_of(consumer.span) for consumer in consumers]


def _kept_of(span: SpanTable | None) -> object:
    return None if span is None else span.kept


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
