"""Counts foreign hits: those that a subscription causes in processes that it may not trace.

A library is patched in every process that maps it, whoever wants its probes. A client that may trace only some users'
processes gets no events of the others' hits, each of which costs those processes a trap all the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.tables import Generation, Tables
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.model import ObjectKey


@dataclass(slots=True)
class _Followed:
    """cells: of the plan's counters. counted: what they were, in the same order."""

    key: ObjectKey
    cells: dict[SubscriptionKey, int]
    counted: list[int]


class ForeignHits:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._plans: dict[Generation, _Followed] = {}
        self._hits: Counter[tuple[SubscriptionKey, ObjectKey]] = Counter()

    def begin(self, key: ObjectKey, plan: ActivePlan, subscription_keys: Collection[SubscriptionKey]) -> None:
        """subscription_keys: see `ArmedSite.keys_with_foreign_hits`."""
        cells = {
            channel.subscription_key: plan.entry.cell(layout.Counter.EXCLUDED, bit)
            for bit, channel in plan.channels
            if channel.subscription_key in subscription_keys
        }
        if cells:
            self._plans[plan.entry.generation] = _Followed(key, cells, [0] * len(cells))

    def end(self, plan: ActivePlan) -> None:
        """Count what is left of a plan that no slot names any more."""
        followed = self._plans.pop(plan.entry.generation, None)
        if followed is not None:
            self._count([followed])

    def take(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        """Return the counts above 0 since the last call."""
        self._count(self._plans.values())
        hits, self._hits = self._hits, Counter()
        return dict(+hits)

    def _count(self, plans: Collection[_Followed]) -> None:
        sums = iter(self._tables.sums([cell for followed in plans for cell in followed.cells.values()]))
        for followed in plans:
            counts = list(itertools.islice(sums, len(followed.cells)))
            if counts == followed.counted:
                continue
            for subscription_key, count, before in zip(followed.cells, counts, followed.counted, strict=True):
                self._hits[subscription_key, followed.key] += count - before
            followed.counted = counts
