"""Hits in strangers' processes, counted by the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stapsdtd.capture.bpf.encode import Filter
from stapsdtd.capture.bpf.foreign import ForeignHits
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Reading
from stapsdtd.capture.bpf.tables import PlanSpec, Tables
from stapsdtd.events.columns import U64
from stapsdtd.model import ObjectKey
from tests.unit.fake_bpf import FakeLoaded, RecordingSink
from tests.unit.samples import channels_of

LIBRARY = ObjectKey(1, 2, 3, 4)
ANNES = Filter(None, frozenset(), None, frozenset({1000}))
BERTS = Filter(None, frozenset(), None, frozenset({1001}))


class CountedTables(Tables):
    """summed: how many cells were summed up."""

    summed = 0

    def totals(self) -> U64:
        found = super().totals()
        self.summed += len(found)
        return found

    def sums(self, cells: Sequence[int]) -> list[int]:
        self.summed += len(cells)
        return super().sums(cells)


class Host:
    def __init__(self) -> None:
        self.loaded = FakeLoaded()
        self.tables = CountedTables(self.loaded.table, self.loaded.cpus)
        self.hits = ForeignHits(self.tables)

    def begin(self, *filters: Filter, subscription_keys: tuple[int, ...] = (1,)) -> ActivePlan:
        """A plan with a subscription for each filter, numbered from 1 on."""
        bits = dict(enumerate(filters))
        entry = self.tables.allocate_plan(PlanSpec([], [], bits, {}, has_texts=False))
        readings = tuple(Reading(Channel(bit + 1, RecordingSink()), bit, 1, ()) for bit in bits)
        plan = ActivePlan(entry, channels_of(readings), readings, len(bits))
        self.hits.begin(LIBRARY, plan, subscription_keys)
        return plan

    def hit(self, plan: ActivePlan, bit: int = 0) -> None:
        """On each CPU."""
        self.loaded.counters()[:, plan.entry.cell(Counter.EXCLUDED, bit)] += np.uint64(1)


def test_hits_since_the_last_time_are_told_on_all_cpus() -> None:
    host = Host()
    plan = host.begin(ANNES, BERTS, subscription_keys=(1, 2))
    host.hit(plan)
    host.hit(plan, bit=1)
    host.hit(plan, bit=1)
    cpus = host.loaded.cpus
    assert host.hits.take() == {(1, LIBRARY): cpus, (2, LIBRARY): 2 * cpus}
    assert host.hits.take() == {}
    host.hit(plan)
    host.hits.end(plan)
    assert host.hits.take() == {(1, LIBRARY): cpus}


def test_what_it_takes_to_look_does_not_grow_with_the_square_of_the_plans() -> None:
    host = Host()
    plans = [host.begin(ANNES) for _ in range(200)]
    for plan in plans:
        host.hit(plan)
    assert host.hits.take() == {(1, LIBRARY): 200 * host.loaded.cpus}
    for plan in plans:
        host.hits.end(plan)
    assert 0 < host.tables.summed < 200 * 16
