"""Metrics and health of the real server and subscriptions, over an engine and a host that a test plays."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stapsdtd import __version__
from stapsdtd.api.server import SERVICE
from stapsdtd.capture.engine import LossStage, UnreadMetrics
from stapsdtd.config import USER, Limits, Role
from stapsdtd.inventory.inventory import Inventory, InventoryStatus
from stapsdtd.metrics.collector import StapsdtdCollector
from stapsdtd.metrics.sources import Sources
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.health import Health
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.latency import Latency
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, served
from tests.support import ROOT, wait_for
from tests.unit.samples import batch, site

Figures = dict[str, float]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(2) as started:
        yield started


@pytest.fixture
def ended_kept_seconds() -> float:
    return 10


@pytest.fixture
def server(tmp_path: Path, pids: list[int], ended_kept_seconds: float) -> Iterator[Served]:
    """Probes a and b are mapped by the first process."""
    with served(tmp_path, ended_kept_seconds=ended_kept_seconds) as started:
        started.map(pids[0], started.file_object(site("a", 1), site("b", 2), site("b", 3)))
        yield started


class Scraped:
    """What Prometheus would see of a server."""

    def __init__(self, server: Served) -> None:
        self.watcher = SimpleNamespace(looking=Latency(), rescans=3)
        self.parser = SimpleNamespace(parsing=Latency(), failures={"file": 4, "worker": 5}, starts=2)

        async def tell(_: str) -> None: ...

        self.health = Health([server.engine.problem], tell)
        sources = Sources(
            server.engine,
            server.registry,
            cast("Watcher", self.watcher),
            cast("SandboxedParser", self.parser),
            server.subscriptions,
            server.gate,
            server.relay,
            self.health,
            cast("Inventory", SimpleNamespace(status=InventoryStatus(files=82, scanned_at=1_700_000_000.5))),
            {"matching": server.matching.slices},
        )
        self._registry = CollectorRegistry()
        self._registry.register(StapsdtdCollector(sources))

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def figures(self) -> Figures:
        return {
            sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        return self.figures()[f"stapsdtd_{name}"]


@pytest.fixture
def scraped(server: Served) -> Scraped:
    return Scraped(server)


def fates(figures: Figures) -> tuple[float, ...]:
    """delivered, filtered, unread, in flight; lost by: kernel buffer, decoding, queue, quota, tables, missed, filter"""
    return tuple(
        figures[f"stapsdtd_events{name}"]
        for name in (
            *("_total[delivered]", "_total[filtered]", "_total[unread]", "_in_flight"),
            *("_lost_total[kernel_buffer]", "_lost_total[decode]", "_lost_total[queue]", "_lost_total[quota]"),
            "_lost_total[table_full]",
            "_lost_total[missed]",
            "_lost_total[filter]",
        )
    )


def test_a_server_that_does_nothing(server: Served, scraped: Scraped) -> None:
    assert server.held() == []
    figures = scraped.figures()
    assert figures[f"stapsdtd_build_info[fake][{__version__}]"] == 1
    assert figures["stapsdtd_serving"] == 1
    assert fates(figures) == (0,) * 11
    assert [figures[f"stapsdtd_{name}"] for name in ("connections", "clients", "subscriptions")] == [1, 1, 0]
    assert [figures[f"stapsdtd_{name}"] for name in ("processes", "objects", "probes")] == [1, 1, 2]
    assert (figures["stapsdtd_rescans_total"], figures["stapsdtd_sandbox_starts_total"]) == (3, 2)
    assert figures["stapsdtd_parse_failures_total[file]"] == 4
    assert figures["stapsdtd_parse_failures_total[worker]"] == 5


def test_what_is_gone_does_not_count(server: Served, scraped: Scraped, pids: list[int]) -> None:
    other = server.file_object(site("c", 1), name="other")
    server.map(pids[1], other, "other")
    assert [scraped[name] for name in ("processes", "objects", "probes")] == [2, 2, 3]
    server.unmap(pids[1], other)
    assert [scraped[name] for name in ("processes", "objects", "probes")] == [2, 1, 2]


def test_attachments_rings_and_queues(server: Served, scraped: Scraped) -> None:
    figures: Figures = {}
    for number in (1, 2):
        server.subscribe(queue_bytes=1 << 20)
        figures = scraped.figures()
        assert figures["stapsdtd_subscriptions"] == number
        assert figures["stapsdtd_attachments"] == 3
        assert figures["stapsdtd_groups"] == number
        assert figures["stapsdtd_queue_limit_bytes"] == number << 20
        assert figures["stapsdtd_arm_seconds_count"] == number
    assert (figures["stapsdtd_ring_filled_bytes[64]"], figures["stapsdtd_ring_size_bytes[64]"]) == (128, 4096)
    assert figures["stapsdtd_queue_unread_bytes"] == 0
    next(iter(server.engine.sinks.values())).deliver(batch([1, 2]))
    assert scraped["queue_unread_bytes"] > 0


def test_what_hits_could_not_read_and_what_was_nobodys(server: Served, scraped: Scraped) -> None:
    names = (
        "stray_hits_total", "values_unread_total[from_file]", "values_unread_total[unavailable]",
        "pages_total[touched]", "pages_total[refused]", "pages_stuck",
    )  # fmt: skip
    assert [scraped[name] for name in names] == [0] * 6
    server.engine.strays = 1
    server.engine.unread = UnreadMetrics(from_file=2, unavailable=3, pages_touched=4, pages_refused=5, stuck=6)
    assert [scraped[name] for name in names] == [1, 2, 3, 4, 5, 6]


def test_events_that_are_on_their_way_through_the_kernel_are_in_flight(server: Served, scraped: Scraped) -> None:
    server.subscribe()
    server.sink.fired(10)
    server.sink.filtered(2)
    server.lose(LossStage.KERNEL_BUFFER, 1)
    server.fire(batch([1, 2, 3]))
    (held,) = server.held()
    account = held.account
    assert (account.fired, account.in_flight, account.filtered, account.lost_kernel_buffer) == (10, 7, 2, 1)
    assert fates(scraped.figures()) == (0, 2, 0, 7, 1, 0, 0, 0, 0, 0, 0)


def test_latencies_are_histograms(scraped: Scraped) -> None:
    for seconds in (0.0002, 0.0002, 0.3, 60):
        scraped.parser.parsing.observe(seconds)
        scraped.watcher.looking.observe(seconds)
    figures = scraped.figures()
    for name in ("parse", "process_scan"):
        buckets = [
            figures[f"stapsdtd_{name}_seconds_bucket[{bound}]"] for bound in ("0.0001", "0.00025", "0.5", "+Inf")
        ]
        assert buckets == [0, 2, 3, 4]
        assert figures[f"stapsdtd_{name}_seconds_count"] == 4
        assert figures[f"stapsdtd_{name}_seconds_sum"] == pytest.approx(60.3004)


@pytest.mark.parametrize("ended_kept_seconds", [0.2])
def test_events_agree_with_the_account_also_when_subscriptions_ended(server: Served, scraped: Scraped) -> None:
    ident = server.subscribe().subscription_id
    server.fire(batch([1, 2, 3]))
    server.sink.filtered(10)
    for count, stage in zip((20, 30, 40, 50, 60, 70, 80), LossStage, strict=True):
        server.lose(stage, count)
    assert fates(scraped.figures()) == (0, 10, 0, 3, 20, 30, 40, 50, 60, 70, 80)
    messages = server.stream(ident)
    assert next(message for message in messages if message.HasField("rows"))
    wait_for(lambda: scraped["events_total[delivered]"] == 3, "the events to be delivered")
    server.engine.last_events = [batch([4, 5])]
    account = server.unsubscribe(ident)
    end = next(message for message in messages if message.HasField("end")).end.account
    assert (account.in_flight + account.delivered, end.delivered) == (5, 5)
    wait_for(lambda: server.is_forgotten(ident), "the subscription to be forgotten")
    assert fates(scraped.figures()) == (5, 10, 0, 0, 20, 30, 40, 50, 60, 70, 80)
    # another one counts on, and leaves what nobody read
    ident = server.subscribe().subscription_id
    server.engine.last_events = []
    server.fire(batch([6]))
    server.unsubscribe(ident)
    wait_for(lambda: scraped["events_total[unread]"] == 1, "the subscription to be forgotten")
    figures = scraped.figures()
    assert fates(figures) == (5, 10, 1, 0, 20, 30, 40, 50, 60, 70, 80)
    assert (figures["stapsdtd_subscriptions"], figures["stapsdtd_queue_limit_bytes"]) == (0, 0)


@pytest.mark.parametrize("ended_kept_seconds", [0.05])
def test_slow_reader_of_an_ended_subscription_is_still_counted(server: Served, scraped: Scraped) -> None:
    ident = server.subscribe().subscription_id
    # more than what gRPC and sockets hold
    blocks = 100
    for number in range(blocks):
        server.fire(batch(range(number * 10_000, (number + 1) * 10_000)))
    messages = server.stream(ident)
    next(messages)
    server.unsubscribe(ident)
    kept = itertools.count()
    wait_for(lambda: next(kept) > 50, "several times as long as an ended subscription is kept")
    assert scraped["events_in_flight"] > 0
    assert scraped["events_total[unread]"] == 0
    end = next(message for message in messages if message.HasField("end")).end.account
    wait_for(lambda: server.is_forgotten(ident), "the subscription to be forgotten")
    assert end.delivered + end.lost_queue == blocks * 10_000
    assert fates(scraped.figures()) == (end.delivered, 0, 0, 0, 0, 0, end.lost_queue, 0, 0, 0, 0)


def test_totals_never_get_less(server: Served, scraped: Scraped) -> None:
    """A client that lost what it was sent, and comes back when that is no longer kept, changes delivered to lost."""
    ident = server.subscribe(queue_bytes=4096).subscription_id
    server.fire(batch(range(10)))
    messages = server.stream(ident)
    assert next(message for message in messages if message.HasField("rows"))
    wait_for(lambda: scraped["events_total[delivered]"] == 10, "the events to be delivered")
    messages.cancel()
    server.wait_until_streaming(False)
    server.fire(batch(range(10, 100)))
    server.fire(batch(range(100, 110)))
    messages = server.stream(ident, from_seq=1)
    loss = next(message for message in messages if message.HasField("loss")).loss
    account = server.held()[0].account
    assert (account.lost_queue, account.delivered) == (loss.total, account.fired - loss.total - account.in_flight)
    assert scraped["events_lost_total[queue]"] == loss.total
    messages.cancel()
    server.wait_until_streaming(False)
    before = scraped["events_total[delivered]"]
    server.subscriptions.get(ident).clauses[0].log.resume(1)
    server.fire(batch(range(110, 200)))
    server.subscriptions.get(ident).clauses[0].log.resume(1)
    assert server.held()[0].account.delivered < before
    assert scraped["events_total[delivered]"] == before


def test_refusals(tmp_path: Path, pids: list[int]) -> None:
    nobody = Role("nobody", users=("root",), list=("none",), trace=("none",))
    with served(tmp_path, Limits(), roles=[nobody, USER]) as server:
        scraped = Scraped(server)
        assert scraped["refusals_total[call]"] == 0
        with pytest.raises(grpc.RpcError):
            server.subscribe(scope=pb.Scope(pids=[pids[0]]))
        with pytest.raises(grpc.RpcError):
            server.stream("unknown").next()
        assert (scraped["refusals_total[call]"], scraped["refusals_total[connection]"]) == (1, 0)
        server.gate.policy = type(server.gate.policy)([])
        with pytest.raises(grpc.RpcError):
            server.held()
        assert scraped["refusals_total[call]"] == 2
        with grpc.insecure_channel(f"unix:{server.socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            asked: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError):
                asked.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert scraped["refusals_total[connection]"] >= 1


def test_nothing_that_clients_or_programs_choose_is_in_a_label(server: Served, scraped: Scraped) -> None:
    server.subscribe("app:a()", where="pid == 1", scope=pb.Scope(execnames=["odd"]))
    values = {
        (label, value)
        for family in text_string_to_metric_families(scraped.text())
        for sample in family.samples
        for label, value in sample.labels.items()
        if label not in {"le", "version"}
    }
    client = f"uid {os.getuid()}"
    assert {value for label, value in values if label == "client"} == {client, "others"}
    assert {value for label, value in values if label == "work"} <= {
        "requests", "matching", "arming", "evaluating", "frames",
    }  # fmt: skip
    values = {(label, value) for label, value in values if label not in {"client", "work"}}
    assert values == {
        ("engine", "fake"), ("outcome", "delivered"), ("outcome", "filtered"), ("outcome", "unread"),
        ("outcome", "from_file"), ("outcome", "unavailable"), ("outcome", "touched"), ("outcome", "refused"),
        ("outcome", "aggregated"), ("outcome", "started"), ("outcome", "unmatched"), ("stage", "table_full"),
        ("stage", "missed"), ("stage", "filter"),
        ("stage", "kernel_buffer"), ("stage", "decode"), ("stage", "queue"), ("stage", "quota"),
        ("ring", "64"), ("what", "connection"), ("what", "frames"), ("what", "call"), ("reason", "file"),
        ("reason", "worker"), ("thread", "matching"), ("thread", "reader"),
    }  # fmt: skip


def test_a_client_has_series_while_it_is_connected(server: Served, scraped: Scraped) -> None:
    client = f"uid {os.getuid()}"
    server.subscribe("app:a()")
    taken = scraped.figures()
    assert taken[f"stapsdtd_client_cpu_seconds_total[{client}][requests]"] > 0
    assert taken[f"stapsdtd_client_frames_total[{client}]"] > 0
    assert taken[f"stapsdtd_client_waited_seconds_total[{client}]"] == 0
    with pytest.raises(grpc.RpcError):
        server.stream("unknown").next()
    before = scraped[f"client_refusals_total[{client}]"]
    server.gate.policy = type(server.gate.policy)([])
    with pytest.raises(grpc.RpcError):
        server.held()
    assert scraped[f"client_refusals_total[{client}]"] == before + 1
    server.channel.close()
    wait_for(lambda: not server.relay.connections, "the client to disconnect")
    left = scraped.figures()
    assert f"stapsdtd_client_frames_total[{client}]" not in left
    assert left["stapsdtd_client_frames_total[others]"] >= taken[f"stapsdtd_client_frames_total[{client}]"]


def test_all_metrics_are_documented_and_no_others(server: Served, scraped: Scraped) -> None:
    assert server.held() == []
    documented = set(re.findall(r"^\| `(stapsdtd_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    told = re.findall(r"^# (?:HELP|TYPE) (\w+) ", scraped.text(), re.MULTILINE)
    assert documented == set(told)
    assert all(told.count(name) == 2 for name in documented)


class TestHealth:
    @pytest.fixture
    def stall_seconds(self) -> float:
        return 15

    @pytest.fixture
    def check(self, server: Served, stall_seconds: float) -> Iterator[Any]:
        """Has health watched as the daemon does, and answers what a client is told of both services."""

        async def tell(problem: str) -> None:
            await server.server.set_health(is_serving=not problem)

        async def start() -> Health:
            heartbeat = Heartbeat("the control thread", server.control.ask, stall_seconds)
            made = Health([server.engine.problem, heartbeat.problem], tell, pause_seconds=0.01)
            made.start()
            return made

        health = server.in_api(start())
        stub: Any = health_pb2_grpc.HealthStub(server.channel)

        def check() -> Any:
            return [
                stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_SECONDS).status
                for name in ("", SERVICE)
            ]

        yield check
        server.in_api(health.stop())

    def test_engine_that_cannot_capture_is_not_serving_until_it_can(self, server: Served, check: Any) -> None:
        assert check() == [SERVING] * 2
        server.engine.trouble = "tracefs is gone"
        wait_for(lambda: check() == [NOT_SERVING] * 2, "health to say so")
        server.engine.trouble = None
        wait_for(lambda: check() == [SERVING] * 2, "health to recover")

    @pytest.mark.parametrize("stall_seconds", [0.1])
    def test_control_thread_that_hangs_is_not_serving_until_it_goes_on(self, server: Served, check: Any) -> None:
        with server.control_held():
            wait_for(lambda: check() == [NOT_SERVING] * 2, "health to say so")
        wait_for(lambda: check() == [SERVING] * 2, "health to recover")

    def test_who_watches_health_is_told(self, server: Served, check: Any) -> None:
        assert check() == [SERVING] * 2
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        told = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE_SECONDS)
        assert next(told).status == SERVING
        server.engine.trouble = "tracefs is gone"
        assert next(told).status == NOT_SERVING
        told.cancel()


def test_serving_is_told_as_health_says(server: Served, scraped: Scraped) -> None:
    assert scraped["serving"] == 1
    server.engine.trouble = "no"
    server.call_in_api(scraped.health.start)
    wait_for(lambda: scraped["serving"] == 0, "health to say so")
    server.in_api(scraped.health.stop())
