"""The watcher's decisions, on a host of fakes: rings, connector, /proc and files are what a test says."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

import numpy as np
import pytest

from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.errors import KernelFeatureError, ObjectGoneError, ObjectPendingError, ObjectUnreadableError
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessEvent
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.inodes import ProcessInodes
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.perf import Lost, Mapped
from stapsdtd.kernel.procfs import ProcessStat, Region
from stapsdtd.model import FileOffset, Mapping, Object, ParsedObject, ProcessKey, ReadOnlySegment, Vaddr
from stapsdtd.procs import budgets, looking
from stapsdtd.procs.budgets import MemoryBudget
from stapsdtd.procs.descendants import Descendants
from stapsdtd.procs.kernel_events import KernelEvents
from stapsdtd.procs.objects import ObjectStore
from stapsdtd.procs.process_maps import ProcessMaps
from stapsdtd.procs.threads import Threads
from stapsdtd.procs.watcher import Pace, Watcher, watch_host
from stapsdtd.runtime.futures import finished
from tests.unit.samples import sample_object, site
from tests.unit.test_objects import image, parse_here
from tests.users import ANNE

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")
NEVER = 3600.0
LIBC, APP, MEMFD = (sample_object(site(), inode=inode, path=f"/lib/{inode}") for inode in (1, 2, 3))
PLAIN = 9
"""The inode of a file without probes."""


class Source(Generic[T]):
    """A descriptor that is ready while there is anything to read."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._waiting: list[T] = []
        self.closed = False

    def put(self, *items: T, wake: bool = True) -> None:
        self._waiting += items
        if wake:
            os.eventfd_write(self._descriptor, 1)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[T]:
        os.eventfd_write(self._descriptor, 1)
        os.eventfd_read(self._descriptor)
        found, self._waiting = self._waiting, []
        return found

    def close(self) -> None:
        self.closed = True
        os.close(self._descriptor)


class Files:
    """In place of an ObjectStore."""

    def __init__(self) -> None:
        self.objects: dict[int, Object | None] = {found.key.inode: found for found in (LIBC, APP, MEMFD)} | {
            PLAIN: None
        }
        self.known = {LIBC.key.inode, APP.key.inode, PLAIN}
        self.closed = False
        self.owners: dict[str, int] = {}

    def recall(self, _dev: int, inode: int, path: str) -> Object | None:
        if inode not in self.known:
            raise KeyError(path)
        return self.objects[inode]

    def mapped(self, obj: Object) -> None:
        assert obj.key.inode in self.objects

    def unmapped(self, found: Object) -> None:
        if found.key == MEMFD.key:
            self.known.discard(found.key.inode)

    def owner_of(self, path: str) -> int:
        return self.owners.get(path, 0)

    def inodes_of(self, pid: int) -> ProcessInodes:
        return ProcessInodes(pid, LockedCalls(), lambda: None)

    def resolve(self, _pid: int, mapping: Mapping, _inodes: ProcessInodes) -> Object | None:
        if mapping.inode not in self.objects:
            raise ObjectGoneError(mapping.path)
        self.known.add(mapping.inode)
        return self.objects[mapping.inode]

    def close(self) -> None:
        self.closed = True


