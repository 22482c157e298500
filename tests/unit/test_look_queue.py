"""Which processes are looked at, and when, by what the kernel reports of them."""

from __future__ import annotations

import pytest

from stapsdtd.kernel.perf import Mapped
from stapsdtd.kernel.procfs import ProcessStat
from stapsdtd.model import FileOffset, ProcessKey
from stapsdtd.procs.look_queue import LookQueue
from stapsdtd.procs.process_maps import Look


class Host:
    """states and threads are as in /proc. alarms: how often something was to be looked at later."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[str, int]] = {}
        self.alarms = 0
        self.queue = LookQueue(self._stat, self._on_later)

    def _stat(self, pid: int) -> ProcessStat | None:
        found = self.processes.get(pid)
        return ProcessStat(ProcessKey(pid, 100), *found) if found else None

    def _on_later(self) -> None:
        self.alarms += 1

    def taken(self) -> dict[int, list[Mapped]]:
        """Take all that are due, in their order."""
        found = {}
        while (pid := self.queue.first()) is not None:
            found[pid] = self.queue.take(pid)
        return found


@pytest.fixture
def host() -> Host:
    return Host()


def record(pid: int, inode: int) -> Mapped:
    return Mapped(pid, 1, inode, f"/lib/{inode}", 0x1000 * inode, 0x1000, FileOffset(0))


def test_processes_are_due_once_in_the_order_of_their_first_event(host: Host) -> None:
    host.queue.add(2, record(2, 1))
    host.queue.executed(1)
    host.queue.add(2, record(2, 3))
    assert host.taken() == {2: [record(2, 1), record(2, 3)], 1: []}
    assert host.queue.first() is None


def test_fork_is_due_a_turn_later_unless_it_executes_or_ends(host: Host) -> None:
    for pid in (1, 2, 3):
        host.queue.forked(pid, pid)
    forked = host.queue.forked_lately()
    assert forked == [1, 2, 3]
    assert host.queue.first() is None
    host.queue.executed(2)
    assert host.queue.exited(3, 3)
    host.queue.forked(4, 4)
    assert host.taken() == {2: []}
    host.queue.settle_forks(forked)
    assert host.taken() == {1: []}
    assert host.queue.forked_lately() == [4]


def test_end_of_a_thread_or_a_process(host: Host) -> None:
    host.queue.forked(11, 10)
    host.processes[10] = "S", 2
    assert not host.queue.exited(11, 10)
    host.processes[10] = "S", 1
    assert host.queue.exited(10, 10)
    assert host.queue.first() is None


@pytest.mark.parametrize("is_known_from_a_look", [True, False])
def test_process_without_a_leader_is_looked_at_until_its_last_thread_ends(
    host: Host, is_known_from_a_look: bool
) -> None:
    if is_known_from_a_look:
        host.queue.looked(10, Look(threads=2))
    else:
        host.queue.forked(11, 10)
    host.processes[10] = "Z", 2
    assert not host.queue.exited(10, 10)
    for _ in range(3):
        assert host.taken() == {}
        host.queue.resume()
        assert host.taken() == {10: []}
    # at each of the ends of its threads, too
    assert not host.queue.exited(11, 10)
    assert host.taken() == {10: []}
    host.queue.looked(10, Look(threads=0))
    host.queue.resume()
    assert host.taken() == {10: []}
    host.queue.resume()
    assert host.taken() == {}
    assert host.alarms == 4


def test_process_that_executes_without_its_leader_has_one_again(host: Host) -> None:
    host.queue.forked(11, 10)
    host.processes[10] = "Z", 2
    assert not host.queue.exited(10, 10)
    host.queue.executed(10)
    assert host.taken() == {10: []}
    host.queue.resume()
    assert host.taken() == {10: []}
    host.queue.resume()
    assert host.taken() == {}


def test_exec_from_another_thread_under_a_tracer_is_no_end(host: Host) -> None:
    """The thread takes the leader's place, and is stopped before the exec is reported."""
    host.queue.forked(11, 10)
    host.processes[10] = "t", 1
    assert not host.queue.exited(10, 10)
    assert host.taken() == {10: []}


def test_pid_that_is_used_again_has_one_thread(host: Host) -> None:
    host.queue.forked(11, 10)
    assert host.queue.exited(10, 10)
    host.processes[10] = "Z", 2
    assert host.queue.exited(10, 10)


def test_deferred_process_keeps_its_records(host: Host) -> None:
    host.queue.add(1, record(1, 1))
    host.queue.defer(1)
    assert host.alarms == 1
    assert host.queue.first() is None
    host.queue.add(1, record(1, 2))
    host.queue.resume()
    assert host.taken() == {1: [record(1, 2), record(1, 1)]}


@pytest.mark.parametrize(
    ("look", "is_again"),
    [
        (Look(threads=1), False),
        (Look(threads=1, is_unsettled=True), True),
        (Look(threads=1, is_partial=True), True),
    ],
)
def test_look_may_need_another_one(host: Host, look: Look, is_again: bool) -> None:
    host.queue.looked(1, look)
    assert host.queue.first() is None
    host.queue.resume()
    assert host.taken() == ({1: []} if is_again else {})
    assert host.alarms == is_again


def test_records_of_a_process_that_is_held_up_wait_for_its_next_look(host: Host) -> None:
    host.queue.hold_up(1, [record(1, 1)])
    assert host.queue.first() is None
    host.queue.add(1, record(1, 2))
    assert host.taken() == {1: [record(1, 1), record(1, 2)]}
    host.queue.add(1)
    assert host.taken() == {1: []}


def test_memory_for_processes_that_are_held_up_is_bounded(host: Host) -> None:
    for pid in range(1, 1101):
        host.queue.hold_up(pid, [record(pid, inode) for inode in range(1, 201)])
    taken = [host.queue.take(pid) for pid in range(1, 1101)]
    assert [len(records) for records in taken] == 1000 * [100] + 100 * [0]
    assert taken[0][-1] == record(1, 200)


def test_a_process_that_maps_without_end_is_due_with_one_record_of_each_file_and_of_few_files(host: Host) -> None:
    for number in range(5000):
        host.queue.add(1, record(1, 7)._replace(start=number))
    assert host.taken() == {1: [record(1, 7)._replace(start=4999)]}
    for number in range(5000):
        host.queue.add(1, record(1, number))
    (taken,) = host.taken().values()
    assert [each.inode for each in taken] == list(range(4000, 5000))
