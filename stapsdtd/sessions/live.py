"""The control thread's state of a live subscription."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from msgspec.structs import replace

from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import FileId, Object, ObjectKey
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.futures import unfinished
from stapsdtd.sessions.attacher import Outcome
from stapsdtd.sessions.choices import Choices, Found
from stapsdtd.sessions.session import Session
from stapsdtd.sessions.subscription import SiteState, SiteStatus, Subscription


@dataclass(slots=True, eq=False)
class ConsideredObject:
    """The sites of an object that the selectors choose, and which of them are armed.

    is_ephemeral: see `Target`. user: whose process it is due to. since: when arming began. outcome: None until arming
    is done. is_late: the client knows that it takes long. is_quiet: the client knows nothing of it, since none of the
    processes that it may trace maps the object. only_in: the only processes that it is armed in, see `ForeignBounds`;
    None if there is no such restriction.
    """

    object: Object
    selected_sites: tuple[SelectedSite, ...]
    is_ephemeral: bool
    user: int
    since: float
    arming: Future[Outcome] = field(default_factory=Future)
    outcome: Outcome | None = None
    is_late: bool = False
    is_quiet: bool = False
    only_in: frozenset[int] | None = None

    @property
    def armed(self) -> tuple[SelectedSite, ...]:
        if self.outcome is None:
            return ()
        return tuple(each for each in self.selected_sites if each.key not in self.outcome.refusals)

    @property
    def reported_sites(self) -> tuple[SelectedSite, ...]:
        """Return the sites that the client last saw reported as ARMED or ARMING."""
        if self.is_quiet:
            return ()
        return self.selected_sites if self.outcome is None and self.is_late else self.armed

    def disarmed(self, subscription: Subscription) -> list[SiteStatus]:
        """Return what to report of the sites that the client last saw reported as ARMED or ARMING."""
        if self.outcome is None or self.is_quiet:
            return subscription.statuses(SiteState.DISARMED, self.object, self.reported_sites)
        armed = (each for each in self.outcome.statuses if each.state is SiteState.ARMED)
        return [replace(each, state=SiteState.DISARMED, armed_after_ns=0) for each in armed]


@dataclass(frozen=True, slots=True, eq=False)
class Doubtful:
    """An object that is not armed, since another that is may be the same file. reported_sites: as REFUSED."""

    object: Object
    reported_sites: tuple[SelectedSite, ...]


@dataclass(slots=True, eq=False)
class Disarming:
    """Sites that are being disarmed. statuses: what to report once they are."""

    object: Object
    since: float
    statuses: list[SiteStatus]
    is_late: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Choosing:
    """search: finds an object's choices. settled: done when it was decided what follows, and that is armed."""

    search: Future[Found]
    settled: Future[None] = field(default_factory=unfinished)


class FirstArming:
    """What Subscribe waits for: the engine, and the objects that were mapped when it was called.

    statuses: of the sites armed or refused so far. matched: done when it is known which these are to be. done: set when
    all are, with the first error that concerns more than one object.
    """

    def __init__(self) -> None:
        self.statuses: list[SiteStatus] = []
        self.matched = unfinished()
        self.done = unfinished()
        self._unmatched = 0
        self._unsettled = 0
        self._error: BaseException | None = None

    @property
    def is_waiting(self) -> bool:
        return not self.done.done()

    def add(self) -> None:
        """Expect one more settle(). Call this only while is_waiting."""
        self._unsettled += 1

    def add_match(self) -> None:
        """Expect one more settle_match(). Call this only while is_waiting."""
        self._unmatched += 1
        self.add()

    def settle_match(self, error: BaseException | None = None) -> None:
        self._unmatched -= 1
        if not self._unmatched and not self.matched.done():
            self.matched.set_result(None)
        self.settle(error)

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
class LiveSubscription:
    """considered: objects of which the selectors choose sites. barred: objects that are
    refused for a while, or confined to its own processes, see `ForeignBounds`.
    pending: objects that cannot be opened yet. files: those that the client named, and those of the inventory, whose
    keys are in installed. is_beyond_bounds: more are installed than may be armed. unknown_since: when the kernel
    stopped knowing whether an object's path leads to it.

    unfollow: stops following the processes in scope. first: None once Subscribe has returned. disarming: what may still
    be patched. streams: how many are open. lease: runs while none is.

    choices: of the clauses. choosing: the objects of which these are being found. oversized: those with too many sites.
    crowded: those that a process maps too often to attach to.
    """

    subscription: Subscription
    session: Session
    unfollow: Callable[[], None]
    choices: Choices
    considered: dict[ObjectKey, ConsideredObject] = field(default_factory=dict)
    barred: dict[ObjectKey, Object] = field(default_factory=dict)
    pending: dict[ObjectKey, ConsideredObject] = field(default_factory=dict)
    doubtful: dict[ObjectKey, Doubtful] = field(default_factory=dict)
    files: dict[ObjectKey, NamedFile] = field(default_factory=dict)
    installed: set[ObjectKey] = field(default_factory=set)
    is_beyond_bounds: bool = False
    unknown_since: dict[ObjectKey, float] = field(default_factory=dict)
    first: FirstArming | None = field(default_factory=FirstArming)
    disarming: set[Disarming] = field(default_factory=set)
    streams: int = 0
    lease: asyncio.TimerHandle | None = None
    choosing: dict[ObjectKey, Choosing] = field(default_factory=dict, init=False)
    oversized: set[ObjectKey] = field(default_factory=set, init=False)
    crowded: set[ObjectKey] = field(default_factory=set, init=False)
    _by_file: dict[FileId, ConsideredObject] = field(default_factory=dict, init=False)
    _by_likeness: defaultdict[tuple[int, int, int], set[ObjectKey]] = field(
        default_factory=lambda: defaultdict(set), init=False
    )

    def named_files(self) -> list[NamedFile]:
        """Return the files that the client named."""
        return [file for key, file in self.files.items() if key not in self.installed]

    def version_of(self, key: ObjectKey) -> ConsideredObject | None:
        """Return the considered version of the same file, whatever its content."""
        return self._by_file.get(key.file)

    def candidate_for(self, key: ObjectKey) -> ConsideredObject | None:
        """Return a considered object that may be the same file under another key."""
        return next(
            (self.considered[each] for each in self._by_likeness.get(key.likeness, ()) if each.may_be(key)), None
        )

    def add(self, considered: ConsideredObject) -> None:
        key = considered.object.key
        self.considered[key] = self._by_file[key.file] = considered
        self._by_likeness[key.likeness].add(key)

    def pop(self, key: ObjectKey) -> ConsideredObject:
        del self._by_file[key.file]
        self._by_likeness[key.likeness].discard(key)
        if not self._by_likeness[key.likeness]:
            del self._by_likeness[key.likeness]
        self.unknown_since.pop(key, None)
        return self.considered.pop(key)

    def forget(self, key: ObjectKey) -> None:
        """Forget what was found out about an object that is gone."""
        self.choices.forget(key)
        self.oversized.discard(key)
        self.crowded.discard(key)

    def report_all(self, state: SiteState, obj: Object, selected: Iterable[SelectedSite], reason: str = "") -> None:
        """Report the same of several sites."""
        self.report(self.subscription.statuses(state, obj, selected, reason))

    def report(self, statuses: Sequence[SiteStatus]) -> None:
        """Report to the stream, or to Subscribe until that has returned."""
        self.subscription.changed(statuses)
        if self.first is not None:
            # Subscribe reports all of them, and a subscription keeps only some
            self.first.statuses += self.subscription.new_statuses()