class Host:
    """Also in place of /proc."""

    def __init__(self) -> None:
        self.ring = Source[Mapped | Lost]()
        self.connector = Source[ProcessEvent]()
        self.files = Files()
        self.processes: dict[int, tuple[ProcessStat, list[Mapping]]] = {}
        self.whole_maps: dict[int, list[Region]] = {}
        self.looks = Counter[int]()
        self.failures: list[Exception] = []
        self.registry = Registry()
        self.changes: list[Change] = []
        self.registry.listen(self.changes.append)
        self.threads = Threads(tgid=lambda _tid: None)
        self.descendants = Descendants()
        self.kernel = KernelEvents(
            self.threads,
            self.descendants,
            cpus=lambda: [0],
            open_ring=lambda _cpu: self.ring,
            open_connector=lambda: self.connector,
        )
        self.memory = MemoryBudget()
        self.pace = Pace()

    def pids(self) -> list[int]:
        if self.failures:
            raise self.failures.pop()
        return list(self.processes)

    def stat(self, pid: int) -> ProcessStat | None:
        found = self.processes.get(pid)
        return found[0] if found else None

    def executable_mappings(self, pid: int) -> list[Mapping]:
        self.looks[pid] += 1
        if self.failures:
            raise self.failures.pop()
        found = self.processes.get(pid)
        return found[1] if found else []

    def regions(self, pid: int, most_bytes: int) -> list[Region]:  # noqa: ARG002 - all that there is
        return self.whole_maps.get(pid, [])

    def process_of(self, tid: int) -> int:
        """Return what the reader thread would learn of a thread."""
        (pid,) = self.threads.pids_of(np.array([tid], np.int32)).tolist()
        return int(pid)

    def live(self, pid: int, *inodes: int, start: int = 100, state: str = "S", threads: int = 1) -> None:
        mappings = [record(pid, inode).mapping for inode in inodes]
        self.processes[pid] = ProcessStat(ProcessKey(pid, start), state, threads), mappings

    def mapped(self) -> dict[int, set[int]]:
        """The inodes of the objects that each process maps."""
        inodes: dict[int, set[int]] = {pid: set() for pid in self.registry.pids()}
        for found in self.registry.objects():
            for pid in self.registry.mappings(found.key):
                inodes[pid].add(found.key.inode)
        return inodes


def record(pid: int, inode: int) -> Mapped:
    return Mapped(pid, 1, inode, f"/lib/{inode}", 0x1000 * inode, 0x1000, FileOffset(0))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Of processes by their ids; others that the real host has not are root's."""
    found: dict[int, int] = {}
    monkeypatch.setattr(looking, "user_or_nobody", lambda pid: found.get(pid, budgets.user_of(pid)))
    return found


@pytest.fixture
def _forever_busy(host: Host) -> None:
    """After the first turn, only `refresh` looks."""
    host.pace = Pace(pause_seconds=NEVER)


@pytest.fixture
def _impatient(host: Host) -> None:
    host.pace = Pace(later_seconds=0.001, rescan_seconds=0.001)


