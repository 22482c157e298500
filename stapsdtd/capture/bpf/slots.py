"""The slots of sites: which groups' hits count, and by which plan they go.

    newest group << 40 | oldest group << 16 | plan

A site has one group, or several while it moves from one to another. Then the newest one that is attached where a hit
is handles it, and the older ones skip it; bpf/move.h says how.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.events.columns import U64

Slot = int
PlanId = int

GroupNumber = int
"""Of layout.GROUP_BITS. Numbers are used in order, and again only after all others."""


class Word(NamedTuple):
    """What a slot says. oldest, newest: the same unless the site moves. plan: 0 if nobody wants the site."""

    newest: GroupNumber
    oldest: GroupNumber
    plan: PlanId

    @classmethod
    def unpack(cls, number: int) -> Word:
        group = (1 << layout.GROUP_BITS) - 1
        return cls(
            number >> layout.GROUP_BITS + layout.PLAN_BITS,
            number >> layout.PLAN_BITS & group,
            number & (1 << layout.PLAN_BITS) - 1,
        )

    def packed(self) -> int:
        return (self.newest << layout.GROUP_BITS | self.oldest) << layout.PLAN_BITS | self.plan


_NOBODY = Word(0, 0, 0)


class Slots:
    """Changed by one thread, except for `dismiss`, which any thread may call."""

    def __init__(self, words: U64, pool: Pool) -> None:
        self._words = words
        self._pool = pool
        # from the oldest to the newest
        self._groups: dict[Slot, list[GroupNumber]] = {}
        self._plans: dict[Slot, PlanId] = {}
        self._lock = threading.Lock()

    def allocate(self) -> Slot:
        """Raises TableFullError."""
        return self._pool.allocate(1)

    def free(self, slot: Slot) -> None:
        self.clear(slot)
        self._pool.free(slot, 1)

    def set(self, slot: Slot, group: GroupNumber, plan: PlanId) -> None:
        """Have a site's hits go by this plan, and count if they are of this group. If that was admitted last, those of
        the older ones that are left count, too.
        """
        with self._lock:
            groups = self._groups.get(slot)
            if groups is None or groups[-1] != group:
                self._groups[slot] = [group]
            self._plans[slot] = plan
            self._write(slot)

    def admit(self, slot: Slot, group: GroupNumber) -> None:
        """Have hits of a further group count, which is attached next, unless none count."""
        with self._lock:
            if slot in self._groups:
                self._groups[slot].append(group)
                self._write(slot)

    def dismiss(self, slots: Iterable[Slot], group: GroupNumber) -> None:
        """Have hits of a group not count any more where there are others. No hit may be running this group alone."""
        with self._lock:
            for slot in slots:
                groups = self._groups.get(slot, [])
                if group in groups and len(groups) > 1:
                    groups.remove(group)
                    self._write(slot)

    def clear(self, slot: Slot) -> None:
        """Have no hit of a site count."""
        with self._lock:
            self._groups.pop(slot, None)
            self._plans.pop(slot, None)
            self._write(slot)

    def _write(self, slot: Slot) -> None:
        """At once: a hit may read it now."""
        groups = self._groups.get(slot)
        word = Word(groups[-1], groups[0], self._plans[slot]) if groups else _NOBODY
        self._words[slot] = word.packed()
