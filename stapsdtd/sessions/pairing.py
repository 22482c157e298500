"""One subscription's pairing of starts and ends, where the engine does not pair them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping

from stapsdtd.events.batch import EventBatch
from stapsdtd.model import SiteCapture
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.spans.pairing import Paired, Pairer
from stapsdtd.spans.span import OpenSpans, Span, SpanCounts, Thread

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Pairing:
    """Any thread may call it."""

    def __init__(
        self,
        span: Span,
        known_sites: KnownSites,
        of_pairs: Callable[[SiteCapture], SiteCapture],
        max_bytes: int,
        *,
        starts: ConditionFilter | None = None,
    ) -> None:
        """of_pairs: see `ClauseSpec`. max_bytes: see `Pairer`. starts: tells which make pairs that are wanted; None if
        all do.
        """
        self._starts = starts
        self._pairer = Pairer(span, max_bytes)
        self._known_sites = known_sites
        self._of_pairs = of_pairs

    def add(self, batch: EventBatch) -> Paired:
        """Take hits, in the order of time. Return pairs."""
        known = self._known_sites(batch.site_ids())
        wanted = self._starts.judge(batch) if self._starts else (None, None)
        sites = {site_id: self._of_pairs(site.capture) for site_id, site in known.items()}
        return self._pairer.add(batch, sites, *wanted)

    def waiting(self) -> Generator[None, None, set[Thread]]:
        """Return, in steps, the threads whose end would end spans."""
        return self._pairer.waiting()

    def open_spans(self) -> Generator[None, None, OpenSpans]:
        """Return, in steps, the starts that wait, of the hits that were added."""
        return self._pairer.open_spans()

    def has_late(self, now_ns: int) -> Generator[None, None, bool]:
        """Report, in steps, whether a start has waited for too long. Its end may be on its way."""
        return self._pairer.has_late(now_ns)

    def sweep(self, ended: Iterable[Thread], now_ns: int) -> Generator[None, None, SpanCounts]:
        """Remove, in steps, starts without an end to come: all hits of threads that ended, and those before now_ns,
        were added.
        """
        died = yield from self._pairer.end_of_threads(ended)
        return died + (yield from self._pairer.expire(now_ns))