def watching(
    host: Host,
    scenario: Callable[[Watcher], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def run() -> None:
        store = cast("ObjectStore", host.files)
        maps = ProcessMaps(host.registry, store, LockedCalls(), host.memory, proc=host)
        watcher = Watcher(host.registry, host.kernel, store, maps, proc=host, pace=host.pace)
        watcher.start()
        host.looks.clear()
        host.changes.clear()
        try:
            async with asyncio.timeout(20):
                await scenario(watcher)
        finally:
            watcher.stop()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is what the watcher does
        await asyncio.sleep(0)


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_processes_that_were_there_are_known_at_the_start(host: Host) -> None:
    host.live(1, 1, PLAIN)
    host.live(2, 1, 2)
    host.live(3)

    async def scenario(_watcher: Watcher) -> None:
        assert host.mapped() == {1: {1}, 2: {1, 2}, 3: set()}

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
def test_new_library_on_a_quiet_host_is_seen_at_once(host: Host) -> None:
    host.live(1, 1)

    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1, 3)
        host.ring.put(record(1, 3))
        await until(lambda: host.changes == [Change(MEMFD, appeared=True)])
        assert host.mapped() == {1: {1, 3}}

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
def test_all_that_a_process_does_in_one_pause_costs_one_look(host: Host) -> None:
    host.live(1, 1)

    async def scenario(watcher: Watcher) -> None:
        host.connector.put(Forked(2, 2))
        await some_turns()
        host.live(2, 1, 2, 3)
        host.ring.put(record(2, 2), record(2, 1), record(2, 3))
        host.connector.put(Executed(2))
        await some_turns()
        assert host.looks == Counter()
        watcher.refresh()
        assert host.looks == Counter({2: 1})
        assert host.mapped() == {1: {1}, 2: {1, 2, 3}}
        # many processes, but one change for each object
        assert sorted(host.changes, key=lambda change: change.object.key.inode) == [
            Change(LIBC), Change(APP, appeared=True), Change(MEMFD, appeared=True),
        ]  # fmt: skip

    watching(host, scenario)


def test_process_that_moved_its_text_is_still_listed(host: Host) -> None:
    segment = ReadOnlySegment(Vaddr(0), FileOffset(0), 0x4000)
    program = replace(APP, parsed=replace(APP.parsed, read_only=(segment,)))
    host.files.objects[program.key.inode] = program
    host.live(1, 1, 2)
    head = Region(0x2000, 0x3000, "r--p", 0, 1, 2, "/lib/2")
    copy = Region(0x3000, 0x6000, "r-xp", 0, 0, 0, "")

    async def scenario(watcher: Watcher) -> None:
        host.live(1, 1)
        host.whole_maps[1] = [head, copy]
        for _ in range(2):
            watcher.look_at([1])
            assert host.mapped() == {1: {1, 2}}
        host.whole_maps[1] = [head]
        watcher.look_at([1])
        assert host.mapped() == {1: {1}}

    watching(host, scenario)


def test_pause_ends(host: Host) -> None:
    async def scenario(_watcher: Watcher) -> None:
        for pid in range(1, 5):
            host.live(pid, 1)
            host.connector.put(Executed(pid))
            await until(lambda pid=pid: pid in host.mapped())  # type: ignore[misc]

    watching(host, scenario)


def test_fork_is_looked_at_a_turn_later(host: Host) -> None:
    host.live(1, 1)

    async def scenario(_watcher: Watcher) -> None:
        host.live(2, 1)
        host.connector.put(Forked(2, 2))
        await until(lambda: host.mapped() == {1: {1}, 2: {1}})
        assert host.looks == Counter({2: 1})

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
def test_refresh_takes_in_forks_too(host: Host) -> None:
    async def scenario(watcher: Watcher) -> None:
        host.live(2, 1)
        host.connector.put(Forked(2, 2))
        watcher.refresh()
        assert host.mapped() == {2: {1}}

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
@pytest.mark.parametrize("inode", [1, PLAIN])
def test_process_of_a_moment_that_maps_what_is_known_costs_no_look(host: Host, inode: int) -> None:
    host.live(1, 1)

    async def scenario(watcher: Watcher) -> None:
        host.ring.put(record(2, inode))
        host.connector.put(Forked(2, 2), Executed(2), Exited(2, 2))
        watcher.refresh()
        assert not host.looks
        assert not host.changes
        assert host.mapped() == {1: {1}}

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
@pytest.mark.parametrize("exit_is_told", [True, False])
@pytest.mark.parametrize(("inode", "found"), [(2, APP), (3, MEMFD)])
def test_process_of_a_moment_may_be_the_first_that_maps_an_object(
    host: Host, exit_is_told: bool, inode: int, found: Object
) -> None:
    async def scenario(watcher: Watcher) -> None:
        host.ring.put(record(2, inode))
        if exit_is_told:
            host.connector.put(Forked(2, 2), Executed(2), Exited(2, 2))
        watcher.refresh()
        assert host.changes == [Change(found, appeared=True), Change(found, vanished=True)]
        assert host.mapped() == {}

    watching(host, scenario)


def test_process_of_a_moment_whose_file_is_gone_does_no_harm(host: Host) -> None:
    async def scenario(watcher: Watcher) -> None:
        host.ring.put(record(2, 4), record(2, 2))
        watcher.refresh()
        assert host.changes == [Change(APP, appeared=True), Change(APP, vanished=True)]

    watching(host, scenario)


def test_known_file_without_probes_is_no_reason_to_look(host: Host) -> None:
    host.live(1, 1)

    async def scenario(watcher: Watcher) -> None:
        host.ring.put(record(1, PLAIN))
        watcher.refresh()
        assert not host.looks

    watching(host, scenario)


def test_exec_replaces_what_was_mapped(host: Host) -> None:
    host.live(1, 1, 2)

    async def scenario(watcher: Watcher) -> None:
        host.live(1, 1, PLAIN)
        host.ring.put(record(1, PLAIN))
        host.connector.put(Executed(1))
        watcher.refresh()
        assert host.mapped() == {1: {1}}
        assert host.changes == [Change(APP, vanished=True)]

    watching(host, scenario)


def test_reused_pid_is_another_process(host: Host) -> None:
    host.live(1, 2)

    async def scenario(watcher: Watcher) -> None:
        host.live(1, 1, start=200)
        host.ring.put(record(1, 1))
        host.connector.put(Exited(1, 1), Forked(1, 1), Executed(1))
        watcher.refresh()
        assert host.registry.process(1) == ProcessKey(1, 200)
        assert host.mapped() == {1: {1}}

    watching(host, scenario)


def test_reused_pid_is_told_by_its_start_time_where_its_end_was_not(host: Host) -> None:
    host.live(1, 2)

    async def scenario(watcher: Watcher) -> None:
        host.live(1, 2, start=200)
        watcher.look_at([1])
        assert host.registry.process(1) == ProcessKey(1, 200)
        assert host.changes == [Change(APP, vanished=True), Change(APP, appeared=True)]

    watching(host, scenario)


def test_end_of_a_process_without_threads_needs_no_look(host: Host) -> None:
    host.live(1, 1)

    async def scenario(_watcher: Watcher) -> None:
        # it is reported before /proc shows it
        host.connector.put(Exited(1, 1))
        await until(lambda: host.mapped() == {})
        assert host.changes == [Change(LIBC, vanished=True)]
        assert not host.looks

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("threads_are_from_before", [True, False])
def test_threads_may_outlive_their_leader(host: Host, threads_are_from_before: bool) -> None:
    host.live(1, 1, threads=2 if threads_are_from_before else 1)

    async def scenario(watcher: Watcher) -> None:
        if not threads_are_from_before:
            host.connector.put(Forked(7, 1))
        # a leader that ended shows no mappings
        host.live(1, state="Z", threads=2)
        host.connector.put(Exited(1, 1))
        await until(lambda: host.looks[1] > 3)
        assert host.mapped() == {1: {1}}
        host.connector.put(Exited(7, 1))
        host.live(1, state="Z")
        await until(lambda: host.mapped() == {})
        # while another one is looked at again and again
        host.live(2, 2, threads=2)
        watcher.look_at([2])
        host.live(2, state="Z", threads=2)
        host.connector.put(Exited(2, 2))
        looks = host.looks.copy()
        await until(lambda: host.looks[2] > looks[2] + 5)
        # when it was forgotten, another look may have been due already
        assert host.looks[1] <= looks[1] + 1
        assert host.mapped() == {2: {2}}

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
def test_process_that_executes_from_another_thread_lives_on(host: Host) -> None:
    """The thread takes the leader's place, whose end is reported before."""
    host.live(1, 2, threads=2)

    async def scenario(watcher: Watcher) -> None:
        host.live(1, 1)
        host.connector.put(Exited(1, 1), Executed(1))
        watcher.refresh()
        assert host.mapped() == {1: {1}}

    watching(host, scenario)


def test_zombie_that_nobody_told_of_is_forgotten(host: Host) -> None:
    host.live(1, 1)

    async def scenario(watcher: Watcher) -> None:
        host.live(1, state="Z")
        watcher.look_at([1])
        assert host.mapped() == {}

    watching(host, scenario)


@pytest.mark.parametrize("told_by", ["ring", "connector"])
def test_lost_records_make_it_read_all_of_proc(host: Host, told_by: str) -> None:
    host.live(1, 1)
    host.live(2, 1)

    async def scenario(_watcher: Watcher) -> None:
        del host.processes[1]
        host.live(2, 2)
        host.live(3, 3)
        if told_by == "ring":
            host.ring.put(Lost())
        else:
            host.connector.put(Overflowed())
        await until(lambda: host.mapped() == {2: {2}, 3: {3}})

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
def test_lost_records_are_made_up_for_also_when_proc_cannot_be_read_at_first(host: Host) -> None:
    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1)
        host.failures.append(OSError(errno.EMFILE, "no descriptors left"))
        host.ring.put(Lost())
        await until(lambda: host.mapped() == {1: {1}})
        assert not host.failures

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptors left"), ObjectPendingError()])
@pytest.mark.parametrize("exit_is_told", [True, False])
def test_process_that_could_not_be_looked_at_before_it_ended_may_be_the_first_that_maps_an_object(
    host: Host, error: Exception, exit_is_told: bool
) -> None:
    async def scenario(watcher: Watcher) -> None:
        host.live(2, 3)
        host.failures.append(error)
        host.ring.put(record(2, 3))
        watcher.refresh()
        assert not host.failures
        assert not host.changes
        del host.processes[2]
        if exit_is_told:
            host.connector.put(Exited(2, 2))
        else:
            watcher.parsed([2])
        await until(lambda: host.changes == [Change(MEMFD, appeared=True), Change(MEMFD, vanished=True)])

    watching(host, scenario)


