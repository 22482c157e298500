"""What takes long to arm or to disarm: clients are told, and nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from msgspec.structs import replace

from stapsdtd.sessions.attacher import Outcome
from stapsdtd.sessions.live import ConsideredObject, LiveSubscription
from stapsdtd.sessions.subscription import SiteState

_LATE_SECONDS = 1.0


class Lateness:
    """Runs in the control thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def report(self, live: LiveSubscription, seconds: float = _LATE_SECONDS) -> None:
        """Report what has been arming or disarming for that many seconds, each once."""
        before = self._clock() - seconds
        for considered in live.considered.values():
            if considered.outcome is None and considered.since <= before:
                self.report_arming(live, considered)
        for disarming in live.disarming:
            if not disarming.is_late and disarming.since <= before:
                disarming.is_late = True
                live.report([replace(status, state=SiteState.DISARMING, reason="") for status in disarming.statuses])

    def report_arming(self, live: LiveSubscription, considered: ConsideredObject) -> None:
        """Report an object's sites as ARMING, once, if the client knows of them."""
        if not considered.is_late and not considered.is_quiet:
            considered.is_late = True
            sites = considered.selected_sites
            live.report_all(SiteState.ARMING, considered.object, sites)

    def awaited(self, live: LiveSubscription) -> list[Future[Outcome]]:
        """Return the results to come of what is being armed, except what is late."""
        return [considered.arming for considered in live.considered.values() if self.is_awaited(considered)]

    def is_awaited(self, considered: ConsideredObject) -> bool:
        """Report whether an object is being armed, and has not been for long."""
        return considered.outcome is None and considered.since > self._clock() - _LATE_SECONDS
