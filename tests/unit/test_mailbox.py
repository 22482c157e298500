"""Work that one thread does for another."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from stapsdtd.runtime.heartbeat import Heartbeat
from stapsdtd.runtime.mailbox import Mailbox, ThreadEndedError
from tests.support import wait_for

pytestmark = pytest.mark.timeout(30)


class CountingMailbox(Mailbox):
    """Knows how many jobs it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.posted = 0

    def post(self, job: Callable[[], None]) -> Future[None]:
        done = super().post(job)
        self.posted += 1
        return done


@pytest.fixture
def jobs() -> Iterator[CountingMailbox]:
    made = CountingMailbox()
    yield made
    made.close()


class Caller(threading.Thread):
    """A thread that hands over one job; error is what the call raised."""

    def __init__(self, jobs: CountingMailbox, job: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._jobs = jobs
        self._job = job
        self.error: BaseException | None = None
        posted = jobs.posted
        self.start()
        wait_for(lambda: jobs.posted > posted and is_readable(jobs), "the job to be handed over")

    def run(self) -> None:
        try:
            self._jobs.call(self._job)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


def is_readable(jobs: Mailbox) -> bool:
    poll = select.poll()
    poll.register(jobs, select.POLLIN)
    return bool(poll.poll(0))


def raises(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def test_jobs_are_done_once_in_the_order_of_the_calls(jobs: CountingMailbox) -> None:
    done: list[int] = []
    callers = [Caller(jobs, partial(done.append, number)) for number in range(5)]
    jobs.run()
    assert done == [0, 1, 2, 3, 4]
    for caller in callers:
        caller.join()
    jobs.run()
    assert done == [0, 1, 2, 3, 4]


def test_jobs_are_done_by_the_thread_that_runs_them(jobs: CountingMailbox) -> None:
    threads: list[threading.Thread] = []
    caller = Caller(jobs, lambda: threads.append(threading.current_thread()))
    jobs.run()
    assert threads == [threading.current_thread()] != [caller]


def test_caller_waits_until_its_job_is_done(jobs: CountingMailbox) -> None:
    seen: list[bool] = []
    caller = Caller(jobs, lambda: seen.append(caller.is_alive()))
    assert caller.is_alive()
    jobs.run()
    caller.join()
    assert seen == [True]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_job_raises_reaches_its_caller_and_no_other(jobs: CountingMailbox, error: BaseException) -> None:
    done: list[str] = []
    first = Caller(jobs, raises(error))
    second = Caller(jobs, lambda: done.append("second"))
    jobs.run()
    first.join()
    second.join()
    assert (first.error, second.error, done) == (error, None, ["second"])


def test_descriptor_is_readable_exactly_while_there_is_work(jobs: CountingMailbox) -> None:
    assert not is_readable(jobs)
    caller = Caller(jobs, lambda: None)
    assert is_readable(jobs)
    jobs.run()
    caller.join()
    assert not is_readable(jobs)


def test_running_nothing_does_not_wait(jobs: CountingMailbox) -> None:
    jobs.run()
    assert not is_readable(jobs)


def test_job_that_comes_while_others_run_makes_the_descriptor_readable_again(jobs: CountingMailbox) -> None:
    done: list[str] = []
    later: list[Caller] = []

    def job() -> None:
        later.append(Caller(jobs, lambda: done.append("later")))
        done.append("first")

    first = Caller(jobs, job)
    jobs.run()
    first.join()
    assert done == ["first"]
    assert is_readable(jobs)
    jobs.run()
    later[0].join()
    assert done == ["first", "later"]


def test_many_threads_get_their_own_jobs_done_by_one(jobs: CountingMailbox) -> None:
    done: list[int] = []
    stop = threading.Event()

    def work() -> None:
        poll = select.poll()
        poll.register(jobs, select.POLLIN)
        while not stop.is_set():
            poll.poll(20_000)
            jobs.run()

    def call(first: int) -> None:
        for number in range(first, first + 100):
            jobs.call(partial(done.append, number))
            assert number in done

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    callers = [threading.Thread(target=call, args=(1000 * each,), daemon=True) for each in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    jobs.call(stop.set)
    worker.join()
    assert len(done) == 400
    for each in range(4):
        own = [number for number in done if number // 1000 == each]
        assert own == list(range(1000 * each, 1000 * each + 100))


def test_close_closes_the_descriptor() -> None:
    jobs = Mailbox()
    descriptor = jobs.fileno()
    jobs.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_posted_job_is_not_waited_for(jobs: CountingMailbox) -> None:
    done: list[str] = []
    answer = jobs.post(lambda: done.append("it"))
    assert not answer.done()
    jobs.run()
    assert (answer.result(0), done) == (None, ["it"])


def test_who_waits_for_a_thread_that_ended_or_comes_later_is_told(jobs: CountingMailbox) -> None:
    waiting = Caller(jobs, lambda: None)
    jobs.abandon()
    waiting.join(20)
    assert isinstance(waiting.error, ThreadEndedError)
    with pytest.raises(ThreadEndedError):
        jobs.call(lambda: None)


class TestPulse:
    def test_thread_that_answers_is_well_and_is_asked_again(self, jobs: CountingMailbox) -> None:
        asked: list[Future[None]] = []

        def ask() -> Future[None]:
            asked.append(jobs.post(lambda: None))
            return asked[-1]

        pulse = Heartbeat("the worker", ask, stall_seconds=0)
        assert pulse.problem() is None
        jobs.run()
        assert pulse.problem() is None
        assert len(asked) == 2

    def test_thread_that_hangs_is_told_of_in_the_same_words_until_it_answers(self, jobs: CountingMailbox) -> None:
        pulse = Heartbeat("the worker", lambda: jobs.post(lambda: None), stall_seconds=0.05)
        assert pulse.problem() is None, "it may be busy"
        told = wait_for(pulse.problem, "it to be told of")
        assert told == "the worker has been busy or hanging for more than 0.05 s"
        assert pulse.problem() == told
        assert jobs.posted == 1, "it is not asked again and again"
        jobs.run()
        assert pulse.problem() is None

    def test_thread_that_ended_is_told_of_at_once(self, jobs: CountingMailbox) -> None:
        pulse = Heartbeat("the worker", lambda: jobs.post(lambda: None))
        assert pulse.problem() is None
        jobs.abandon()
        assert pulse.problem() == "the thread that reads events ended; restart the daemon"