@pytest.fixture
def users_pids() -> Iterator[list[int]]:
    """Two processes of a user who is not root."""
    with ExitStack() as ended:
        pids = []
        for _ in range(2):
            uid = ANNE.uid if os.geteuid() == 0 else None
            process = ended.enter_context(subprocess.Popen(["/bin/sleep", "1000"], user=uid))
            ended.callback(process.kill)
            pids.append(process.pid)
        yield pids


@pytest.mark.usefixtures("_impatient")
def test_object_that_there_was_no_room_for_is_known_once_there_is(host: Host, users_pids: list[int]) -> None:
    first, second = users_pids
    # room for one object with one site
    host.memory = MemoryBudget(max_weight=2)
    host.live(first, 1)
    host.live(second, 2, PLAIN)

    async def scenario(_watcher: Watcher) -> None:
        assert host.mapped() == {first: {1}, second: set()}
        del host.processes[first]
        host.connector.put(Exited(first, first))
        await until(lambda: host.mapped() == {second: {2}})
        assert host.looks[second] == 1

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
def test_process_that_cannot_be_looked_at_now_is_looked_at_again(host: Host) -> None:
    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1)
        host.failures.append(OSError(errno.EMFILE, "no descriptors left"))
        host.connector.put(Executed(1))
        await until(lambda: host.mapped() == {1: {1}})
        assert host.looks[1] == 2
        await some_turns()
        assert host.looks[1] == 2

    watching(host, scenario)


