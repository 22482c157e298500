from __future__ import annotations

import os
import subprocess

import pytest

from stapsdtd.procs.budgets import CpuBudget, MemoryBudget, user_of
from tests.support import SYSTEM_PYTHON, require
from tests.unit.memory import allocated_bytes
from tests.unit.samples import key, sample_object, site
from tests.users import ANNE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def time(clock: Clock) -> CpuBudget:
    return CpuBudget(clock)


def take(time: CpuBudget, clock: Clock, user: int, seconds: float) -> None:
    with time.taken(user):
        clock.now += seconds


def test_user_who_took_much_has_nothing_left_for_a_while(time: CpuBudget, clock: Clock) -> None:
    assert time.left(1000) == 0.25
    take(time, clock, 1000, 0.1)
    # a quarter of it has been paid off meanwhile
    assert time.left(1000) == pytest.approx(0.15)
    take(time, clock, 1000, 0.15)
    assert time.left(1000) <= 0.05
    take(time, clock, 1000, 5)
    assert time.left(1000) < 0
    clock.now += 20
    assert time.left(1000) == 0.25


def test_in_the_long_run_a_user_gets_a_share(time: CpuBudget, clock: Clock) -> None:
    taken, begin = 0.0, clock.now
    while clock.now < begin + 1000:
        if time.left(1000) > 0:
            take(time, clock, 1000, 0.01)
            taken += 0.01
        else:
            clock.now += 0.01
    assert taken / 1000 == pytest.approx(0.25, abs=0.01)


def test_turns_are_short(time: CpuBudget, clock: Clock) -> None:
    assert (time.slice(0), time.slice(1000)) == (float("inf"), 0.004)
    take(time, clock, 1000, 2)
    assert time.slice(1000) <= 0


def test_users_do_not_share_and_root_is_not_bounded(time: CpuBudget, clock: Clock) -> None:
    take(time, clock, 1000, 50)
    take(time, clock, 0, 50)
    assert time.left(1001) == 0.25
    assert time.left(0) == float("inf")


def test_failure_takes_time_too(time: CpuBudget, clock: Clock) -> None:
    def fail() -> None:
        with time.taken(1000):
            clock.now += 10
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        fail()
    assert time.left(1000) < 0


def test_users_of_long_ago_are_forgotten(time: CpuBudget, clock: Clock) -> None:
    def take_all() -> None:
        for user in range(1, 10_000):
            take(time, clock, user, 0.1)
        clock.now += 10
        take(time, clock, 1, 0.1)

    # all of them would take some 800 kB
    assert allocated_bytes(take_all) < 100_000


def test_user_of_a_process() -> None:
    assert user_of(os.getpid()) == os.geteuid()
    assert user_of(1 << 30) == 0


def test_process_that_is_not_dumpable_counts_for_its_user() -> None:
    """Most of what /proc shows of it is root's."""
    require(os.geteuid() == 0, "root")
    sleeping = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); time.sleep(1000)"
    with subprocess.Popen(ANNE.command(SYSTEM_PYTHON, "-c", sleeping), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        assert os.stat(f"/proc/{child.pid}/status").st_uid == 0
        assert user_of(child.pid) == ANNE.uid
        child.kill()


def test_holdings_are_bounded_by_user() -> None:
    holdings = MemoryBudget(max_weight=5)
    one, two, three = (sample_object(site("a"), site("b", 1), of=key(number)) for number in (1, 2, 3))
    assert holdings.admit(1000, one)
    assert not holdings.admit(1000, two)
    # what is known already is known, whoever maps it too
    assert holdings.admit(1000, one)
    assert holdings.admit(1001, one)
    assert holdings.admit(1001, two)
    assert not holdings.admit(1001, three)
    assert holdings.admit(0, three)
    holdings.release(one.key)
    holdings.release(one.key)
    holdings.release(three.key)
    assert holdings.admit(1000, three)


def test_root_holds_what_it_likes() -> None:
    holdings = MemoryBudget(max_weight=5)
    assert all(holdings.admit(0, sample_object(site("a"), site("b", 1), of=key(number))) for number in range(5))
