"""What the control thread knows of a subscription that lives."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, ObjectKey
from stapsdtd.runtime.futures import unfinished
from stapsdtd.sessions.attacher import Outcome, Session
from stapsdtd.sessions.subscription import SiteState, SiteStatus, Subscription


class Queue(NamedTuple):
    """A queue of the arming thread: what is done for one client with the objects of one user's processes, in order."""

    client: str
    user: int | None = None


@dataclass(slots=True, eq=False)
class ConsideredObject:
    """What the selectors choose of an object, and what of that is armed.

    is_ephemeral: as `Target` has it. since: when arming it was begun. outcome: None until that is done.
    is_late: the client was told that it takes long.
    """

    object: Object
    selected_sites: tuple[SelectedSite, ...]
    is_ephemeral: bool
    queue: Queue
    since: float
    arming: Future[Outcome] = field(default_factory=Future)
    outcome: Outcome | None = None
    is_late: bool = False

    @property
    def armed(self) -> tuple[SelectedSite, ...]:
        if self.outcome is None:
            return ()
        return tuple(each for each in self.selected_sites if each.capture.site not in self.outcome.reasons)

    @property
    def told_sites(self) -> tuple[SelectedSite, ...]:
        """Return the sites that the client takes for armed, or about to be."""
        return self.selected_sites if self.outcome is None and self.is_late else self.armed


@dataclass(slots=True, eq=False)
class Disarming:
    """Sites on their way out. statuses: what the client is told when they are."""

    object: Object
    since: float
    statuses: list[SiteStatus]
    is_late: bool = False


class FirstArming:
    """What Subscribe waits for: the engine, and the objects that were mapped when it was called.

    statuses: of those that are armed or refused. done: when all are; has the first error that is not one object's own.
    """

    def __init__(self) -> None:
        self.statuses: list[SiteStatus] = []
        self.done = unfinished()
        self._unsettled = 0
        self._error: BaseException | None = None

    def add(self) -> None:
        """Wait for one more."""
        self._unsettled += 1

    def settle(self, error: BaseException | None = None) -> None:
        self._error = self._error or error
        self._unsettled -= 1
        if self._unsettled:
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class Held:
    """considered: the objects that the selectors choose sites of. barred: those that it may not have for a while.
    pending: those that cannot be opened yet. doubtful: since when it is not known whether their paths lead to them.

    first: None once Subscribe has returned. disarming: what has not left the processes yet.
    streams: how many are open. lease: when it ends unless one is.
    """

    subscription: Subscription
    session: Session
    considered: dict[ObjectKey, ConsideredObject] = field(default_factory=dict)
    barred: dict[ObjectKey, Object] = field(default_factory=dict)
    pending: dict[ObjectKey, ConsideredObject] = field(default_factory=dict)
    doubtful: dict[ObjectKey, float] = field(default_factory=dict)
    first: FirstArming | None = field(default_factory=FirstArming)
    disarming: set[Disarming] = field(default_factory=set)
    streams: int = 0
    lease: asyncio.TimerHandle | None = None
    _by_file: dict[tuple[int, int], ConsideredObject] = field(default_factory=dict, init=False)

    def version_of(self, key: ObjectKey) -> ConsideredObject | None:
        """Return the same file with an earlier content."""
        return self._by_file.get((key.dev, key.inode))

    def add(self, considered: ConsideredObject) -> None:
        key = considered.object.key
        self.considered[key] = self._by_file[key.dev, key.inode] = considered

    def pop(self, key: ObjectKey) -> ConsideredObject:
        del self._by_file[key.dev, key.inode]
        self.doubtful.pop(key, None)
        return self.considered.pop(key)

    def tell(self, statuses: list[SiteStatus]) -> None:
        """Tell the stream, or Subscribe as long as that has not returned."""
        self.subscription.changed(statuses)
        if self.first is not None:
            # a subscription keeps so many at most, and Subscribe is to have all
            self.first.statuses += self.subscription.new_statuses()

    def status(self, state: SiteState, found: Object, selected: SelectedSite, reason: str = "") -> SiteStatus:
        site_id = self.subscription.site_id(found, selected)
        return SiteStatus(state, site_id, found, selected.capture.site, reason)