def test_listener_that_fails_does_not_end_the_watch(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.live(1, 1)

    def fail(_change: Change) -> None:
        raise OSError(errno.EMFILE, "no descriptors left")

    async def scenario(_watcher: Watcher) -> None:
        stop = host.registry.listen(fail)
        host.live(2, 1)
        host.connector.put(Executed(2))
        await until(lambda: "no descriptors left" in caplog.text)
        stop()
        host.live(3, 1)
        host.connector.put(Executed(3))
        await until(lambda: host.mapped() == {1: {1}, 2: {1}, 3: {1}})

    with caplog.at_level(logging.WARNING):
        watching(host, scenario)


def test_turns_are_bounded_and_a_refresh_takes_as_many_as_it_needs(host: Host) -> None:
    host.pace = Pace(turn_seconds=0.0)

    async def scenario(watcher: Watcher) -> None:
        seen: list[int] = []
        for pid in range(1, 21):
            host.live(pid, 1)
            host.connector.put(Executed(pid))
        while len(host.mapped()) < 10:
            seen.append(len(host.mapped()))
            await asyncio.sleep(0)
        assert set(seen) >= {1, 2, 3, 4, 5}
        before = len(host.mapped())
        refreshed = watcher.refresh()
        assert len(host.mapped()) == before + 1
        assert not refreshed.done()
        await asyncio.wrap_future(refreshed)
        assert len(host.mapped()) == 20

    watching(host, scenario)


class HookedLoop(asyncio.SelectorEventLoop):
    """Calls on_add_reader once something is waited for."""

    on_add_reader: Callable[[], None] | None = None

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        super().add_reader(fd, callback, *args)
        if self.on_add_reader is not None:
            self.on_add_reader()


def test_record_that_comes_while_it_begins_to_wait_is_seen(host: Host) -> None:
    """A ring tells of it once, and that may have been to epoll_ctl(2)."""

    def be_told() -> None:
        host.live(1, 1)
        host.ring.put(record(1, 1), wake=False)

    async def scenario(_watcher: Watcher) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HookedLoop)
        loop.on_add_reader = be_told
        host.connector.put(Exited(77, 7))
        await until(lambda: host.mapped() == {1: {1}})
        loop.on_add_reader = None

    watching(host, scenario, HookedLoop)


