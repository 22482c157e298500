"""The real server, subscriptions and registry on a unix socket, over an engine and a host that a test plays."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import pytest

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.api.access import Gate
from stapsdtd.api.backend import Backend
from stapsdtd.api.cgroup_scope import Hierarchy, NamesOf
from stapsdtd.api.peers import PeerTable
from stapsdtd.api.policy import Policy
from stapsdtd.api.relay import Relay
from stapsdtd.api.rights import Peer
from stapsdtd.api.server import Server
from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.api.timeouts import ClientTimeouts
from stapsdtd.capture.engine import (
    EngineMetrics,
    LossStage,
    Refusal,
    RingMetrics,
    RowSink,
    Sink,
    SubscriptionKey,
    Target,
    TargetSite,
    UnreadMetrics,
)
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.config import OPERATOR, USER, Limits, Listener, Role
from stapsdtd.errors import AccessDeniedError, UnknownSubscriptionError
from stapsdtd.events.batch import EventBatch, merge
from stapsdtd.functions.kernel import KernelFunctions
from stapsdtd.inventory.files import Change as InventoryChange
from stapsdtd.inventory.files import InstalledFile
from stapsdtd.inventory.inventory import InventoryState, InventoryStatus
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import (
    Argument,
    BuiltIn,
    Capture,
    FileOffset,
    Mapping,
    Object,
    ObjectKey,
    ParsedObject,
    Problem,
    ProcessKey,
    Site,
    Unavailable,
)
from stapsdtd.procs.file_opener import FileOpener
from stapsdtd.procs.objects import open_object
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.control_thread import ControlThread
from stapsdtd.runtime.fair_thread import Backlog, FairThread
from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.shares import Shares, Toll
from stapsdtd.runtime.slices import slices
from stapsdtd.sessions.admission import DEFAULT_FILE_LIMITS, FileLimits
from stapsdtd.sessions.attacher import Opener
from stapsdtd.sessions.evaluating import Evaluating
from stapsdtd.sessions.installed import DEFAULT_LIMITS, InstalledLimits
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.subscriptions import Subscriptions
from stapsdtd.spans.span import NO_OPEN_SPANS, OpenSpans, Span
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.support import wait_for
from tests.unit.samples import sample_object
from tests.unit.settable_clock import SettableClock
from tests.unit.test_objects import parse_here

T = TypeVar("T")
PATIENCE_SECONDS = 20
LONG_TIMEOUTS = ClientTimeouts(600, 600, 600)
FEATURES = (Feature("uprobes", True, True, "tried", ""), Feature("map_files", False, False, "refused", "be root"))


NOPS = NopRewriting(rewritten=frozenset({5}))
_NOPS = {1: b"\x90", 4: b"\x0f\x1f\x40\0", 5: b"\x0f\x1f\x44\0\0"}


class Hold:
    """What a call of the engine waits for. began: set when one does."""

    def __init__(self) -> None:
        self.began, self._released = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.began.set()
        assert self._released.wait(PATIENCE_SECONDS)

    def release(self) -> None:
        self._released.set()


@dataclass(eq=False)
class FakeFollowed:
    """A test says who is forked and ends."""

    processes: set[int]

    def remaining(self) -> frozenset[int]:
        return frozenset(self.processes)

    def adopt(self, pid: int) -> None:
        self.processes.add(pid)

    def ended(self, pid: int) -> None:
        self.processes.discard(pid)


class FakeEngine:
    """Records what is armed.

    parts: the sites of each call of arm(). refuse: reasons by the name of a site. failures: what the method of a name
    raises; `arm 1` is for that subscription_key alone. uncaptured: why it cannot tell some fields.

    held: until which events the method of a name waits. disarmed: done when what was disarmed is out of the processes.
    hits: those that are foreign, until they are asked for.
    trouble: what is wrong with it. last_read: done when sinks that are closed have everything, None for at once.
    strays, unread: as its figures have them.
    """

    name = "fake"

    def __init__(self) -> None:
        self.sinks: dict[SubscriptionKey, Sink] = {}
        self.armed: dict[tuple[SubscriptionKey, ObjectKey], Target] = {}
        self.parts: list[Sequence[TargetSite]] = []
        self.followed: FakeFollowed | None = None
        self.refuse: dict[str, str] = {}
        self.collecting: Future[int] | None = None
        self.failures: dict[str, Exception] = {}
        self.uncaptured: dict[BuiltIn, str] = {}
        self.held: dict[str, Hold] = {}
        self.last_events: list[EventBatch] = []
        self.calls: list[str] = []
        self.trouble: str | None = None
        self.disarmed: Future[None] = Future()
        self.disarmed.set_result(None)
        self.hits: dict[tuple[SubscriptionKey, ObjectKey], int] = {}
        self.last_read: Future[None] | None = None
        self.strays = 0
        self.unread = UnreadMetrics()

    def _begin(self, method: str) -> None:
        if method in self.held:
            self.held[method].wait()
        self.calls.append(method)
        if method in self.failures:
            raise self.failures[method]

    def why_not_paired(self, span: Span) -> str | None:  # noqa: ARG002
        return "it sends events"

    def why_not_aggregated(self, aggregation: Aggregation, site: Site, architecture: str) -> str | None:  # noqa: ARG002
        return "it sends events"

    def open(
        self,
        subscription_key: SubscriptionKey,
        sink: Sink,
        kernel_buffer_kib: int,  # noqa: ARG002
        owner: str = "",  # noqa: ARG002
        rows: RowSink | None = None,  # noqa: ARG002
        *,
        client: str = "",  # noqa: ARG002
    ) -> None:
        self._begin("open")
        self.sinks[subscription_key] = sink

    def follow(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> FakeFollowed:
        assert subscription_key in self.sinks
        self._begin("follow")
        self.followed = FakeFollowed(set(pids))
        return self.followed

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        assert subscription_key in self.sinks
        # the descriptor leads to the object while the call lasts
        status = os.stat(target.file_path)
        assert (status.st_dev, status.st_ino) == (target.object.key.dev, target.object.key.inode)
        earlier = self.armed.get((subscription_key, target.object.key))
        # what is armed already may be wanted in other processes now
        by_site = {wanted.site: wanted for wanted in (*(earlier.sites if earlier else ()), *target.sites)}
        parts = tuple(by_site.values())
        self._begin("arm")
        if error := self.failures.get(f"arm {subscription_key}"):
            raise error
        self.armed[subscription_key, target.object.key] = replace(target, sites=parts)
        self.parts.append(target.sites)
        sites = (wanted.site for wanted in target.sites)
        return [Refusal(site, self.refuse[site.name]) for site in sites if site.name in self.refuse]

    def arm_in_steps(self, subscription_key: SubscriptionKey, target: Target) -> Generator[None, None, list[Refusal]]:
        refusals: list[Refusal] = []
        for first in range(0, len(target.sites), 1000):
            yield
            refusals += self.arm(subscription_key, replace(target, sites=target.sites[first : first + 1000]))
        return refusals

    def renew(self, pid: int) -> None:
        self._begin(f"renew {pid}")

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:  # noqa: ARG002
        self._begin("disarm")
        self.armed.pop((subscription_key, target.key), None)

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        sink = self.sinks.pop(subscription_key)
        self.armed = {key: target for key, target in self.armed.items() if key[0] != subscription_key}
        if self.last_events:
            sink.deliver(merge(self.last_events))
        self._begin("close")
        return self.last_read or self.quiesced()

    def close_in_steps(self, subscription_key: SubscriptionKey) -> Generator[None, None, Future[None]]:
        yield
        return self.close(subscription_key)

    def why_not(self, capture: Capture, subject: Argument | BuiltIn, architecture: str) -> str | None:
        assert architecture == "x86-64"
        if isinstance(subject, BuiltIn):
            return self.uncaptured.get(subject)
        assert not capture.is_string or subject.size == 8
        return subject.operand.reason if isinstance(subject.operand, Unavailable) else None

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:  # noqa: ARG002
        if self.collecting is not None:
            return self.collecting
        done: Future[int] = Future()
        done.set_result(time.monotonic_ns())
        return done

    def ask(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def problem(self) -> str | None:
        return self.trouble

    def metrics(self) -> EngineMetrics:
        attachments = {(target.object.key, wanted.site) for target in self.armed.values() for wanted in target.sites}
        rings = (RingMetrics("64", 128, 4096),)
        return EngineMetrics(len(attachments), len(self.armed), rings, slices(), self.strays, self.unread)

    def retry_cleanup(self) -> None:
        pass

    def open_spans(self, subscription_key: SubscriptionKey) -> OpenSpans:  # noqa: ARG002
        return NO_OPEN_SPANS

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        found, self.hits = self.hits, {}
        return found

    def quiesced(self, owner: str = "") -> Future[None]:
        self.calls.append(f"quiesced {owner}")
        return self.disarmed

    def shutdown(self) -> None:
        self._begin("shutdown")


class FakeHierarchy:
    """A hierarchy of these cgroups; the id of one is its place among the paths. members: pids by path."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.members: dict[str, frozenset[int]] = {}

    def find(self, path: str) -> CgroupInfo | None:
        return CgroupInfo(self._paths.index(path), path.count("/")) if path in self._paths else None

    def all_paths(self) -> Iterator[str]:
        return iter(self._paths)

    def processes(self, path: str) -> frozenset[int]:
        return self.members.get(path, frozenset())


