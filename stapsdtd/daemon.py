"""Read this first: the daemon's parts, and how they are wired.

    control thread (an event loop)    Watcher ──► Registry ──► Subscriptions ──► Engine.arm / disarm
    reader thread (the engine's)      kernel buffers ──► Subscription.deliver ──► EventLog
    main thread (gRPC's event loop)   StapsdtServicer: asks the control thread, reads the logs

Each piece of state has one thread that changes it; DESIGN's promise that nothing is left behind is kept in
`Daemon.stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stapsdtd.api.server import Server
from stapsdtd.api.servicer import Backend, StapsdtServicer
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded, feature, load
from stapsdtd.capture.cleanup import clean_up
from stapsdtd.capture.engine import Engine
from stapsdtd.capture.ftrace.engine import FtraceEngine
from stapsdtd.capture.names import Owner
from stapsdtd.config import Config
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.features import probe_features
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.probes.registry import Registry
from stapsdtd.route.subscriptions import Subscriptions
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.watch.threads import Threads
from stapsdtd.watch.watcher import Watcher

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ControlThread:
    """An event loop in a thread of its own: what it owns is never waited for by the API's loop, nor the other way
    round.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stapsdtd-control", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Do work there and answer what it answers, or raise what it raises."""
        done: Future[_T] = Future()

        async def within() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        asyncio.run_coroutine_threadsafe(within(), self._loop)
        return await asyncio.shield(asyncio.wrap_future(done))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def make_engine(wanted: str, bpf: Loaded | KernelFeatureError, tracefs: Tracefs, threads: Threads) -> Engine:
    """Raises the KernelFeatureError where the wanted one, as config.ENGINES names it, cannot work here."""
    owner = Owner.this_process()
    if isinstance(bpf, Loaded):
        if wanted != "ftrace":
            return BpfEngine(tracefs, owner, bpf)
        bpf.close()
    elif wanted == "bpf":
        raise bpf
    elif wanted == "auto":
        _log.warning("%s; the ftrace engine is used instead", bpf)
    return FtraceEngine(tracefs, owner, threads.pids_of)


class Daemon:
    """One serving daemon. `start` raises StapsdtdError where the host or the configuration does not allow it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._control = ControlThread()
        self._stopping = contextlib.AsyncExitStack()

    async def start(self) -> None:
        # each ring, client and file looked at takes a descriptor, and the usual soft limit is 1,024
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # it starts while the rest does
        parser = SandboxedParser()
        self._on_stop(parser.close)
        bpf = load()
        features = (*probe_features(), feature(bpf))
        tracefs = Tracefs.locate()
        left = clean_up(tracefs)
        if left.events or left.instances:
            _log.info("removed %d events and %d instances that a killed daemon left", left.events, left.instances)
        for failure in left.failures:
            _log.warning("what a killed daemon left cannot be removed: %s", failure)
        threads = Threads()
        engine = make_engine(self._config.engine, bpf, tracefs, threads)
        self._on_stop(engine.shutdown)
        registry = Registry()
        watcher = await self._control.run(lambda: Watcher(registry, threads, parser.parse))
        self._on_stop(watcher.stop)
        await self._control.run(watcher.start)
        subscriptions = await self._control.run(
            lambda: Subscriptions(registry, engine, watcher, parser.parse, self._config.limits)
        )
        backend = Backend(
            self._control, registry, watcher.refresh, subscriptions, self._config.limits, features, engine.name
        )
        server = Server(StapsdtServicer(backend), self._config.listen.removeprefix("unix:"))
        self._stopping.push_async_callback(server.stop)
        # first of all, so that streams get their End before the server stops
        self._on_stop(subscriptions.close_all)
        await server.start()
        # what was made until here lives as long as the daemon; the collector need not look at it again
        gc.freeze()

    def _on_stop(self, work: Callable[[], None]) -> None:
        """Do it in the control thread at the end, before what was registered earlier."""
        self._stopping.push_async_callback(self._control.run, work)

    async def stop(self) -> None:
        """Disarm everything. What can still be done is done also where a step fails."""
        try:
            await self._stopping.aclose()
        finally:
            self._control.stop()


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT."""
    _log.info("stapsdtd %d starts", os.getpid())
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    daemon = Daemon(config)
    try:
        await daemon.start()
        _log.info("serving on %s", config.listen)
        notify("READY=1")
        await asked_to_stop.wait()
        notify("STOPPING=1")
    finally:
        await daemon.stop()


def notify(state: str) -> None:
    """Tell the service manager, if one wants to know (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        try:
            # an address that begins with @ is in the abstract namespace
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.sendall(state.encode())
        except OSError as error:
            _log.warning("the service manager at %s cannot be told %s: %s", address, state, error)
