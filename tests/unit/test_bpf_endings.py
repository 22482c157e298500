"""Plans on their way out, where a test says when hits are over and when records are read."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.tables import PlanEntry
from tests.support import wait_for
from tests.unit.fake_bpf import PATIENCE_SECONDS, RecordingSink, running

pytestmark = pytest.mark.timeout(60)

Ended = tuple[list[ActivePlan], list[Channel], Future[None]]


class Host:
    """waiting: something for each wait for hits that began. over: what each of them brings, None where it returns."""

    def __init__(self) -> None:
        self.waiting = SimpleQueue[int]()
        self.over = SimpleQueue[OSError | None]()
        self.ended = SimpleQueue[Ended]()
        self.endings = Endings(self.wait_for_hits, self.end, retry_seconds=0)

    def wait_for_hits(self) -> None:
        self.waiting.put(1)
        error = self.over.get(timeout=PATIENCE_SECONDS)
        if error is not None:
            raise error

    def end(self, plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]:
        done: Future[None] = Future()
        self.ended.put((list(plans), list(closing), done))
        return done

    def hits_end(self) -> None:
        self.waiting.get(timeout=PATIENCE_SECONDS)
        self.over.put(None)

    def told_to_end(self) -> Ended:
        return self.ended.get(timeout=PATIENCE_SECONDS)

    def finish(self) -> None:
        """Let all come to its end."""
        for _ in range(10):
            self.over.put(None)
        begun = self.endings.begin([])
        while not begun.done():
            self.told_to_end()[2].set_result(None)
            wait_for(lambda: begun.done() or not self.ended.empty(), "the last one")


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.finish()


def plan(number: int) -> ActivePlan:
    return ActivePlan(PlanEntry(number, 0, b"", 0, 0, (0,)), (), (), 0)


def channel(subscription_key: int) -> Channel:
    return Channel(subscription_key, RecordingSink())


def test_room_is_lent_again_when_hits_are_over_and_records_are_read(host: Host) -> None:
    one = plan(1)
    done = host.endings.begin([one])
    host.waiting.get(timeout=PATIENCE_SECONDS)
    assert (host.ended.empty(), host.endings.collect(), done.done()) == (True, [], False)
    host.over.put(None)
    plans, closing, read = host.told_to_end()
    assert (plans, closing) == ([one], [])
    assert (host.endings.collect(), done.done()) == ([], False)
    read.set_result(None)
    done.result(PATIENCE_SECONDS)
    assert host.endings.collect() == [one]
    assert host.endings.collect() == []


def test_those_that_come_meanwhile_share_one_grace_period(host: Host) -> None:
    plans, channels = [plan(number) for number in range(4)], [channel(1), channel(2)]
    host.endings.begin([plans[0]])
    host.waiting.get(timeout=PATIENCE_SECONDS)
    # they begin while the first one's lasts, which is over too early for them
    later = [host.endings.begin([plans[1]], channels[:1]), host.endings.begin(plans[2:], channels[1:])]
    host.over.put(None)
    assert host.told_to_end()[:2] == ([plans[0]], [])
    host.waiting.get(timeout=PATIENCE_SECONDS)
    assert host.ended.empty()
    host.over.put(None)
    told, closing, read = host.told_to_end()
    assert (told, closing) == (plans[1:], channels)
    assert not any(done.done() for done in later)
    read.set_result(None)
    for done in later:
        done.result(PATIENCE_SECONDS)
    # the reader was slower with the first, whose room is still in use
    assert host.endings.collect() == plans[1:]


def test_no_hit_is_waited_for_where_no_plan_ends(host: Host) -> None:
    closing = channel(1)
    done = host.endings.begin([], [closing])
    plans, channels, read = host.told_to_end()
    assert (plans, channels, host.waiting.empty()) == ([], [closing], True)
    read.set_result(None)
    done.result(PATIENCE_SECONDS)


def test_channel_is_closed_behind_plans_that_ended_before(host: Host) -> None:
    first = host.endings.begin([plan(1)])
    host.waiting.get(timeout=PATIENCE_SECONDS)
    closing = channel(1)
    host.endings.begin([], [closing])
    assert (host.ended.empty(), first.done()) == (True, False)
    host.over.put(None)
    assert [host.told_to_end()[1] for _ in range(2)] == [[], [closing]]


def test_wait_that_fails_is_tried_again(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    done = host.endings.begin([plan(1)])
    for _ in range(3):
        host.waiting.get(timeout=PATIENCE_SECONDS)
        assert host.ended.empty()
        host.over.put(OSError(errno.ENOMEM, "Cannot allocate memory"))
    host.hits_end()
    host.told_to_end()[2].set_result(None)
    done.result(PATIENCE_SECONDS)
    assert caplog.text.count("cannot wait until hits have left an old plan, trying again: [Errno 12]") == 3


def test_reader_that_is_no_more_holds_up_nobody(host: Host) -> None:
    one = plan(1)
    done = host.endings.begin([one])
    host.hits_end()
    host.told_to_end()[2].set_exception(ZeroDivisionError())
    done.result(PATIENCE_SECONDS)
    assert host.endings.collect() == [one]


def test_who_gives_up_waiting_cancels_nothing(host: Host) -> None:
    one = plan(1)
    done = host.endings.begin([one])
    assert not done.cancel()
    host.hits_end()
    host.told_to_end()[2].set_result(None)
    wait_for(lambda: host.endings.collect() == [one], "the plan to be over")


def test_finish_brings_all_to_its_end() -> None:
    def end(plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]:  # noqa: ARG001
        read: Future[None] = Future()
        read.set_result(None)
        return read

    before = running("stapsdtd-endings")
    endings = Endings(lambda: None, end)
    done = [endings.begin([plan(number)]) for number in range(3)]
    endings.finish()
    assert all(each.done() for each in done)
    assert len(endings.collect()) == 3
    assert set(running("stapsdtd-endings")) <= set(before)
