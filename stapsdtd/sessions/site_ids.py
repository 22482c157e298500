"""The ids by which one clause's events name sites."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stapsdtd.model import Argument, BuiltIn, Capture, Memory, Object, ObjectKey, SiteCapture, StartArgument
from stapsdtd.sessions.fields import Delivered, Field, delivered

_RETIRED_KEPT = 10_000
_RETIRED_SECONDS = 60.0
"""Longer than it takes for the last events of a disarmed site to arrive."""

WhyNot = Callable[[Capture, Argument | BuiltIn, str], str | None]
"""As `Engine.why_not`."""


@dataclass(frozen=True, slots=True)
class KnownSite:
    """A site that events may name."""

    object: Object
    capture: SiteCapture
    why_not: WhyNot
    fields: Sequence[Field] = ()

    @property
    def delivered(self) -> tuple[Delivered, ...]:
        """What the values of its events are, in order."""
        return delivered(self.fields, self.capture)

    def why_missing(self, position: int) -> str:
        """Return why an event has no value at a position: its operand, the engine, or the memory at that moment. Empty
        for what every event has.
        """
        value = self.delivered[position]
        if isinstance(value, Capture):
            return self._why_not_captured(value)
        reason = value.source.why_not_at(self.capture.site)
        return reason or next(
            filter(None, map(self._why_never_captured, value.source.captures)),
            "something that it is computed from could not be read, or it is divided by 0",
        )

    def _why_never_captured(self, capture: Capture) -> str | None:
        subject = self.capture.subject_of(capture)
        if isinstance(subject, StartArgument) or subject is BuiltIn.ELAPSED:
            return None
        return self.why_not(capture, subject, self.object.parsed.architecture)

    def _why_not_captured(self, capture: Capture) -> str:
        subject = self.capture.subject_of(capture)
        if isinstance(subject, StartArgument):
            # of which start, and so what its operand is, each event says anew
            what = _EITHER if capture.is_pointed_to else _HOLDER
            return f"{what} could not be read when the span began"
        reason = self.why_not(capture, subject, self.object.parsed.architecture)
        return reason or _why_unreadable(capture, subject)


_HOLDER, _TARGET = "the memory that holds it", "the memory it points to"
_EITHER = f"{_HOLDER}, or {_TARGET[4:]},"
_REMOVED = "the cgroup was removed, or the server cannot look it up (CAP_DAC_READ_SEARCH)"


def _why_unreadable(capture: Capture, subject: Argument | BuiltIn) -> str:
    """Return why a value that the engine captures may lack in an event; empty if it never does."""
    if isinstance(subject, BuiltIn):
        return _REMOVED if subject in {BuiltIn.CGROUP, BuiltIn.CONTAINER} else ""
    is_in_memory = isinstance(subject.operand, Memory)
    if capture.is_pointed_to:
        return f"{_EITHER if is_in_memory else _TARGET} could not be read"
    return f"{_HOLDER} could not be read" if is_in_memory else ""


class _Retired(NamedTuple):
    """When a site was disarmed, and the number of the next event then."""

    at: float
    next_seq: int


class SiteIds:
    """For any thread. Objects come and go for as long as a subscription lives, so sites are forgotten once no event
    that is kept can name them, and if there are too many.
    """

    def __init__(
        self,
        why_not: WhyNot,
        clock: Callable[[], float] = time.monotonic,
        retired_kept: int = _RETIRED_KEPT,
        ids: Iterator[int] | None = None,
        fields: Sequence[Field] = (),
    ) -> None:
        """why_not: the engine's. retired_kept: how many disarmed sites are remembered at most. ids: to take new ids
        from; several may share one. fields: of the clause.
        """
        self._why_not = why_not
        self._clock = clock
        self._fields = fields
        self._retired_kept = retired_kept
        self._lock = threading.Lock()
        self._sites: OrderedDict[int, KnownSite] = OrderedDict()
        self._ids: dict[tuple[ObjectKey, SiteCapture], int] = {}
        self._new_ids = itertools.count(1) if ids is None else ids
        self._arming: set[int] = set()
        self._hit_untold: set[int] = set()
        self._armed: set[int] = set()
        self._retired: OrderedDict[int, _Retired] = OrderedDict()
        self._late: dict[int, str] = {}

    def id_of(self, found: Object, capture: SiteCapture) -> int:
        """Return the id of a site, the same for the same site."""
        with self._lock:
            return self._id_of(found, capture)

    def id_to_arm(self, found: Object, capture: SiteCapture, added_late: str | None = None) -> int:
        """Like id_of, for a site whose events may come from now on: it is known until it is retired.

        added_late: why the daemon adds its hits up, if it does.
        """
        with self._lock:
            site_id = self._id_of(found, capture)
            if added_late is not None:
                self._late[site_id] = added_late
            self._arming.add(site_id)
            self._retired.pop(site_id, None)
            return site_id

    def _id_of(self, found: Object, capture: SiteCapture) -> int:
        known_id = self._ids.get((found.key, capture))
        if known_id is not None:
            return known_id
        new_id = next(self._new_ids)
        self._ids[found.key, capture] = new_id
        self._sites[new_id] = KnownSite(found, capture, self._why_not, self._fields)
        return new_id

    def known(self, site_ids: Iterable[int]) -> dict[int, KnownSite]:
        with self._lock:
            return {site_id: self._sites[site_id] for site_id in site_ids if site_id in self._sites}

    @property
    def armed(self) -> int:
        """How many sites are armed."""
        return len(self._armed)

    def added_late(self) -> dict[str, int]:
        """Return why the daemon adds hits up, each reason with the number of sites that it concerns."""
        with self._lock:
            return Counter(reason for site_id, reason in self._late.items() if site_id in self._armed)

    def hit(self, site_ids: Callable[[], Iterable[int]]) -> None:
        """Take note that sites fired where the client may trace, even if it does not know yet that they are armed."""
        # this is called for each batch, and nearly always the client knows
        if self._arming:
            with self._lock:
                self._hit_untold |= self._arming.intersection(site_ids())

    def hit_untold(self) -> frozenset[int]:
        """Return the sites that have fired, and that were never reported as armed."""
        with self._lock:
            return frozenset(self._hit_untold)

    def arm(self, site_ids: Collection[int]) -> None:
        with self._lock:
            self._arming.difference_update(site_ids)
            self._hit_untold.difference_update(site_ids)
            self._armed.update(site_ids)
            for site_id in site_ids if self._retired else ():
                self._retired.pop(site_id, None)

    def retire(self, site_ids: Iterable[int], next_seq: int) -> None:
        """Take note that sites were disarmed or refused. next_seq: of the next event.

        What fired while they were being armed, and was never told, is told at the end.
        """
        with self._lock:
            retired = dict.fromkeys(site_ids, _Retired(self._clock(), next_seq))
            self._arming.difference_update(retired)
            self._armed.difference_update(retired)
            self._retired.update(retired)

    def forget_unused(self, first_kept: int) -> None:
        """first_kept: the number of the first event that can still be read."""
        with self._lock:
            excess = len(self._sites) - len(self._armed) - len(self._arming) - self._retired_kept
            if excess > 0:
                in_use = self._armed | self._arming
                for site_id in [site_id for site_id in self._sites if site_id not in in_use][:excess]:
                    self._forget(site_id)
            before = self._clock() - _RETIRED_SECONDS
            while self._retired:
                site_id, retired = next(iter(self._retired.items()))
                if retired.at > before or retired.next_seq > first_kept:
                    break
                self._forget(site_id)

    def _forget(self, site_id: int) -> None:
        self._hit_untold.discard(site_id)
        self._retired.pop(site_id, None)
        self._late.pop(site_id, None)
        site = self._sites.pop(site_id, None)
        if site is not None:
            self._ids.pop((site.object.key, site.capture), None)
