"""Arms objects that cost other users too much in the client's own processes alone, see `ForeignBounds`.

armed for all  ──►  too many foreign hits  ──►  in own processes  ──►  time is up     ──►  armed for all
                                                      │
                                                      └──►  none, or still too many  ──►  refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from stapsdtd import model
from stapsdtd.catalog.registry import Registry
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.kernel.ownership import belonging
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.sessions.armer import Armer
from stapsdtd.sessions.foreign_bounds import Excess, ForeignBounds
from stapsdtd.sessions.live import ConsideredObject, LiveSubscription
from stapsdtd.sessions.matcher import Belongs
from stapsdtd.sessions.subscription import SiteState
from stapsdtd.sessions.targets import ArmRequest

_MAX_PROCESSES = 64
"""Of a client, in which an object is armed one by one."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Where an object may be armed. excess: why not in all processes. only_in: the processes; None for all."""

    excess: Excess | None = None
    only_in: frozenset[int] | None = None

    @property
    def refusal(self) -> Excess | None:
        """Return why the object may be armed nowhere, or None if it may be somewhere."""
        return None if self.only_in else self.excess


class Confining:
    """Runs in the control thread."""

    def __init__(self, registry: Registry, armer: Armer, foreign: ForeignBounds, belongs: Belongs) -> None:
        self._registry = registry
        self._armer = armer
        self._foreign = foreign
        self._belongs = belongs

    def limit(self, live: LiveSubscription, key: ObjectKey, pids: Iterable[int]) -> Limit:
        """pids: of the processes that map the object."""
        owners = live.subscription.spec.owners
        excess = self._foreign.excess(live.subscription.client.name, key)
        if excess is None:
            return Limit()
        if owners is None or excess.is_refused:
            return Limit(excess, frozenset())
        own = frozenset(pid for pid in pids if self._belongs(pid, owners)) - live.subscription.excluded
        return Limit(excess, own if len(own) <= _MAX_PROCESSES else frozenset())

    def arm(self, live: LiveSubscription, request: ArmRequest, limit: Limit, on_gone: Callable[[], None]) -> None:
        arm = self._armer.rearm if request.object.key in live.considered else self._armer.arm
        if limit.excess is not None:
            live.barred[request.object.key] = request.object
            note = f"in your own processes alone: {limit.excess.why_confined}"
            request = replace(request, only_in=limit.only_in, note=note)
        arm(live, request, on_gone)

    def keep_within(
        self,
        live: LiveSubscription,
        considered: ConsideredObject,
        limit: Limit,
        named: NamedFile | None,
        on_gone: Callable[[], None],
    ) -> None:
        """Arm an object that is armed where it may be now, if that has changed. named: if its file is held."""
        only_in, before = limit.only_in, considered.only_in
        have_ended = only_in is not None and before is not None and only_in <= before
        if only_in == before or have_ended:
            return
        obj, owners = considered.object, live.subscription.spec.owners
        mappings = visible(self._registry.mappings(obj.key), owners)
        request = ArmRequest(
            obj, considered.selected_sites, mappings, considered.is_ephemeral, named, considered.is_quiet
        )
        self.arm(live, request, limit, on_gone)

    def refuse(
        self, live: LiveSubscription, obj: Object, excess: Excess, selected_sites: Iterable[SelectedSite]
    ) -> None:
        """Disarm an object that may be armed nowhere, and tell the client once."""
        if obj.key in live.considered:
            self._armer.bar(live, excess)
        elif obj.key not in live.barred:
            live.report_all(SiteState.REFUSED, obj, selected_sites, excess.why_refused)
        live.barred[obj.key] = obj


def visible(mappings: Mapping[int, model.Mapping], owners: frozenset[int] | None) -> Mapping[int, model.Mapping]:
    """Return the mappings of the processes that a client may trace, by pid."""
    if owners is None:
        return mappings
    pids = belonging(mappings, owners)
    return {pid: mapping for pid, mapping in mappings.items() if pid in pids}
