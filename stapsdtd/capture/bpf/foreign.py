"""Counts the hits in processes that a subscription does not see, at sites that are patched there for its sake.

A library is patched in every process that maps it, whoever wants one of its probes. Who may see only some users'
processes gets no event of the others' hits, which cost those processes a trap each all the same.
"""

from __future__ import annotations

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
    key: ObjectKey
    cells: dict[SubscriptionKey, int]
    counted: Counter[SubscriptionKey]


class ForeignHits:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._plans: dict[Generation, _Followed] = {}
        self._ended: Counter[tuple[SubscriptionKey, ObjectKey]] = Counter()

    def begin(self, key: ObjectKey, plan: ActivePlan, subscription_keys: Collection[SubscriptionKey]) -> None:
        """subscription_keys: for whose sake the plan's site is patched in processes that they do not see."""
        cells = {
            channel.subscription_key: plan.entry.cell(layout.Counter.EXCLUDED, bit)
            for bit, channel in plan.channels
            if channel.subscription_key in subscription_keys
        }
        if cells:
            self._plans[plan.entry.generation] = _Followed(key, cells, Counter())

    def end(self, plan: ActivePlan) -> None:
        """No slot names it any more."""
        followed = self._plans.pop(plan.entry.generation, None)
        if followed is not None:
            self._count(followed)

    def take(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        """Return how many there were since the last call, where there were any."""
        for followed in self._plans.values():
            self._count(followed)
        found, self._ended = self._ended, Counter()
        return dict(+found)

    def _count(self, followed: _Followed) -> None:
        for subscription_key, count in zip(
            followed.cells, self._tables.sums(list(followed.cells.values())), strict=True
        ):
            self._ended[subscription_key, followed.key] += count - followed.counted[subscription_key]
            followed.counted[subscription_key] = count