def test_reader_thread_may_catch_up(host: Host) -> None:
    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1)
        host.connector.put(Forked(11, 10), Exited(11, 10), Executed(1), wake=False)
        assert await asyncio.to_thread(host.process_of, 11) == 10
        await until(lambda: host.mapped() == {1: {1}})

    watching(host, scenario)


def test_overflow_makes_threads_be_found_anew(host: Host) -> None:
    async def scenario(watcher: Watcher) -> None:
        host.connector.put(Forked(11, 10))
        watcher.refresh()
        assert host.process_of(11) == 10
        host.connector.put(Forked(12, 10), Overflowed())
        watcher.refresh()
        assert (host.process_of(11), host.process_of(12)) == (11, 12)

    watching(host, scenario)


@pytest.mark.usefixtures("_impatient")
def test_without_perf_and_connector_proc_is_read_again_and_again(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> Source[Any]:
        raise KernelFeatureError("perf events", "not here", "go elsewhere")

    host.kernel = KernelEvents(
        host.threads, Descendants(), open_ring=refuse, open_programs=refuse, open_connector=refuse
    )

    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1)
        await until(lambda: host.mapped() == {1: {1}})
        del host.processes[1]
        host.live(2, 2)
        await until(lambda: host.mapped() == {2: {2}})

    with caplog.at_level(logging.WARNING):
        watching(host, scenario)
    assert caplog.text.count("/proc is read every") == 2


def test_program_takes_the_place_of_refused_rings(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_cpu: int) -> Source[Mapped | Lost]:
        raise KernelFeatureError("perf events", "not here", "go elsewhere")

    host.kernel = KernelEvents(
        host.threads,
        Descendants(),
        open_ring=refuse,
        open_programs=lambda: host.ring,
        open_connector=lambda: host.connector,
    )

    async def scenario(_watcher: Watcher) -> None:
        host.live(1, 1)
        host.ring.put(Mapped(1, 0, 1, "", 0, 0, 0))
        await until(lambda: host.mapped() == {1: {1}})

    watching(host, scenario)
    assert host.ring.closed
    assert "/proc is read every" not in caplog.text


def test_rings_of_some_cpus_are_closed_where_another_one_has_none(host: Host) -> None:
    def ring(cpu: int) -> Source[Mapped | Lost]:
        if cpu:
            raise KernelFeatureError("perf events", "not here", "go elsewhere")
        return host.ring

    def refuse() -> Source[Mapped | Lost]:
        raise KernelFeatureError("mapping records", "neither here", "go elsewhere")

    events = KernelEvents(
        host.threads,
        Descendants(),
        cpus=lambda: [0, 1],
        open_ring=ring,
        open_programs=refuse,
        open_connector=lambda: host.connector,
    )
    assert [error.feature for error in events.open()] == ["perf events"]
    assert host.ring.closed
    events.close()


def test_nothing_is_read_after_the_end(host: Host) -> None:
    async def scenario(_watcher: Watcher) -> None:
        host.connector.put(Executed(1))

    watching(host, scenario)
    assert host.ring.closed
    assert host.connector.closed
    assert host.files.closed


