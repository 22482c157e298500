"""The sites of a subscription, as its stream tells of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapsdtd.client.messages import SiteState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stapsdtd.client.messages import DescribedSite, SiteStatus


class KnownSites:
    """now: those that match now, armed or refused."""

    def __init__(self) -> None:
        self._now: dict[int, SiteStatus] = {}
        self._ever_armed: dict[int, SiteStatus] = {}

    @property
    def now(self) -> tuple[SiteStatus, ...]:
        return tuple(self._now.values())

    @property
    def armed_so_far(self) -> tuple[SiteStatus, ...]:
        return tuple(self._ever_armed.values())

    def begin(self, sites: Iterable[SiteStatus]) -> None:
        """Begin anew with these, as after a restart of the server."""
        self._now = {}
        self.update(sites)

    def update(self, sites: Iterable[SiteStatus]) -> None:
        for site in sites:
            if site.state is SiteState.ARMED:
                self._ever_armed[site.site_id] = site
            if site.state is SiteState.DISARMED:
                self._now.pop(site.site_id, None)
            else:
                self._now[site.site_id] = site

    def count(self, fired: Mapping[int, DescribedSite], *, by_place: bool) -> int:
        """Return how many were armed so far or fired. by_place: the same ones may have several ids."""
        if not by_place:
            return len(self._ever_armed.keys() | fired.keys())
        armed = {(each.provider, each.name, each.path, each.offset, each.tag) for each in self._ever_armed.values()}
        described = {
            (each.probe.provider, each.probe.name, each.probe.path, each.site.offset, each.tag)
            for each in fired.values()
        }
        return len(armed | described)
