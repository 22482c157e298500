"""Read this first: the daemon's parts, and how they are wired.

    control thread (an event loop)    Watcher ──► Registry ──► Subscriptions ──► Armer: what is to be armed
    arming thread                     Attacher ──► Engine.arm / disarm: tracefs, perf, files
    reader thread (the engine's)      kernel buffers ──► EventSink.deliver ──► EventLog
    main thread (gRPC's event loop)   Relay ──► Gate ──► StapsdtServicer: asks the control thread, reads the logs
                                      Health: checks that the other threads respond
    metrics thread (if configured)    Exporter: reads the parts' metrics when asked
    and for work that may block, threads that nobody waits for: Endings (until no hit uses a plan),
    EventReaper (tracefs events), Paging (pages for later hits), LockedCalls (memory maps), QueueingParser (slow files)

Each piece of state is changed by one thread. `Daemon.stop` keeps the promise that nothing is left behind
(docs/design.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace

from stapsdtd.api.access import Gate, Policy
from stapsdtd.api.backend import Backend
from stapsdtd.api.peers import PeerTable
from stapsdtd.api.relay import Relay
from stapsdtd.api.server import Server
from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded, feature, load
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.cleanup import clean_up
from stapsdtd.capture.engine import Engine
from stapsdtd.capture.ftrace.engine import NOT_OWN, FtraceEngine
from stapsdtd.capture.names import Owner
from stapsdtd.catalog.registry import Registry
from stapsdtd.config import Config, Listener
from stapsdtd.errors import KernelFeatureError, StapsdtdError
from stapsdtd.kernel.allocator import Trimmer, glibc, limit_arenas
from stapsdtd.kernel.features import probe_features
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import nop_feature, probe_nops
from stapsdtd.kernel.process_memory import LocalMemory, touch
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.metrics.sources import Sources
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.threads import Threads
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.control_thread import ControlThread
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.health import Health
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.service_manager import notify, notify_reloading, watched
from stapsdtd.runtime.stopping import StopDeadline
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sandbox.queueing import QueueingParser
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.subscriptions import Subscriptions

_log = logging.getLogger(__name__)
_MIN_DESCRIPTORS = 256
"""An idle daemon has some 90 open."""
_SCAN_SECONDS = 30.0


def make_engine(config: Config, bpf: Loaded | KernelFeatureError, tracefs: Tracefs, threads: Threads) -> Engine:
    """Make the configured engine, or choose one. Raises KernelFeatureError if the configured one cannot work here."""
    owner, buffer_bytes = Owner.this_process(), config.limits.max_total_kernel_buffer_mib << 20
    if isinstance(bpf, Loaded):
        if config.engine != "ftrace":
            memory = LocalMemory(Filesystems(config.filesystems.arm))
            paging = Paging(touch, user_of, memory.local_bytes)
            return BpfEngine(tracefs, owner, bpf, paging, buffer_bytes)
        bpf.close()
    elif config.engine == "bpf":
        raise bpf
    elif config.engine == "auto":
        _log.warning("%s; the ftrace engine is used instead", bpf)
    return FtraceEngine(tracefs, owner, threads.pids_of, buffer_bytes)


class Daemon:
    """One serving daemon. `start` raises StapsdtdError if the host or the configuration does not allow it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._libc = glibc()
        if self._libc is not None:
            # before any thread starts
            limit_arenas(self._libc)
        self._control = ControlThread()
        self._arming = FairThread("stapsdtd-arming")
        self._stopping = contextlib.AsyncExitStack()
        self._on_abort: list[Callable[[], None]] = []

    async def start(self) -> None:
        if self._libc is not None:
            self._stopping.callback(Trimmer(self._libc).close)
        _allow_all_descriptors()
        # these two run while the rest starts
        nop_trial = asyncio.get_running_loop().run_in_executor(None, probe_nops)
        parser = SandboxedParser()
        queueing = QueueingParser(parser)
        self._on_stop(queueing.close)
        self._on_abort.append(parser.abort)
        bpf = load()
        nops = await nop_trial
        features = (*probe_features(), nop_feature(nops), feature(bpf))
        if missing := [each.name for each in features if not each.available]:
            _log.warning("unavailable on this host: %s; run 'stapsdt doctor' to see why", ", ".join(missing))
        tracefs = Tracefs.locate()
        _remove_leftovers(tracefs)
        threads = Threads()
        filesystems = Filesystems(self._config.filesystems.arm)
        engine = make_engine(self._config, bpf, tracefs, threads)
        self._engine = engine
        self._stopping.callback(self._arming.stop)
        self._stopping.push_async_callback(self._shut_down, engine)
        registry = Registry()
        watcher = await self._control.run(
            lambda: Watcher(registry, threads, queueing.parse, filesystems, queueing.root_parsed)
        )
        queueing.on_done = watcher.parsed
        self._on_stop(watcher.stop)
        await self._control.run(watcher.start)
        # the first clients are to find what there is, and the sandbox may take long to start
        scanned = asyncio.wrap_future(await self._control.run(watcher.refresh))
        await asyncio.wait({scanned}, timeout=_SCAN_SECONDS)
        connected = ConnectedClients()
        subscriptions = await self._control.run(
            lambda: Subscriptions(
                registry,
                engine,
                watcher,
                queueing.parse,
                self._config.limits,
                arming_thread=self._arming,
                connected=connected,
                nops=nops,
                filesystems=filesystems,
            )
        )
        peers = PeerTable(connected)
        gate = Gate(peers.find, self._policy(self._config))
        backend = Backend(
            self._control,
            registry,
            watcher.refresh,
            subscriptions,
            self._config.limits,
            features,
            engine.name,
            gate,
            nops,
            self._arming.backlog,
        )
        relay = Relay(peers, gate, self._config.limits.max_connections)
        self._servicer = StapsdtServicer(backend)
        self._server = Server(self._servicer, relay, self._config.listeners)
        self._on_abort.append(self._server.close_listeners)
        self._gate = gate
        self._stopping.push_async_callback(self._server.stop)
        # this runs first, so that streams get their End before the server stops
        self._stopping.push_async_callback(self._end_all, subscriptions)
        await self._server.start()
        heartbeats = (
            Heartbeat("the control thread", self._control.ask),
            Heartbeat("the arming thread", self._arming.ask),
        )
        health = Health([engine.problem, *(each.problem for each in heartbeats)], self._report_health)
        self._stopping.push_async_callback(health.stop)
        health.start()
        if self._config.metrics is not None:
            sources = Sources(engine, registry, watcher, parser, subscriptions, gate, relay, health)
            self._export(self._config.metrics, sources)
        # all objects made so far live as long as the daemon; the garbage collector need not look at them again
        gc.freeze()

    async def reload(self, config: Config) -> None:
        """Apply new roles, and read the certificates' files again. Other changes need a restart.

        If it raises StapsdtdError, nothing has changed.
        """
        policy = self._policy(config)
        self._server.renew_certificates()
        self._gate.policy = policy
        ended = await self._servicer.apply_policy()
        _log.info("reloaded: ended %d subscriptions that are not allowed any more", ended)
        if replace(config, roles=self._config.roles) != self._config:
            _log.warning("settings other than roles have changed: restart the daemon to apply them")

    async def _shut_down(self, engine: Engine) -> None:
        await asyncio.wrap_future(self._arming.submit(Queue("the daemon"), engine.shutdown, "disarming everything"))

    async def _end_all(self, subscriptions: Subscriptions) -> None:
        ended = await self._control.run(subscriptions.close_all)
        await asyncio.gather(*map(asyncio.wrap_future, ended))

    def _policy(self, config: Config) -> Policy:
        """Raises InvalidArgumentError."""
        policy = Policy(config.roles, NOT_OWN if isinstance(self._engine, FtraceEngine) else "")
        if policy.restricted:
            _log.warning("these roles can trace nothing here: %s; %s", ", ".join(policy.restricted), NOT_OWN)
        return policy

    def _export(self, listener: Listener, sources: Sources) -> None:
        """Raises CannotListenError."""
        # imported here, since the library costs memory that only daemons with metrics should pay
        from stapsdtd.metrics.collector import StapsdtdCollector  # noqa: PLC0415
        from stapsdtd.metrics.exporter import Exporter  # noqa: PLC0415

        exporter = Exporter(listener, StapsdtdCollector(sources))
        self._stopping.callback(exporter.close)
        _log.info("metrics are on %s", exporter.address)

    async def _report_health(self, problem: str) -> None:
        await self._server.set_health(is_serving=not problem)
        notify(f"STATUS=cannot capture: {problem}" if problem else f"STATUS={self.status}")

    @property
    def status(self) -> str:
        return f"serving on {', '.join(self.addresses)}"

    @property
    def addresses(self) -> list[str]:
        """Return the addresses that it serves on."""
        return self._server.addresses

    def _on_stop(self, work: Callable[[], None]) -> None:
        """Have the control thread do work when the daemon stops, before whatever was registered earlier."""
        self._stopping.push_async_callback(self._control.run, work)

    async def prove_life(self) -> None:
        """Return once the control thread and the reader thread have responded. Raises StapsdtdError."""
        await asyncio.gather(*map(asyncio.wrap_future, (self._control.ask(), self._engine.ask())))

    async def stop(self) -> None:
        """Disarm everything and stop. If a step fails, the others are done nevertheless.

        If a step hangs, the process exits: see `runtime.stopping`.
        """
        StopDeadline(self._abort).begin()
        try:
            await self._stopping.aclose()
        finally:
            self._control.stop()

    def _abort(self) -> None:
        """Release what the next daemon needs."""
        for release in self._on_abort:
            release()


