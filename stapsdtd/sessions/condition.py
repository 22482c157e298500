"""The part of a subscription's filter that no engine tests: evaluated on its events, in the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.columns import Bools
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.model import SiteCapture
from stapsdtd.query.evaluate import truth_of
from stapsdtd.query.site_filter import SiteFilter
from stapsdtd.sessions.site_ids import KnownSite

_MOST_KEPT = 4096

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class ConditionFilter:
    """Leaves out events that do not satisfy a condition, and takes off what was captured for that alone."""

    def __init__(self, filter_at: Callable[[SiteCapture], SiteFilter], known_sites: KnownSites) -> None:
        """filter_at: returns the whole filter at a site; what the engine tests of it is not evaluated again."""
        self._filter_at = filter_at
        self._known_sites = known_sites
        self._filters: dict[int, tuple[SiteFilter, str]] = {}

    def evaluates(self, batch: EventBatch) -> bool:
        """Report whether something is to be evaluated of a batch's events."""
        return any(each.evaluated is not None for each, _ in self._filters_of(batch.site_ids()).values())

    def rest(self, batch: EventBatch) -> tuple[EventBatch, int]:
        """Return the events that are left, and how many of the others are undecided."""
        if not self.evaluates(batch):
            return batch, 0
        filters = self._filters_of(batch.site_ids())
        tables = [
            ValueTable(events.tables[0].columns[: filters[site_id][0].width], positions)
            for site_id, positions, events in batch.by_site()
        ]
        satisfied, undecided = self.judge(batch)
        return replace(batch, tables=unite(tables)).take(np.flatnonzero(satisfied)), int(np.count_nonzero(undecided))

    def judge(self, batch: EventBatch) -> tuple[Bools, Bools]:
        """Report for each event whether it satisfies the condition, and whether it does not since that is undecided: it
        needs what could not be read, or divides by 0.
        """
        filters = self._filters_of(batch.site_ids())
        satisfied, undecided = np.ones(len(batch), np.bool_), np.zeros(len(batch), np.bool_)
        for site_id, positions, events in batch.by_site():
            site_filter, path = filters[site_id]
            if site_filter.evaluated is not None:
                of_site = SiteEvents(site_filter.site, path, site_filter.captures, events)
                truth = truth_of(site_filter.evaluated, of_site)
                satisfied[positions] = truth.known
                if truth.unavailable is not None:
                    undecided[positions] = truth.unavailable
        return satisfied, undecided

    def _filters_of(self, site_ids: list[int]) -> dict[int, tuple[SiteFilter, str]]:
        new = [site_id for site_id in site_ids if site_id not in self._filters]
        if len(self._filters) + len(new) > _MOST_KEPT:
            self._filters.clear()
            new = site_ids
        for site_id, known in self._known_sites(new).items():
            self._filters[site_id] = self._filter_at(known.capture), known.object.path
        return {site_id: self._filters[site_id] for site_id in site_ids}