class _FakeWatcher:
    """The host changes when a test says so. refreshed: done when root's files are parsed. refreshes: how often that was
    asked for.
    """

    def __init__(self) -> None:
        self.refreshed = finished()
        self.refreshes = 0

    def charge(self, user: int, seconds: float) -> None:
        pass

    def look_at(self, pids: Iterable[int]) -> None:
        pass

    def object_of(self, key: ObjectKey, path: str, parsed: ParsedObject) -> Object:
        return Object(key, path, parsed)

    def on_main_thread(self, work: Callable[[int], None]) -> None:
        pass

    # this host has no other users
    def looked(self, users: frozenset[int] | None) -> Future[None]:  # noqa: ARG002
        self.refreshes += 1
        return finished()

    def refresh(self, users: frozenset[int] | None, pids: frozenset[int] = frozenset()) -> Future[None]:  # noqa: ARG002
        self.refreshes += 1
        return self.refreshed


class FakeInventory:
    """Installed files, which come and go when a test says so."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.status = InventoryStatus(InventoryState.CURRENT if is_on else InventoryState.OFF)
        self.on_change: Callable[[InventoryChange], None] = lambda _change: None
        self._files: dict[str, InstalledFile] = {}

    def files(self) -> tuple[InstalledFile, ...]:
        return tuple(self._files.values())

    def install(self, *found: Object) -> None:
        files = [InstalledFile.of(each.key.inode, each.path, each.parsed) for each in found]
        self._files |= {file.path: file for file in files}
        self.status = replace(
            self.status, files=len(self._files), probes=sum(len(file.probes) for file in self._files.values())
        )
        self.on_change(InventoryChange(installed=tuple(files)))

    def remove(self, found: Object) -> None:
        self.on_change(InventoryChange(removed=(self._files.pop(found.path),)))


class CountedControl(ControlThread):
    """asked: how many calls it was given."""

    asked = 0

    async def run(self, work: Callable[[], T]) -> T:
        self.asked += 1
        return await super().run(work)


class CountedRegistry(Registry):
    """listening: how many listen to its changes."""

    listening = 0

    def listen(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        stop_listening = super().listen(listener)
        self.listening += 1

        def stop() -> None:
            self.listening -= 1
            stop_listening()

        return stop


class RecordedPeers(PeerTable):
    """Remembers every address that it gave."""

    def __init__(self, connected: ConnectedClients) -> None:
        super().__init__(connected)
        self._addresses: list[str] = []

    def add(self, peer: Peer) -> str:
        address = super().add(peer)
        self._addresses.append(address)
        return address

    def known(self) -> dict[str, Peer]:
        """Return the peers that can still be found, by address."""
        found = {}
        for address in list(self._addresses):
            with suppress(AccessDeniedError):
                found[address] = self.find(f"unix-abstract:{address}")
        return found


class Served:
    """stub is the generated one; registry and subscriptions belong to the control thread: `in_control`."""

    def __init__(  # noqa: PLR0917 - what `served` says
        self,
        folder: Path,
        limits: Limits,
        roles: Sequence[Role],
        listeners: Sequence[Listener],
        max_connections: int,
        timeouts: ClientTimeouts,
        idle_seconds: float,
        clock: Callable[[], float],
        *,
        open_object: Opener,
        file_limits: FileLimits,
        filesystems: Filesystems | None,
        inventory: FakeInventory,
        installed_limits: InstalledLimits,
        hierarchy: Hierarchy,
        container_names: NamesOf,
        functions: KernelFunctions | None,
        ended_kept_seconds: float,
    ) -> None:
        self.folder = folder
        self.socket = folder / "served.sock"
        self.engine = FakeEngine()
        self.registry = CountedRegistry()
        self._mapped: dict[int, dict[ObjectKey, tuple[Object, Mapping]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.control = CountedControl()
        self._is_closing = False
        self.watcher = _FakeWatcher()
        watcher = cast("Watcher", self.watcher)
        self.connected = connected = ConnectedClients()
        self.shares = Shares()
        self.arming = FairThread("arming", Toll(self.shares, "arming", waits=False))
        self.matching = FairThread("matching", Toll(self.shares, "matching"))
        self.evaluating = Evaluating(self.shares)
        self.wall_clock = SettableClock()
        self.subscriptions = self.begin_in_control(
            lambda: Subscriptions(
                self.registry,
                self.engine,
                watcher,
                parse_here,
                limits,
                arming_thread=self.arming,
                matching_thread=self.matching,
                evaluating=self.evaluating,
                wall_clock=self.wall_clock,
                connected=connected,
                nops=NOPS,
                filesystems=filesystems or Filesystems(),
                installed=inventory,
                installed_opener=FileOpener(parse_here),
                installed_limits=installed_limits,
                open_object=open_object,
                file_limits=file_limits,
                ended_kept_seconds=ended_kept_seconds,
                clock=clock,
            )
        )
        self.peers = RecordedPeers(connected)
        self.gate = Gate(self.peers.find, Policy(roles), self.shares)
        self.functions = functions or KernelFunctions(tuple)
        backend = Backend(
            self.control,
            self.registry,
            watcher.refresh,
            watcher.looked,
            self.subscriptions,
            limits,
            lambda: FEATURES,
            self.engine.name,
            self.gate,
            NOPS,
            self.arming.backlog,
            FileOpener(parse_here),
            inventory,
            self.functions,
            self.matching,
            hierarchy,
            container_names,
        )
        self.servicer = StapsdtServicer(backend)
        self.relay = Relay(self.peers, self.gate, max_connections, timeouts, clock=clock)
        self.server = self.in_api(self._start(listeners, idle_seconds))
        self.channel = grpc.insecure_channel(f"unix:{self.socket}")
        self.stub = StapsdtServiceStub(self.channel)

    async def _start(self, listeners: Sequence[Listener], idle_seconds: float) -> Server:
        server = Server(self.servicer, self.relay, [Listener(f"unix:{self.socket}"), *listeners], idle_seconds)
        await server.start()
        return server

    def close_all(self) -> None:
        """What a daemon does first when it stops."""
        if not self._is_closing:
            self._is_closing = True
            self.in_control(self.subscriptions.close_all)

    def stop(self) -> None:
        self.close_all()
        self.channel.close()
        self.in_api(self.server.stop())
        self.arming.stop()
        self.matching.stop()
        self.evaluating.stop()
        self.functions.stop()
        self.control.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def in_api(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin_in_api(work).result(PATIENCE_SECONDS)

    def begin_in_api(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_in_api(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            return work()

        return self.in_api(call())

    def tasks_of(self, kind: type) -> list[asyncio.Task[Any]]:
        """Return the tasks of the API's event loop that run a method of a class."""
        tasks: list[asyncio.Task[Any]] = [*asyncio.all_tasks(self._loop)]
        return [task for task in tasks if f".{kind.__name__}." in f".{getattr(task.get_coro(), '__qualname__', '')}"]

    def in_control(self, work: Callable[[], T]) -> T:
        """Return when what it has armed and disarmed is told, too."""
        result = self.begin_in_control(work)
        self.settle()
        return result

    def begin_in_control(self, work: Callable[[], T]) -> T:
        """Return when the control thread has done it, whatever is still to be armed."""
        return self.in_api(self.control.run(work))

    def settle(self) -> None:
        """Return when nothing waits to be matched, armed or disarmed, and that has been told."""
        is_idle = False
        while not is_idle:
            is_idle = True
            for thread in (self.matching, self.arming):
                thread.ask().result(PATIENCE_SECONDS)
                is_idle &= thread.backlog() == Backlog()
                self.begin_in_control(lambda: None)

    @contextmanager
    def control_held(self) -> Iterator[None]:
        """The control thread does nothing else inside."""
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            release.wait(PATIENCE_SECONDS)

        ended = self.begin_in_api(self.control.run(hold))
        assert held.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            release.set()
            ended.result(PATIENCE_SECONDS)

    # the host

    def file_object(
        self, *sites: Site, name: str = "app", path: str | None = None, problems: Sequence[Problem] = ()
    ) -> Object:
        """An object behind a real file; with a path of its own, one that later processes cannot map: a memfd."""
        file = self.folder / name
        content = bytearray(b"\x7fELF".ljust(max((site.site_offset for site in sites), default=0), b"\0"))
        for site in sites:
            nop = _NOPS[site.nop_bytes]
            content[site.site_offset : site.site_offset + len(nop)] = nop
        file.write_bytes(content)
        status = file.stat()
        key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return sample_object(*sites, path=path or str(file), of=key, problems=problems)

    def map(self, pid: int, found: Object, file_name: str = "app") -> None:
        self.begin_map(pid, found, file_name)
        self.settle()

    def begin_map(self, pid: int, found: Object, file_name: str = "app") -> None:
        """As map, and wait for nothing that is armed therefore."""
        path = str(self.folder / file_name)
        mapping = Mapping(0x1000, 0x2000, FileOffset(0), found.key.dev, found.key.inode, path)
        self._mapped.setdefault(pid, {})[found.key] = found, mapping
        self._tell(pid)

    def unmap(self, pid: int, found: Object) -> None:
        self.begin_unmap(pid, found)
        self.settle()

    def begin_unmap(self, pid: int, found: Object) -> None:
        del self._mapped[pid][found.key]
        self._tell(pid)

    def _tell(self, pid: int) -> None:
        mapped = dict(self._mapped[pid])
        self.begin_in_control(lambda: self.registry.update(ProcessKey(pid, 1), mapped))

    # what a client asks

    def subscribe(self, *selectors: str, **more: Any) -> pb.SubscribeResponse:
        request = pb.SubscribeRequest(selectors=selectors or ["app:*"], **more)
        return self.stub.Subscribe(request, timeout=PATIENCE_SECONDS)

    def stream(self, subscription_id: str, encoding: str = "ROWS", from_seq: int | None = None) -> Any:
        request = pb.StreamRequest(
            subscription_id=subscription_id,
            encoding=pb.StreamRequest.Encoding.Value(f"ENCODING_{encoding}"),
            from_seq=from_seq,
        )
        return self.stub.Stream(request, timeout=PATIENCE_SECONDS)

    def unsubscribe(self, subscription_id: str) -> pb.Account:
        request = pb.UnsubscribeRequest(subscription_id=subscription_id)
        return self.stub.Unsubscribe(request, timeout=PATIENCE_SECONDS).account

    def held(self) -> list[pb.Subscription]:
        request = pb.ListSubscriptionsRequest()
        return list(self.stub.ListSubscriptions(request, timeout=PATIENCE_SECONDS).subscriptions)

    def is_forgotten(self, ident: str) -> bool:
        """Whether nothing of an ended subscription can be read any more."""
        try:
            self.subscriptions.get(ident)
        except UnknownSubscriptionError:
            return True
        return False

    def wait_until_streaming(self, streaming: bool = True) -> None:
        wait_for(lambda: [each.streaming for each in self.held()] == [streaming], f"streaming to be {streaming}")

    # what the kernel does

    @property
    def sink(self) -> Sink:
        """The only subscription's."""
        (sink,) = self.engine.sinks.values()
        return sink

    def fire(self, *batches: EventBatch) -> None:
        self.sink.deliver(merge(batches))

    def lose(self, stage: LossStage, count: int) -> None:
        self.sink.lost(stage, count)


