"""From the figures that the daemon's parts keep anyway to metrics; docs/metrics.md lists them.

No label is of a client's or a program's choosing, so that nobody outside can make many time series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from stapsdtd import __version__
from stapsdtd.metrics.sources import Sources
from stapsdtd.runtime.latency import BOUNDS, Latency


class StapsdtdCollector(Collector):
    """Used by one thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._told: dict[tuple[str, str], float] = {}

    def describe(self) -> list[Metric]:
        """Have nothing collected when it is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "stapsdtd_build",
            "The daemon's version and the engine that captures.",
            {"version": __version__, "engine": self._sources.engine.name},
        )
        yield _gauge(
            "stapsdtd_serving", "1 where events can be captured, else 0.", int(self._sources.health.is_serving)
        )
        yield from self._events()
        yield from self._capture()
        yield from self._clients()
        yield from self._host()

    def _events(self) -> Iterator[Metric]:
        figures = self._sources.subscriptions.totals.metrics()
        account = figures.account
        yield self._counter(
            "stapsdtd_events",
            "Events by what became of them, summed over all subscriptions there ever were; see also those lost.",
            "outcome",
            {"delivered": account.delivered, "filtered": account.filtered, "unread": figures.unread},
        )
        yield self._counter(
            "stapsdtd_events_lost",
            "Events that were lost, by the stage at which.",
            "stage",
            {
                "kernel_buffer": account.lost_kernel_buffer,
                "decode": account.lost_decode,
                "queue": account.lost_queue,
                "quota": account.lost_quota,
            },
        )
        yield _gauge("stapsdtd_events_in_flight", "Events in buffers and queues, to be delivered.", account.in_flight)
        yield _gauge("stapsdtd_subscriptions", "Subscriptions there are.", figures.subscriptions)
        yield _gauge(
            "stapsdtd_queue_unread_bytes", "What waits in all queues to be delivered.", figures.queue_unread_bytes
        )
        yield _gauge("stapsdtd_queue_limit_bytes", "What all queues may hold.", figures.queue_limit_bytes)

    def _capture(self) -> Iterator[Metric]:
        engine = self._sources.engine.metrics()
        yield _gauge("stapsdtd_attachments", "Sites that are armed.", engine.attachments)
        yield _gauge("stapsdtd_groups", "tracefs events that hold the armed sites.", engine.groups)
        filled = GaugeMetricFamily("stapsdtd_ring_filled_bytes", _RING + " what waits to be read.", labels=["ring"])
        size = GaugeMetricFamily("stapsdtd_ring_size_bytes", _RING + " what it holds.", labels=["ring"])
        for ring in engine.rings:
            filled.add_metric([ring.name], ring.filled_bytes)
            size.add_metric([ring.name], ring.size_bytes)
        yield filled
        yield size
        yield self._counter(
            "stapsdtd_stray_hits", "Hits and records that were nobody's; any is a defect.", None, {"": engine.strays}
        )
        unread = engine.unread
        yield self._counter(
            "stapsdtd_values_unread",
            "Values that were not in memory at the hit, by what became of them.",
            "outcome",
            {"from_file": unread.from_file, "unavailable": unread.unavailable},
        )
        yield self._counter(
            "stapsdtd_pages",
            "Pages that hits did not find in memory, by whether they were brought in for later ones.",
            "outcome",
            {"touched": unread.pages_touched, "refused": unread.pages_refused},
        )
        yield _gauge("stapsdtd_pages_stuck", "Owners whose page has not come for more than a second.", unread.stuck)
        yield _histogram(
            "stapsdtd_arm_seconds", "Arming one object's sites for a subscription.", self._sources.subscriptions.arming
        )

    def _clients(self) -> Iterator[Metric]:
        relay = self._sources.relay
        yield _gauge("stapsdtd_connections", "Connections of clients.", relay.connections)
        yield _gauge("stapsdtd_clients", "Different clients that are connected.", relay.clients)
        refusals = self._sources.gate.refusals
        yield self._counter(
            "stapsdtd_refusals",
            "What roles, quotas and limits refused.",
            "what",
            {"connection": refusals["connection"], "call": refusals["call"]},
        )
        yield self._counter(
            "stapsdtd_foreign_hits_refusals",
            "How often an object was disarmed, since it cost processes too much that its client does not see.",
            None,
            {"": self._sources.subscriptions.foreign.exceeded},
        )

    def _host(self) -> Iterator[Metric]:
        known = self._sources.registry.metrics()
        yield _gauge("stapsdtd_processes", "Processes that are watched.", known.processes)
        yield _gauge("stapsdtd_objects", "Files with probes that processes map.", known.objects)
        yield _gauge("stapsdtd_probes", "Probes in them.", known.probes)
        watcher, parser = self._sources.watcher, self._sources.parser
        yield self._counter("stapsdtd_rescans", "How often all of /proc was read.", None, {"": watcher.rescans})
        yield _histogram(
            "stapsdtd_process_scan_seconds",
            "Looking at what a process maps, with what is parsed and armed therefore.",
            watcher.looking,
        )
        yield _histogram("stapsdtd_parse_seconds", "Parsing a file in the sandbox.", parser.parsing)
        yield self._counter(
            "stapsdtd_parse_failures",
            "Files that could not be parsed: the file's fault, or the sandboxed worker failed, ended or hung.",
            "reason",
            {"file": parser.failures["file"], "worker": parser.failures["worker"]},
        )
        yield self._counter("stapsdtd_sandbox_starts", "How often the sandbox was started.", None, {"": parser.starts})

    def _counter(self, name: str, text: str, label: str | None, values: Mapping[str, int]) -> Metric:
        """What was told never gets less: an event that a client names as missing changes from delivered to lost."""
        family = CounterMetricFamily(name, text, labels=[label] if label else [])
        for value, count in values.items():
            told = self._told[name, value] = max(self._told.get((name, value), 0), count)
            family.add_metric([value] if label else [], told)
        return family


_RING = "By buffer between kernel and daemon (bpf: its records' bytes; ftrace: its CPU),"


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _histogram(name: str, text: str, latency: Latency) -> Metric:
    found = latency.distribution()
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], found.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, text, buckets, found.total_seconds)
