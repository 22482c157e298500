"""One subscription's pairing of starts and ends, where the engine does not pair them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel import procfs
from stapsdtd.model import SiteCapture
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.spans.pairing import Paired, Pairer
from stapsdtd.spans.span import OpenSpans, Span, SpanCounts, Thread

_MAX_LOOKS = 500
"""Each takes the control thread some 20 us."""

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Pairing:
    """Any thread may call it."""

    def __init__(
        self,
        span: Span,
        known_sites: KnownSites,
        of_pairs: Callable[[SiteCapture], SiteCapture],
        max_bytes: int,
        max_looks: int = _MAX_LOOKS,
        *,
        starts: ConditionFilter | None = None,
    ) -> None:
        """of_pairs: see `ClauseSpec`. max_bytes: see `Pairer`. max_looks: how many processes' threads are looked at
        in a call. starts: tells which make pairs that are wanted; None if all do.
        """
        self._starts = starts
        self._pairer = Pairer(span, max_bytes)
        self._known_sites = known_sites
        self._of_pairs = of_pairs
        self._max_looks = max_looks
        self._looked_at = 0

    def add(self, batch: EventBatch) -> Paired:
        """Take hits, in the order of time. Return pairs."""
        known = self._known_sites(batch.site_ids())
        wanted = self._starts.judge(batch) if self._starts else (None, None)
        sites = {site_id: self._of_pairs(site.capture) for site_id, site in known.items()}
        return self._pairer.add(batch, sites, *wanted)

    def ended_threads(self) -> frozenset[Thread]:
        """Return threads that have ended although spans wait for them. Hits of theirs may still be on their way.

        Each call looks at some processes, and the next one at others, if there are very many.
        """
        threads = self._pairer.waiting()
        pids = sorted({thread.pid for thread in threads})
        begin = bisect_right(pids, self._looked_at) if len(pids) > self._max_looks else 0
        looked_at = (pids[begin:] + pids[:begin])[: self._max_looks]
        self._looked_at = looked_at[-1] if looked_at else 0
        alive = {pid: _live_threads(pid) for pid in looked_at}
        return frozenset(each for each in threads if each.pid in alive and each.tid not in alive[each.pid])

    def open_spans(self) -> OpenSpans:
        """Return the starts that wait, of the hits that were added."""
        return self._pairer.open_spans()

    def has_late(self, now_ns: int) -> bool:
        """Report whether a start has waited for too long. Its end may be on its way."""
        return self._pairer.has_late(now_ns)

    def sweep(self, ended: Iterable[Thread], now_ns: int) -> SpanCounts:
        """Remove starts without an end to come: all hits of threads that ended, and those before now_ns, were added."""
        return self._pairer.end_of_threads(ended) + self._pairer.expire(now_ns)


def _live_threads(pid: int) -> set[int]:
    threads = set(procfs.thread_ids(pid))
    # a main thread that ended is listed as long as there are others
    stat = procfs.stat(pid)
    return threads - {pid} if stat is None or stat.state in procfs.DEAD else threads
