"""Exports the counters of the daemon's parts as metrics; docs/metrics.md lists them.

No label value is chosen by a client or a traced program, so neither can create many time series: clients have series
of their own only while they are connected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from stapsdtd import __version__
from stapsdtd.api.access import Refused
from stapsdtd.metrics.sources import Sources
from stapsdtd.runtime.latency import BOUNDS, Latency


class StapsdtdCollector(Collector):
    """Collects all metrics. For use by one thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._exported: dict[tuple[str, str], float] = {}

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "stapsdtd_build",
            "The daemon's version and capture engine.",
            {"version": __version__, "engine": self._sources.engine.name},
        )
        yield _gauge(
            "stapsdtd_serving", "1 if events can be captured, 0 otherwise.", int(self._sources.health.is_serving)
        )
        yield from self._events()
        yield from self._capture()
        yield from self._clients()
        yield from self._host()
        threads = {**self._sources.slices, "reader": self._sources.engine.metrics().slices}
        yield _histograms(
            "stapsdtd_slice_seconds",
            "Processor time that a thread which everybody shares took at a stretch, by thread.",
            "thread",
            threads,
        )

    def _events(self) -> Iterator[Metric]:
        totals = self._sources.subscriptions.totals.metrics()
        account = totals.account
        yield self._counter(
            "stapsdtd_events",
            "Events by outcome, over all subscriptions, ended ones included; lost events are counted separately.",
            "outcome",
            {
                "delivered": account.delivered,
                "aggregated": account.aggregated,
                "filtered": account.filtered,
                "started": account.spans.starts,
                "unmatched": account.spans.unmatched,
                "unread": totals.unread,
            },
        )
        yield self._counter(
            "stapsdtd_events_lost",
            "Lost events, by the stage that lost them.",
            "stage",
            {
                "kernel_buffer": account.lost_kernel_buffer,
                "decode": account.lost_decode,
                "queue": account.lost_queue,
                "quota": account.lost_quota,
                "table_full": account.lost_table_full,
                "missed": account.lost_missed,
                "filter": account.lost_filter,
            },
        )
        yield _gauge("stapsdtd_events_in_flight", "Events in buffers and queues.", account.in_flight)
        yield _gauge("stapsdtd_subscriptions", "Subscriptions.", totals.subscriptions)
        yield _gauge(
            "stapsdtd_queue_unread_bytes", "Events in all queues waiting to be delivered.", totals.queue_unread_bytes
        )
        yield _gauge("stapsdtd_queue_limit_bytes", "Capacity of all queues together.", totals.queue_limit_bytes)

    def _capture(self) -> Iterator[Metric]:
        engine = self._sources.engine.metrics()
        yield _gauge("stapsdtd_attachments", "Armed sites.", engine.attachments)
        yield _gauge("stapsdtd_groups", "Links and tracefs events that hold the armed sites.", engine.groups)
        filled = GaugeMetricFamily("stapsdtd_ring_filled_bytes", "Bytes waiting to be read, " + _RING, labels=["ring"])
        size = GaugeMetricFamily("stapsdtd_ring_size_bytes", "Capacity, " + _RING, labels=["ring"])
        for ring in engine.rings:
            filled.add_metric([ring.name], ring.filled_bytes)
            size.add_metric([ring.name], ring.size_bytes)
        yield filled
        yield size
        yield self._counter(
            "stapsdtd_stray_hits",
            "Hits and records of no subscription, which were dropped; any is a bug.",
            None,
            {"": engine.strays},
        )
        unread = engine.unread
        yield self._counter(
            "stapsdtd_values_unread",
            "Values that were not in memory at the hit, by outcome.",
            "outcome",
            {"from_file": unread.from_file, "unavailable": unread.unavailable},
        )
        yield self._counter(
            "stapsdtd_pages",
            "Pages that were not in memory at a hit, by whether they were brought in for later hits.",
            "outcome",
            {"touched": unread.pages_touched, "refused": unread.pages_refused},
        )
        yield _gauge(
            "stapsdtd_pages_stuck", "Users with a page that has not been read for more than a second.", unread.stuck
        )
        yield _histogram(
            "stapsdtd_arm_seconds",
            "Time to arm one object's sites for a subscription.",
            self._sources.subscriptions.arming.latency,
        )

    def _clients(self) -> Iterator[Metric]:
        relay = self._sources.relay
        yield _gauge("stapsdtd_connections", "Open connections.", relay.connections)
        yield _gauge("stapsdtd_clients", "Distinct connected clients.", relay.clients)
        refusals = self._sources.gate.refusals
        yield self._counter(
            "stapsdtd_refusals",
            "Connections, connections for their frames, and calls refused because of roles, quotas or limits.",
            "what",
            {what: refusals[what] for what in get_args(Refused)},
        )
        yield self._counter(
            "stapsdtd_foreign_hits_refusals",
            "Objects disarmed because they cost processes too much that the client may not see.",
            None,
            {"": self._sources.subscriptions.arming.foreign.exceeded},
        )
        yield from self._shares()

    def _shares(self) -> Iterator[Metric]:
        """What connected clients took of the daemon; there is a series for all others together."""
        taken = self._sources.gate.shares.taken(self._sources.relay.client_names)
        seconds = CounterMetricFamily(
            "stapsdtd_client_cpu_seconds",
            "Processor time that was charged to clients, by kind of work.",
            labels=["client", "work"],
        )
        waited = CounterMetricFamily(
            "stapsdtd_client_waited_seconds", "Time that calls of clients beyond their share waited.", labels=["client"]
        )
        refused = CounterMetricFamily(
            "stapsdtd_client_refusals", "Connections and calls of clients that were refused.", labels=["client"]
        )
        frames = CounterMetricFamily("stapsdtd_client_frames", "HTTP/2 frames that clients sent.", labels=["client"])
        for client, each in taken.items():
            for work, charged in each.seconds.items():
                seconds.add_metric([client, work], charged)
            waited.add_metric([client], each.waited)
            refused.add_metric([client], each.refused)
            frames.add_metric([client], each.frames)
        yield from (seconds, waited, refused, frames)

    def _host(self) -> Iterator[Metric]:
        registry = self._sources.registry.metrics()
        yield _gauge("stapsdtd_processes", "Watched processes.", registry.processes)
        yield _gauge("stapsdtd_objects", "Mapped files with probes.", registry.objects)
        yield _gauge("stapsdtd_probes", "Probes in mapped files.", registry.probes)
        inventory = self._sources.inventory.status
        yield _gauge("stapsdtd_inventory_files", "Installed files with probes.", inventory.files)
        yield _gauge(
            "stapsdtd_inventory_scanned_timestamp_seconds",
            "When installed files were last scanned, as Unix time; 0 if they have not been.",
            int(inventory.scanned_at),
        )
        watcher, parser = self._sources.watcher, self._sources.parser
        yield self._counter("stapsdtd_rescans", "Scans of all of /proc.", None, {"": watcher.rescans})
        yield _histogram(
            "stapsdtd_process_scan_seconds",
            "Time to scan a process's mappings, including parsing and arming what was found.",
            watcher.looking,
        )
        yield _histogram("stapsdtd_parse_seconds", "Time to parse a file in the sandbox.", parser.parsing)
        yield self._counter(
            "stapsdtd_parse_failures",
            "Files that could not be parsed, because of the file, or because the sandboxed worker failed or hung.",
            "reason",
            {"file": parser.failures["file"], "worker": parser.failures["worker"]},
        )
        yield self._counter("stapsdtd_sandbox_starts", "Starts of the sandbox.", None, {"": parser.starts})

    def _counter(self, name: str, text: str, label: str | None, values: Mapping[str, int]) -> Metric:
        """Return a counter that never decreases, though counts may: a delivered event can turn out to be lost."""
        family = CounterMetricFamily(name, text, labels=[label] if label else [])
        for value, count in values.items():
            exported = self._exported[name, value] = max(self._exported.get((name, value), 0), count)
            family.add_metric([value] if label else [], exported)
        return family


_RING = "by buffer between kernel and daemon (bpf: by record size; ftrace: by CPU)."


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _histogram(name: str, text: str, latency: Latency) -> Metric:
    return HistogramMetricFamily(name, text, *_buckets(latency))


def _histograms(name: str, text: str, label: str, latencies: Mapping[str, Latency]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, latency in latencies.items():
        family.add_metric([value], *_buckets(latency))
    return family


def _buckets(latency: Latency) -> tuple[list[tuple[str, float]], float]:
    """Return how much is within each bound, and the sum in seconds."""
    distribution = latency.distribution()
    within = itertools.accumulate(distribution.counts)
    return list(zip([*map(str, BOUNDS), "+Inf"], within, strict=True)), distribution.total_seconds