@contextmanager
def served(
    folder: Path,
    limits: Limits | None = None,
    roles: Sequence[Role] = (OPERATOR, USER),
    listeners: Sequence[Listener] = (),
    *,
    max_connections: int = 100,
    timeouts: ClientTimeouts = LONG_TIMEOUTS,
    idle_seconds: float = 600,
    clock: Callable[[], float] = time.monotonic,
    open_object: Opener = open_object,
    file_limits: FileLimits = DEFAULT_FILE_LIMITS,
    filesystems: Filesystems | None = None,
    inventory: FakeInventory | None = None,
    installed_limits: InstalledLimits = DEFAULT_LIMITS,
    functions: KernelFunctions | None = None,
    hierarchy: Hierarchy = cgroups,
    container_names: NamesOf = lambda _ids: {},
    ended_kept_seconds: float = 10,
) -> Iterator[Served]:
    """listeners: beside Served.socket, which is the stub's. clock: what bounds go by. open_object, filesystems,
    inventory, functions, hierarchy, container_names: the host, as far as a test plays it.
    """
    server = Served(
        folder,
        limits or Limits(),
        roles,
        listeners,
        max_connections,
        timeouts,
        idle_seconds,
        clock,
        open_object=open_object,
        file_limits=file_limits,
        filesystems=filesystems,
        inventory=inventory or FakeInventory(is_on=False),
        installed_limits=installed_limits,
        hierarchy=hierarchy,
        container_names=container_names,
        functions=functions,
        ended_kept_seconds=ended_kept_seconds,
    )
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def processes(count: int, user: int | None = None) -> Iterator[list[int]]:
    """Ids of living processes, which do nothing. user: whose they are."""
    children = [subprocess.Popen(["sleep", "1000"], user=user) for _ in range(count)]
    try:
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The code and the text with which a call fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = cast("grpc.Call", raised.value)
    return error.code(), error.details() or ""
