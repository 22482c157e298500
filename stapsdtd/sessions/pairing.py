"""One subscription's pairing of starts and ends, where the engine does not pair them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel import procfs
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.spans.pairing import Paired, Pairer, Thread
from stapsdtd.spans.span import Span, SpanCounts

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Pairing:
    """Any thread may call it."""

    def __init__(self, span: Span, known_sites: KnownSites) -> None:
        self._pairer = Pairer(span)
        self._known_sites = known_sites

    def add(self, batch: EventBatch) -> Paired:
        """Take hits, in the order of time. Return pairs."""
        known = self._known_sites(batch.site_ids())
        return self._pairer.add(batch, {site_id: site.capture for site_id, site in known.items()})

    def ended_threads(self) -> frozenset[Thread]:
        """Return threads that have ended although spans wait for them. Hits of theirs may still be on their way."""
        threads = self._pairer.waiting()
        alive = {pid: _live_threads(pid) for pid in {thread.pid for thread in threads}}
        return frozenset(thread for thread in threads if thread.tid not in alive[thread.pid])

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