def _allow_all_descriptors() -> None:
    """Raise the soft limit, usually 1,024: each ring, client and armed file takes a descriptor."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit < _MIN_DESCRIPTORS:
        raise KernelFeatureError(
            "descriptors", f"only {hard_limit} may be open, which is too few", "raise LimitNOFILE or ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _remove_leftovers(tracefs: Tracefs) -> None:
    removed = clean_up(tracefs)
    if removed.events or removed.instances:
        _log.info("removed %d events and %d instances that a killed daemon left", removed.events, removed.instances)
    for failure in removed.failures:
        _log.warning("cannot remove what a killed daemon left: %s", failure)


async def serve(read_config: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT. read_config: called at the start and at each SIGHUP."""
    _log.info("stapsdtd %d starts", os.getpid())
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    daemon = Daemon(read_config())
    try:
        await daemon.start()
        _log.info("%s", daemon.status)
        notify("READY=1", f"STATUS={daemon.status}")
        async with watched(daemon.prove_life):
            while await signals.get() == signal.SIGHUP:
                await _reload(daemon, read_config)
        notify("STOPPING=1")
    finally:
        await daemon.stop()


async def _reload(daemon: Daemon, read_config: Callable[[], Config]) -> None:
    notify_reloading()
    try:
        await daemon.reload(read_config())
    except (StapsdtdError, OSError) as error:
        _log.error("the configuration cannot be reloaded, and stays as it was: %s", error)
    notify("READY=1")
