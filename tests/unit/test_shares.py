"""Clients beside others get their share of the daemon's processor time, and whoever is alone gets all of it."""

from __future__ import annotations

import asyncio

import pytest

from stapsdtd.api.access import Gate
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import Peer
from stapsdtd.config import USER
from stapsdtd.errors import LimitReachedError
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.shares import OTHERS, Shares, Toll
from tests.support import wait_for


class Host:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.shares = Shares(lambda: self.now, lambda: self.now)


@pytest.fixture
def host() -> Host:
    return Host()


def test_who_is_alone_never_waits(host: Host) -> None:
    host.shares.began("greedy")
    host.shares.charge("greedy", "matching", 100.0)
    assert host.shares.seconds_to_wait("greedy") == 0
    assert host.shares.seconds_to_wait("nobody") == 0


def test_beside_others_a_second_may_be_taken_in_advance(host: Host) -> None:
    host.shares.began("other")
    host.shares.charge("greedy", "matching", 0.25)
    assert host.shares.seconds_to_wait("greedy") == 0
    host.shares.charge("greedy", "requests", 0.25)
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(1)
    host.now += 0.75
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(0.25)
    host.now += 0.25
    assert host.shares.seconds_to_wait("greedy") == 0
    # what was not taken is not kept
    host.now += 1000
    host.shares.charge("greedy", "matching", 0.5)
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(1)


def test_others_want_the_daemon_with_a_subscription_or_for_a_second_after_their_work(host: Host) -> None:
    host.shares.charge("greedy", "matching", 10.0)
    host.shares.began("other")
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(39)
    host.shares.ended("other")
    assert host.shares.seconds_to_wait("greedy") == 0
    host.shares.charge("other", "requests", 0.001)
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(39)
    host.now += 1
    assert host.shares.seconds_to_wait("greedy") == 0


def test_a_share_is_the_clients_own(host: Host) -> None:
    host.shares.began("other")
    host.shares.set_share("greedy", 1.0)
    host.shares.charge("greedy", "matching", 3.0)
    assert host.shares.seconds_to_wait("greedy") == pytest.approx(2)


def test_accounts_of_those_who_left_are_summed(host: Host) -> None:
    shares = host.shares
    with shares.charged("here", "requests"):
        host.now += 2
    shares.charge("here", "matching", 1.0)
    shares.count_refused("here")
    for number in range(300):
        shares.charge(f"gone {number}", "requests", 1.0)
        shares.count_frames(f"gone {number}", 2)
        shares.count_waited(f"gone {number}", 0.5)
    host.now += 10_000
    # which makes it close those that are idle
    shares.charge("another", "requests", 0.0)
    taken = shares.taken(["here"])
    assert sum(each.seconds["requests"] for each in taken.values()) == pytest.approx(302)
    assert (taken[OTHERS].frames, taken[OTHERS].waited) == (600, 150)
    assert sum(each.refused for each in taken.values()) == 1
    # whoever is back has a new one, so that no sum falls
    before = shares.taken([])[OTHERS]
    shares.charge("gone 299", "requests", 1.0)
    after = shares.taken(["gone 299"])
    assert after["gone 299"].seconds == {"requests": 1.0}
    assert after[OTHERS] == before


def test_turns_of_a_thread_are_charged_and_wait(host: Host) -> None:
    thread = FairThread("shared", Toll(host.shares, "matching"), clock=lambda: host.now)
    done: list[str] = []
    try:
        host.shares.began("other")
        host.shares.charge("greedy", "matching", 10.0)
        greedy = thread.submit(Queue("greedy"), lambda: done.append("greedy"))
        thread.submit(Queue("other"), lambda: done.append("other")).result(20)
        # what is urgent does not wait either
        thread.ask().result(20)
        assert done == ["other"]
        assert not greedy.done()
        host.now += 100
        greedy.result(20)
        host.shares.charge("greedy", "matching", 10.0)
        cancelled = thread.submit(Queue("greedy"), lambda: done.append("cancelled"))
        assert cancelled.cancel()
        wait_for(lambda: not thread.backlog().waiting, "what was cancelled to be dropped")
        # nor does anything at the end
        last = thread.submit(Queue("greedy"), lambda: done.append("last"))
    finally:
        thread.stop()
    assert last.done()
    assert done == ["other", "greedy", "last"]
    assert host.shares.taken(["other"])["other"].seconds["matching"] > 0


def test_a_toll_may_only_count(host: Host) -> None:
    toll = Toll(host.shares, "arming", waits=False)
    host.shares.began("other")
    toll.charge("greedy", 10.0)
    assert toll.seconds_to_wait("greedy") == 0
    assert host.shares.seconds_to_wait("greedy") > 0


def test_calls_wait_for_a_moment_and_are_refused_beyond(host: Host) -> None:
    peer = Peer("unix:/socket", 64101)
    gate = Gate(lambda _: peer, Policy([USER]), host.shares)
    caller = gate.enter("list", "address")
    host.shares.began("other")

    async def turn() -> None:
        await asyncio.wait_for(gate.wait_for_turn(caller), 20)

    asyncio.run(turn())
    host.shares.charge(peer.client, "matching", 10.0)
    with pytest.raises(LimitReachedError, match="uid 64101 takes more than 25 % of a processor"):
        asyncio.run(turn())
    host.now += 38

    async def in_time() -> None:
        waiting = asyncio.create_task(turn())
        await asyncio.to_thread(
            wait_for, lambda: host.shares.taken([peer.client])[peer.client].waited, "the call to wait"
        )
        assert not waiting.done()
        host.now += 1
        await waiting

    asyncio.run(in_time())
    taken = host.shares.taken([peer.client])[peer.client]
    assert taken.refused == 1
    assert 0 < taken.waited <= 2


def test_what_goes_on_all_the_same_holds_up_no_other_work_and_is_forgiven_soon(host: Host) -> None:
    host.shares.began("other")
    host.shares.charge("greedy", "reading", 100.0, is_apart=True)
    assert host.shares.seconds_to_wait("greedy") == 0
    assert 0 < host.shares.seconds_to_wait("greedy", is_apart=True) <= 1
    host.now += 2
    assert host.shares.seconds_to_wait("greedy", is_apart=True) == 0
    assert host.shares.taken(["greedy"])["greedy"].seconds["reading"] == 100
