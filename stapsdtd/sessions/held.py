"""What the control thread knows of a subscription that lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, ObjectKey
from stapsdtd.sessions.subscription import SiteState, SiteStatus, Subscription


@dataclass(frozen=True, slots=True)
class ConsideredObject:
    """What the selectors choose of an object, and what of that is armed. is_ephemeral: as `Target` has it."""

    object: Object
    selected_sites: tuple[SelectedSite, ...]
    armed: tuple[SelectedSite, ...]
    is_ephemeral: bool


@dataclass(slots=True, eq=False)
class Held:
    """considered: the objects that the selectors choose sites of. barred: those that it may not have for a while.
    doubtful: since when it is not known whether their paths lead to them.

    streams: how many are open. lease: when it ends unless one is.
    """

    subscription: Subscription
    considered: dict[ObjectKey, ConsideredObject] = field(default_factory=dict)
    barred: dict[ObjectKey, Object] = field(default_factory=dict)
    doubtful: dict[ObjectKey, float] = field(default_factory=dict)
    streams: int = 0
    lease: asyncio.TimerHandle | None = None
    _by_file: dict[tuple[int, int], ConsideredObject] = field(default_factory=dict, init=False)

    def version_of(self, key: ObjectKey) -> ConsideredObject | None:
        """Return the same file with an earlier content."""
        return self._by_file.get((key.dev, key.inode))

    def add(self, considered: ConsideredObject) -> None:
        key = considered.object.key
        self.considered[key] = self._by_file[key.dev, key.inode] = considered
        self.subscription.client.sites += len(considered.armed)

    def pop(self, key: ObjectKey) -> ConsideredObject:
        del self._by_file[key.dev, key.inode]
        considered = self.considered.pop(key)
        self.doubtful.pop(key, None)
        self.subscription.client.sites -= len(considered.armed)
        return considered

    def status(self, state: SiteState, found: Object, selected: SelectedSite, reason: str = "") -> SiteStatus:
        site_id = self.subscription.site_id(found, selected)
        return SiteStatus(state, site_id, found, selected.capture.site, reason)
