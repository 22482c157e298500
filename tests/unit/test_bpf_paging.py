"""Who brings pages in, for whom, and how much of it; a test says when a page comes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from stapsdtd.capture.bpf.paging import Paging, PagingLimits, PagingMetrics
from tests.support import wait_for
from tests.unit.fake_bpf import running

pytestmark = pytest.mark.timeout(60)

PATIENCE_SECONDS = 20
PAGE = 4096
LIMITS = PagingLimits(owners=4, requests=10, pages=3)


class Host:
    """Pids of 100 and more belong to user 1, those of 200 and more to user 2, and so on.

    stuck: users whose pages come when the event is set. forbidden, broken: addresses.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.stuck: dict[int, threading.Event] = {}
        self.begun: list[tuple[int, int, int]] = []
        self.touched: list[tuple[int, int, int]] = []
        self.forbidden: set[int] = set()
        self.broken: dict[int, Exception] = {}
        self.region_end = 1 << 40
        self.threads: set[threading.Thread] = set()
        self.paging = Paging(self.touch, lambda pid: pid // 100, self.room, lambda: self.now, limits=LIMITS)

    def room(self, _pid: int, address: int) -> int:
        return 0 if address in self.forbidden else self.region_end - address

    def touch(self, pid: int, address: int, byte_count: int) -> None:
        self.threads.add(threading.current_thread())
        self.begun.append((pid, address, byte_count))
        comes = self.stuck.get(pid // 100)
        if comes is not None:
            assert comes.wait(PATIENCE_SECONDS)
        if address in self.broken:
            raise self.broken[address]
        self.touched.append((pid, address, byte_count))

    def hang(self, user: int) -> threading.Event:
        comes = self.stuck[user] = threading.Event()
        return comes

    def settle(self) -> None:
        wait_for(lambda: not running("stapsdtd-paging"), "all workers to go")


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for comes in made.stuck.values():
        comes.set()
    made.settle()
    for thread in made.threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_page_is_brought_in_by_another_thread(host: Host) -> None:
    host.paging.request(100, 0x7000, 17)
    host.settle()
    assert host.touched == [(100, 0x7000, 17)]
    assert threading.current_thread() not in host.threads
    assert host.paging.metrics() == PagingMetrics(1, 0, 0)


def test_one_stuck_owner_delays_no_other(host: Host) -> None:
    comes = host.hang(1)
    for pid in (100, 101):
        host.paging.request(pid, 0x7000, 8)
    wait_for(lambda: host.begun, "the first to begin")
    for pid in (200, 300, 201):
        host.paging.request(pid, 0x7000, 8)
    wait_for(lambda: len(host.touched) == 3, "the others' pages")
    assert {pid for pid, _, _ in host.touched} == {200, 300, 201}
    # one worker for each owner
    assert [pid for pid, _, _ in host.begun if pid < 200] == [100]
    comes.set()
    wait_for(lambda: len(host.touched) == 5, "the rest")
    host.settle()
    assert [pid for pid, _, _ in host.touched if pid < 200] == [100, 101]
    assert host.paging.metrics() == PagingMetrics(5, 0, 0)


def test_owners_worker_goes_when_there_is_nothing_to_do_and_comes_again(host: Host) -> None:
    host.paging.request(100, 0x7000, 8)
    host.settle()
    host.paging.request(100, 0x9000, 8)
    host.settle()
    assert host.touched == [(100, 0x7000, 8), (100, 0x9000, 8)]


def test_only_so_much_of_one_owner_waits(host: Host) -> None:
    comes = host.hang(1)
    host.paging.request(100, 0, 8)
    wait_for(lambda: host.begun, "the first to begin")
    for page in range(1, LIMITS.requests + 6):
        host.paging.request(100, page * PAGE, 8)
    assert host.paging.metrics() == PagingMetrics(0, 5, 0)
    # nobody else pays for it
    host.paging.request(200, 0, 8)
    wait_for(lambda: host.touched == [(200, 0, 8)], "the other's page")
    comes.set()
    host.settle()
    assert host.paging.metrics() == PagingMetrics(LIMITS.requests + 2, 5, 0)


def test_only_so_many_owners_have_workers_at_once(host: Host) -> None:
    for user in range(1, LIMITS.owners + 1):
        host.hang(user)
        host.paging.request(100 * user, 0, 8)
    wait_for(lambda: len(host.begun) == LIMITS.owners, "all to begin")
    late = 100 * (LIMITS.owners + 1)
    host.paging.request(late, 0, 8)
    assert host.paging.metrics().refused == 1
    host.stuck[1].set()
    wait_for(lambda: len(running("stapsdtd-paging")) == LIMITS.owners - 1, "a worker to go")
    host.paging.request(late, PAGE, 8)
    wait_for(lambda: (late, PAGE, 8) in host.touched, "the late one's page")


def test_same_page_is_touched_once_a_second(host: Host) -> None:
    for address in (0x7000, 0x7010, 0x7FFF):
        host.paging.request(100, address, 8)
    # another process's is another one
    host.paging.request(101, 0x7000, 8)
    host.settle()
    assert sorted(host.touched) == [(100, 0x7000, 8), (101, 0x7000, 8)]
    host.now += 0.9
    host.paging.request(100, 0x7020, 8)
    host.now += 0.2
    host.paging.request(100, 0x7030, 8)
    host.settle()
    assert (100, 0x7020, 8) not in host.touched
    assert (100, 0x7030, 8) in host.touched


def test_only_so_many_pages_are_remembered(host: Host) -> None:
    assert LIMITS.pages == 3
    # 1 is forgotten for 4, and 2 for 1
    for page in (1, 2, 3, 4, 1, 3, 4, 2):
        host.paging.request(100, page * PAGE, 8)
        host.settle()
    assert [address // PAGE for _, address, _ in host.touched] == [1, 2, 3, 4, 1, 2]


def test_memory_that_may_not_be_touched_is_not(host: Host) -> None:
    host.forbidden.add(0x7000)
    for address in (0x7000, 0x9000):
        host.paging.request(100, address, 8)
    host.settle()
    assert host.touched == [(100, 0x9000, 8)]
    assert host.paging.metrics() == PagingMetrics(1, 1, 0)


def test_process_that_is_gone_costs_the_others_nothing(host: Host) -> None:
    host.broken |= {0x7000: ProcessLookupError(errno.ESRCH, "gone"), 0x8000: OSError(errno.EFAULT, "nothing there")}
    for address in (0x7000, 0x8000, 0x9000):
        host.paging.request(100, address, 8)
    host.settle()
    assert host.touched == [(100, 0x9000, 8)]
    assert host.paging.metrics() == PagingMetrics(1, 0, 0)


def test_unexpected_error_costs_its_owner_one_page(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.broken[0x7000] = ValueError("a bug")
    for address in (0x7000, 0x9000):
        host.paging.request(100, address, 8)
    host.settle()
    assert host.touched == [(100, 0x9000, 8)]
    assert "pid 100: cannot bring in memory at 0x7000" in caplog.text


def test_who_is_stuck_is_told_until_the_page_comes(host: Host) -> None:
    comes = host.hang(1), host.hang(2)
    host.paging.request(100, 0, 8)
    host.paging.request(200, 0, 8)
    wait_for(lambda: len(host.begun) == 2, "both to begin")
    assert host.paging.metrics().stuck == 0
    host.now += 1.5
    assert host.paging.metrics().stuck == 2
    comes[0].set()
    wait_for(lambda: host.paging.metrics().stuck == 1, "the first to go on")
    comes[1].set()
    host.settle()
    assert host.paging.metrics() == PagingMetrics(2, 0, 0)


def test_owner_is_not_stuck_whose_pages_come_one_by_one(host: Host) -> None:
    """However long they take together."""
    for number in range(5):
        comes = host.hang(1)
        host.paging.request(100, number * PAGE, 8)
        wait_for(lambda: len(host.begun) == number + 1, "it to begin")  # noqa: B023 - called at once
        host.paging.request(100, (number + 10) * PAGE, 8)
        host.now += 0.8
        assert host.paging.metrics().stuck == 0
        del host.stuck[1]
        comes.set()
        host.settle()
        host.begun = host.begun[: number + 1]


def test_thread_that_cannot_be_started_leaves_no_line(host: Host) -> None:
    # more than a process has room for
    before = threading.stack_size(1 << 48)
    try:
        host.paging.request(100, 0x7000, 8)
    finally:
        threading.stack_size(before)
    assert host.paging.metrics() == PagingMetrics(0, 1, 0)
    host.paging.request(100, 0x9000, 8)
    host.settle()
    assert host.touched == [(100, 0x9000, 8)]


def test_only_what_is_of_the_same_region_is_touched(host: Host) -> None:
    host.region_end = 0x5008
    host.paging.request(100, 0x5000, 4097)
    host.settle()
    assert host.touched == [(100, 0x5000, 8)]