def test_this_host_is_watched_and_whoever_was_held_up_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "app"
    path.write_bytes(image(b"probe"))
    pid, registry, filesystems = os.getpid(), Registry(), Filesystems()
    is_slow = True

    def parse(descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        if os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise ObjectUnreadableError("of no interest here")
        if is_slow:
            raise ObjectPendingError
        return parse_here(descriptor, pid, owner)

    async def run() -> None:
        nonlocal is_slow
        watcher = watch_host(registry, KernelEvents(Threads(), Descendants()), parse, filesystems, lambda _: finished())
        try:
            watcher.look_at([pid])
            assert registry.pids() == {pid}
            assert registry.objects() == []
            is_slow = False
            filesystems.calls.on_free({pid})
            async with asyncio.timeout(20):
                await until(registry.objects)
            assert [found.path for found in registry.objects()] == [str(path)]
        finally:
            watcher.stop()

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        asyncio.run(run())


@pytest.mark.usefixtures("_forever_busy")
def test_who_refreshes_waits_for_the_own_processes_and_root_s(host: Host, users: dict[int, int]) -> None:
    host.pace = replace(host.pace, turn_seconds=0.0, refresh_seconds=0.0)
    users |= dict.fromkeys(range(1, 50), 1001) | {50: 1000, 51: 0, 52: 1000}

    async def scenario(watcher: Watcher) -> None:
        for pid in users:
            host.live(pid, 1)
            host.connector.put(Executed(pid), wake=False)
        await asyncio.wrap_future(watcher.looked(frozenset({1000})))
        assert host.mapped().keys() >= {50, 51, 52}
        # beside these, one of others' in a turn
        assert len(host.mapped()) < 15
        await asyncio.wrap_future(watcher.refresh(None, frozenset({48, 49, 4_000_000})))
        assert host.mapped().keys() >= {48, 49}
        assert len(host.mapped()) < 30

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
def test_files_of_processes_that_have_ended_take_a_share_of_time(
    host: Host, users: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    users |= dict.fromkeys(range(100, 201), budgets.NOBODY)
    host.files.owners |= {record(1, 1000 + number).path: 1001 for number in range(5)}
    resolved: list[int] = []

    def slow(_pid: int, mapping: Mapping, _inodes: ProcessInodes) -> Object | None:
        nonlocal now
        now += 0.1
        resolved.append(mapping.inode)
        return host.files.objects[1]

    monkeypatch.setattr(host.files, "resolve", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(looking, "CpuBudget", lambda: budgets.CpuBudget(lambda: now))

    async def scenario(watcher: Watcher) -> None:
        nonlocal now

        def looked() -> None:
            watcher.refresh()
            while watcher._looker.has_work:
                watcher.refresh()

        for pid in range(100, 200):
            host.ring.put(*(record(pid, 1000 + number) for number in range(5)), wake=False)
            host.connector.put(Exited(pid, pid), wake=False)
        looked()
        assert not host.mapped()
        # some at once, and the rest when there is time again
        assert 1000.2 < now < 1001.5
        # of a file of root's, it is known at once
        host.ring.put(record(200, 2000), wake=False)
        host.connector.put(Exited(200, 200), wake=False)
        watcher.refresh()
        assert resolved.pop() == 2000
        before, now = now, now + 10
        watcher._looker.resume()
        looked()
        assert now - before > 10.2
        assert {change.object.key.inode for change in host.changes} == {1}
        host.live(5, 1)
        users[5] = 1000
        host.connector.put(Executed(5), wake=False)
        watcher.refresh(frozenset({1000}))
        assert host.mapped() == {5: {1}}

    watching(host, scenario)


@pytest.mark.usefixtures("_forever_busy")
def test_all_of_proc_is_not_read_again_and_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic() + 100
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def scenario(watcher: Watcher) -> None:
        nonlocal now
        before = watcher.rescans
        host.live(1, 1)
        for _ in range(10):
            host.connector.put(Overflowed(), wake=False)
            watcher.refresh()
        assert watcher.rescans == before
        assert host.mapped() == {}
        now += 2
        watcher.refresh()
        assert watcher.rescans == before + 1
        assert host.mapped() == {1: {1}}

    watching(host, scenario)
