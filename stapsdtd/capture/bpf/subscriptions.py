"""What the engine keeps of each subscription."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from stapsdtd.capture.bpf.armed import ArmedSite
from stapsdtd.capture.bpf.following import FollowedProcesses
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.model import ObjectKey


@dataclass(slots=True)
class Subscription:
    """buffer_bytes: how large it wants a ring to be."""

    channel: Channel
    buffer_bytes: int
    owner: str
    followed: FollowedProcesses | None = None
    sites: dict[ObjectKey, list[ArmedSite]] = field(default_factory=dict)

    @property
    def all_sites(self) -> list[ArmedSite]:
        return [site for sites in self.sites.values() for site in sites]

    def take_sites(self, at_least: int) -> list[ArmedSite]:
        """Take sites of an object out, with all others that were armed together with the last one; none if none are
        left.
        """
        for key, sites in self.sites.items():
            end = at_least
            while end < len(sites) and sites[end].group is sites[end - 1].group:
                end += 1
            self.sites[key] = sites[end:]
            if end >= len(sites):
                del self.sites[key]
            return sites[:end]
        return []

    def forget(self, key: ObjectKey, sites: Collection[ArmedSite]) -> None:
        """Forget sites of an object that are not armed for it any more."""
        self.sites[key] = [site for site in self.sites.get(key, ()) if site not in sites]

    @property
    def ends(self) -> list[ArmedSite]:
        """Return the sites at which its spans end."""
        key = self.channel.subscription_key
        # an earlier attempt that ran out of memory may have removed it there
        return [site for site in self.all_sites if key in site.consumers and site.consumers[key].is_end]


class Subscriptions(dict[SubscriptionKey, Subscription]):
    """All of them, by key."""

    @property
    def ring_bytes(self) -> int:
        """Return how large a ring is to be that does for all. Raises ValueError if there is none."""
        return max(subscription.buffer_bytes for subscription in self.values())
