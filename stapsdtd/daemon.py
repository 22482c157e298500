"""Read this first: the daemon's parts, and how they are wired.

    control thread (an event loop)    Watcher ──► Registry ──► ObjectFollower ──► Armer: what is to be armed
    arming thread                     Attacher ──► Engine.arm / disarm: tracefs, perf, files
    reader thread (the engine's)      kernel buffers ──► EventSink.deliver ──► EventLog
    evaluating thread                 Evaluating: what no engine does, for clients in turn ──► EventLog
    matching thread                   Chooser, Listing: which probes selectors mean, for clients in turn
    main thread (gRPC's event loop)   Relay ──► Gate ──► StapsdtServicer: asks the control thread, reads the logs
                                      Health: checks that the other threads respond
    metrics thread (if configured)    Exporter: reads the parts' metrics when asked
    and for work that may block, threads that nobody waits for: Endings (until no hit uses a plan), Draining (tables of
    rows), EventReaper (tracefs events), LinkCloser (links), Paging (pages for later hits), LockedCalls (memory maps),
    QueueingParser (files), FileOpener (files that clients name or that are installed), Inventory (installed files),
    KernelFunctions (types), Listing (processes' command lines); docs/design.md has all by name

Each piece of state is changed by one thread. `Daemon.stop` keeps the promise that nothing is left behind
(docs/design.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd import __version__
from stapsdtd.api.access import Gate
from stapsdtd.api.backend import Backend
from stapsdtd.api.peers import PeerTable
from stapsdtd.api.policy import Policy
from stapsdtd.api.relay import Relay
from stapsdtd.api.server import Server
from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.capture.cleanup import remove_leftovers
from stapsdtd.capture.ftrace.engine import NOT_OWN, FtraceEngine
from stapsdtd.capture.host import Host
from stapsdtd.catalog.registry import Registry
from stapsdtd.config import Config, Listener
from stapsdtd.errors import StapsdtdError
from stapsdtd.functions.kernel import make_kernel_functions
from stapsdtd.inventory.inventory import make_inventory
from stapsdtd.kernel.allocator import Trimmer, glibc, limit_arenas
from stapsdtd.kernel.clock_sets import ClockSets
from stapsdtd.kernel.container_names import ContainerNames
from stapsdtd.kernel.descriptors import allow_all_descriptors
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.metrics.sources import Sources
from stapsdtd.procs.descendants import Descendants
from stapsdtd.procs.file_opener import FileOpener
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.threads import Threads
from stapsdtd.procs.watcher import watch_host
from stapsdtd.runtime.control_thread import ControlThread
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.garbage import FullCollections
from stapsdtd.runtime.health import Health
from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.service_manager import notify, notify_reloading, watched
from stapsdtd.runtime.shares import Shares, Toll
from stapsdtd.runtime.slices import MeasuredLoop
from stapsdtd.runtime.stopping import StopDeadline
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sandbox.queueing import QueueingParser
from stapsdtd.sessions.evaluating import Evaluating
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.provider_socket import ProviderSockets
from stapsdtd.sessions.subscriptions import Subscriptions

if TYPE_CHECKING:
    from stapsdtd.metrics.exporter import Exporter

_log = logging.getLogger(__name__)
_SCAN_SECONDS = 30.0
_SWITCH_SECONDS = 0.0002
"""Until a thread of Python gives way to another that has something to do."""


class Daemon:
    """One daemon: its parts, wired from the kernel up to the clients. Nothing is armed or served before `start`.

    Raises StapsdtdError if the host or the configuration does not allow it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        limits = config.limits
        sys.setswitchinterval(_SWITCH_SECONDS)
        libc = glibc()
        if libc is not None:
            # before any thread starts
            limit_arenas(libc)
        self._trimmer = None if libc is None else Trimmer(libc)
        allow_all_descriptors()
        # it starts while the host is probed
        self._sandbox = SandboxedParser()
        self._host = host = Host.probe()
        self._control = ControlThread()
        self._shares = Shares()
        # what is disarmed makes less work
        self._arming = FairThread("stapsdtd-arming", Toll(self._shares, "arming", waits=False))
        self._matching = FairThread("stapsdtd-matching", Toll(self._shares, "matching"))
        self._evaluating = Evaluating(self._shares)
        self._wall_clock = WallClock()
        self._clock_sets = ClockSets()
        self._threads = Threads()
        self._descendants = Descendants()
        self._filesystems = Filesystems(config.filesystems.arm)
        self._engine = host.make_engine(
            config, self._threads.pids_of, self._descendants, Toll(self._shares, "reading", is_apart=True)
        )
        self._parser = QueueingParser(self._sandbox)
        self._registry = Registry()
        self._watcher = self._control.call(
            lambda: watch_host(
                self._registry,
                KernelEvents(self._threads, self._descendants),
                self._parser.parse,
                self._filesystems,
                self._parser.parsed,
            )
        )
        self._parser.on_done = self._watcher.parsed
        self._connected = ConnectedClients()
        self._inventory = make_inventory(config.inventory, config.filesystems.arm, self._parser.parse, __version__)
        self._installed_opener = FileOpener(self._parser.parse, config.filesystems.arm)
        self._subscriptions = self._control.call(
            lambda: Subscriptions(
                self._registry,
                self._engine,
                self._watcher,
                self._parser.parse,
                limits,
                arming_thread=self._arming,
                matching_thread=self._matching,
                evaluating=self._evaluating,
                wall_clock=self._wall_clock,
                connected=self._connected,
                nops=host.nops,
                filesystems=self._filesystems,
                installed=self._inventory,
                installed_opener=self._installed_opener,
            )
        )
        self._functions = make_kernel_functions(host.hooks)
        self._files = FileOpener(self._parser.parse, config.filesystems.arm)
        self._peers = PeerTable(self._connected)
        self._slices = {
            "control": self._control.slices,
            "arming": self._arming.slices,
            "matching": self._matching.slices,
            "evaluating": self._evaluating.slices,
        }
        loop = asyncio.get_running_loop()
        if isinstance(loop, MeasuredLoop):
            self._slices["api"] = loop.slices
        self._gate = Gate(self._peers.find, self._policy(config), self._shares)
        self._relay = Relay(self._peers, self._gate, limits.max_connections)
        self._servicer = StapsdtServicer(
            Backend(
                self._control,
                self._registry,
                self._watcher.refresh,
                self._watcher.looked,
                self._subscriptions,
                limits,
                lambda: (*host.features, *host.hooks.features()),
                self._engine.name,
                self._gate,
                host.nops,
                self._arming.backlog,
                self._files,
                self._inventory,
                self._functions,
                self._matching,
                container_names=ContainerNames(config.containers).of,
            )
        )
        self._server = Server(self._servicer, self._relay, config.listeners)
        self._provider_sockets = ProviderSockets(self._subscriptions.arming.in_process)
        heartbeats = (
            Heartbeat("the control thread", self._control.ask),
            Heartbeat("the arming thread", self._arming.ask),
            Heartbeat("the thread that evaluates filters", self._evaluating.ask),
        )
        self._health = Health([self._engine.problem, *(each.problem for each in heartbeats)], self._report_health)
        self._exporter: Exporter | None = None
        self._collections = self._control.call(FullCollections)

    async def start(self) -> None:
        """Begin to watch and to serve. Raises StapsdtdError."""
        if missing := [each.name for each in self._host.features if not each.available]:
            _log.warning("unavailable on this host: %s; run 'stapsdt doctor' to see why", ", ".join(missing))
        remove_leftovers(self._host.tracefs)
        asyncio.get_running_loop().add_reader(self._clock_sets, self._look_at_clock)
        await self._control.run(self._watcher.start)
        # the first clients are to find what there is, and the sandbox may take long to start
        scanned = asyncio.wrap_future(await self._control.run(self._watcher.refresh))
        await asyncio.wait({scanned}, timeout=_SCAN_SECONDS)
        await self._server.start()
        await self._control.run(lambda: self._provider_sockets.open(self._server.socket_paths))
        self._inventory.start()
        self._health.start()
        if self._config.metrics is not None:
            self._export(self._config.metrics)
        await self._control.run(self._collections.begin)

    async def stop(self) -> None:
        """Disarm everything and stop, whether or not it has started. If a step fails, the others are done nevertheless.

        If a step hangs, the process exits: see `runtime.stopping`.
        """
        StopDeadline(self._abort).begin()
        async with contextlib.AsyncExitStack() as steps:
            # the last of these comes first
            steps.callback(self._control.stop)
            steps.push_async_callback(self._control.run, self._collections.stop)
            if self._trimmer is not None:
                steps.callback(self._trimmer.close)
            steps.push_async_callback(self._control.run, self._parser.close)
            steps.callback(self._arming.stop)
            steps.callback(self._matching.stop)
            steps.callback(self._evaluating.stop)
            steps.push_async_callback(asyncio.to_thread, self._functions.stop)
            steps.push_async_callback(asyncio.to_thread, self._inventory.stop)
            steps.callback(self._installed_opener.close)
            steps.push_async_callback(self._shut_down_engine)
            steps.push_async_callback(self._control.run, self._watcher.stop)
            steps.push_async_callback(self._server.stop)
            steps.push_async_callback(self._control.run, self._provider_sockets.close)
            # streams get their End before the server stops
            steps.push_async_callback(self._end_subscriptions)
            steps.push_async_callback(self._health.stop)
            steps.callback(self._stop_looking_at_clock)
            if self._exporter is not None:
                steps.callback(self._exporter.close)

    def _look_at_clock(self) -> None:
        self._clock_sets.read()
        self._wall_clock.look()

    def _stop_looking_at_clock(self) -> None:
        asyncio.get_running_loop().remove_reader(self._clock_sets)
        self._clock_sets.close()

    def _abort(self) -> None:
        """Release what the next daemon needs."""
        self._sandbox.abort()
        self._server.close_listeners()

    async def _end_subscriptions(self) -> None:
        ended = await self._control.run(self._subscriptions.close_all)
        await asyncio.gather(*map(asyncio.wrap_future, ended))

    async def _shut_down_engine(self) -> None:
        shut_down = self._arming.submit(Queue("the daemon"), self._engine.shutdown, "disarming everything")
        await asyncio.wrap_future(shut_down)

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

    def _policy(self, config: Config) -> Policy:
        """Raises InvalidArgumentError."""
        policy = Policy(config.roles, NOT_OWN if isinstance(self._engine, FtraceEngine) else "")
        if policy.restricted:
            _log.warning("these roles can trace nothing here: %s; %s", ", ".join(policy.restricted), NOT_OWN)
        return policy

    def _export(self, listener: Listener) -> None:
        """Raises CannotListenError."""
        # imported here, since the library costs memory that only daemons with metrics should pay
        from stapsdtd.metrics.collector import StapsdtdCollector  # noqa: PLC0415
        from stapsdtd.metrics.exporter import Exporter  # noqa: PLC0415

        sources = Sources(
            self._engine,
            self._registry,
            self._watcher,
            self._sandbox,
            self._subscriptions,
            self._gate,
            self._relay,
            self._health,
            self._inventory,
            self._slices,
        )
        self._exporter = Exporter(listener, StapsdtdCollector(sources))
        _log.info("metrics are on %s", self._exporter.address)

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

    async def prove_life(self) -> None:
        """Return once the control thread and the reader thread have responded. Raises StapsdtdError."""
        await asyncio.gather(*map(asyncio.wrap_future, (self._control.ask(), self._engine.ask())))


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
