"""What is evaluated after hits: in turn, within bounds, and each event counted once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from stapsdtd.aggregate.aggregation import Key, Row
from stapsdtd.catalog.selectors import parse as parse_selector
from stapsdtd.events.batch import EventBatch
from stapsdtd.model import Capture
from stapsdtd.query.evaluate import steps
from stapsdtd.query.parse import parse
from stapsdtd.runtime.shares import Shares
from stapsdtd.sessions.evaluating import MOST_WAITING_BYTES, Evaluating, Parts
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.subscribe_options import Scope
from tests.support import wait_for
from tests.unit.samples import argument, batch, captured, event_rows, sample_object, site, strings, unsigned

PATIENCE_SECONDS = 20
SITE = site("query", 0x10, [argument(), argument()])
FOUND = sample_object(SITE, path="/opt/bin/app")
CAPTURED = captured(SITE, Capture(0), Capture(1, is_string=True))
HOSTILE = 'str(arg1) ~ "*' + "?" * 240 + 'b"'


class Recorded:
    """An evaluation that keeps the first pid of each slice. begins: called before each slice is evaluated."""

    def __init__(self, log: list[str], name: str, begins: Callable[[], object] = lambda: None) -> None:
        self.log = log
        self.name = name
        self.begins = begins
        self.kept: list[int] = []

    def evaluate(self, batch: EventBatch) -> EventBatch:
        self.begins()
        self.log.append(self.name)
        return batch

    def keep(self, batches: Sequence[EventBatch]) -> None:
        self.kept += [len(each) for each in batches]


class Evaluated:
    """A backlog, and what becomes of the events that wait there."""

    def __init__(self, thread: Evaluating, client: str, steps_per_byte: int, evaluation: Recorded) -> None:
        self._backlog = thread.backlog(client, steps_per_byte)
        self._evaluation = evaluation
        self.settled = self._backlog.settled

    def add(self, events: EventBatch) -> int:
        return self._backlog.add(events, self._evaluation)


class Rows:
    """Rows of three parts. fails_at: the part that cannot be decoded. is_dropped: nobody needs them any more."""

    hits = 60

    def __init__(self, log: list[str], name: str, fails_at: int | None = None) -> None:
        self.log = log
        self.name = name
        self.fails_at = fails_at
        self.added: list[Mapping[Key, Row]] = []
        self.lost = 0
        self.is_dropped = False

    def drop(self) -> None:
        self.is_dropped = True

    def parts(self) -> Iterator[tuple[int, Mapping[int, Mapping[Key, Row]]]]:
        for number in range(3):
            if number == self.fails_at:
                raise ValueError("as told")
            yield 20, {number: {(number,): Row(20)}}

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        assert [(site_id,)] == list(rows)
        self.log.append(self.name)
        self.added.append(rows)

    def write_off(self, count: int) -> None:
        self.lost += count


class Held:
    """Holds the thread at a slice of a client of its own until it is released."""

    def __init__(self, thread: Evaluating) -> None:
        self._begun, self._released = threading.Event(), threading.Event()
        Evaluated(thread, "held", 1, Recorded([], "held", self._wait)).add(numbers(1))
        assert self._begun.wait(PATIENCE_SECONDS)

    def _wait(self) -> None:
        self._begun.set()
        assert self._released.wait(PATIENCE_SECONDS)

    def release(self) -> None:
        self._released.set()


def numbers(count: int) -> EventBatch:
    return batch(range(count), unsigned(*range(count)))


def texts(count: int, length: int, pid: int = 10) -> EventBatch:
    column = strings(*(b"x" * length for _ in range(count)))
    return batch(range(count), unsigned(*range(count)), column, pid=[pid] * count)


@pytest.fixture
def thread() -> Iterator[Evaluating]:
    evaluating = Evaluating(Shares())
    yield evaluating
    evaluating.stop()


def subscription(thread: Evaluating, where: str, client: str = "uid 1") -> Subscription:
    clause = ClauseSpec((parse_selector("app:*"),), predicate=parse(where, lambda _: None))
    spec = SubscriptionSpec((clause,), Scope(), 30, 64 << 20, 64)
    made = Subscription("id", itertools.count(1), spec, 999, lambda *_: None, Principal(client), evaluating=thread)
    thread.began(client)
    assert made.clauses[0].id_to_arm(FOUND, CAPTURED) == 1
    return made


def deliver(made: Subscription, *batches: EventBatch) -> None:
    for each in batches:
        made.clauses[0].sink.fired(len(each))
        made.clauses[0].sink.deliver(each)


def settle(made: Subscription) -> None:
    made.clauses[0].sink.settled().result(PATIENCE_SECONDS)


def numbers_in_log(made: Subscription) -> list[object]:
    found: list[object] = []
    log = made.clauses[0].log
    while (entry := log.read(None)) is not None:
        log.handed_out(entry, entry.next_seq)
        found += [row[6] for row in event_rows(entry.batch)]
    return found


def test_clients_take_turns_slice_by_slice(thread: Evaluating) -> None:
    log: list[str] = []
    many, few = (Evaluated(thread, name, 1, Recorded(log, name)) for name in ("many", "few"))
    held = Held(thread)
    many.add(numbers(10 * 6144))
    few.add(numbers(1))
    few.add(numbers(1))
    held.release()
    many.settled().result(PATIENCE_SECONDS)
    assert log == ["many", "few", "many", "few", *["many"] * 8]


def test_clauses_of_a_client_take_turns(thread: Evaluating) -> None:
    log: list[str] = []
    first, second = (Evaluated(thread, "one", 1, Recorded(log, name)) for name in ("first", "second"))
    held = Held(thread)
    first.add(numbers(3 * 6144))
    second.add(numbers(2 * 6144))
    held.release()
    first.settled().result(PATIENCE_SECONDS)
    assert log == ["first", "second", "first", "second", "first"]


def test_what_slices_of_a_batch_left_is_kept_together(thread: Evaluating) -> None:
    evaluation = Recorded([], "one")
    backlog = Evaluated(thread, "one", 1, evaluation)
    backlog.add(numbers(6144 + 5))
    backlog.settled().result(PATIENCE_SECONDS)
    assert evaluation.kept == [6144, 5]


@pytest.mark.parametrize("where", ['str(arg1) ~ "S*"', HOSTILE])
def test_slices_are_the_smaller_the_more_an_expression_takes(thread: Evaluating, where: str) -> None:
    log: list[str] = []
    expensive = steps([parse(where, lambda _: None)])
    backlog = Evaluated(thread, "one", expensive, Recorded(log, "one"))
    events = texts(2000, 4000)
    backlog.add(events)
    backlog.settled().result(PATIENCE_SECONDS)
    assert len(log) >= events.nbytes * expensive // (12 << 20)
    assert len(log) <= events.nbytes * expensive // (12 << 20) + 2


def test_an_event_that_is_larger_than_a_slice_is_one(thread: Evaluating) -> None:
    evaluation = Recorded([], "one")
    backlog = Evaluated(thread, "one", 1 << 40, evaluation)
    backlog.add(texts(3, 4000))
    backlog.settled().result(PATIENCE_SECONDS)
    assert evaluation.log == ["one"] * 3
    assert evaluation.kept == [1, 1, 1]


def test_what_has_no_room_is_lost_to_its_client_alone_and_counted(thread: Evaluating) -> None:
    hostile, other = subscription(thread, HOSTILE), subscription(thread, 'str(arg1) ~ "x*"', "uid 2")
    held = Held(thread)
    while not hostile.account().lost_filter:
        deliver(hostile, texts(500, 4000))
    deliver(other, texts(100, 10))
    waiting = hostile.account()
    assert waiting.in_flight + waiting.lost_filter == waiting.fired
    assert MOST_WAITING_BYTES - (1 << 13) < waiting.in_flight * texts(1, 4000).nbytes <= MOST_WAITING_BYTES
    held.release()
    for each in (hostile, other):
        settle(each)
    account = hostile.account()
    assert (account.filtered, account.lost_filter) == (waiting.in_flight, waiting.lost_filter)
    assert account.fired == account.filtered + account.lost == waiting.fired
    assert numbers_in_log(other) == list(range(100))
    assert other.account().lost == 0


def test_few_events_of_one_process_find_room_beside_a_flood(thread: Evaluating) -> None:
    made = subscription(thread, 'str(arg1) ~ "x*"')
    held = Held(thread)
    both = batch(
        range(5003),
        unsigned(*range(5003)),
        strings(*[b"x" * 4000] * 5000, *[b"x"] * 3),
        pid=[10] * 5000 + [11] * 3,
    )
    deliver(made, both)
    held.release()
    settle(made)
    assert numbers_in_log(made)[-3:] == [5000, 5001, 5002]
    assert made.account().lost_filter > 0


def test_room_comes_back(thread: Evaluating) -> None:
    made = subscription(thread, 'str(arg1) ~ "y*"')
    events = texts(3000, 4000)
    for _ in range(4):
        deliver(made, events)
        settle(made)
    assert made.account().filtered == 4 * 3000
    wait_for(lambda: thread.room("uid 1") == MOST_WAITING_BYTES, "the room of the last ones")


def test_events_keep_their_order_once_some_are_evaluated(thread: Evaluating) -> None:
    """The site of the second batch has nothing to evaluate."""
    made = subscription(thread, 'name == "other" || str(arg1) ~ "x*"')
    other = captured(site("other", 0x20, [argument(), argument()]), Capture(0), Capture(1, is_string=True))
    assert made.clauses[0].id_to_arm(FOUND, other) == 2
    held = Held(thread)
    deliver(made, texts(2, 5), batch([3, 4], unsigned(7, 8), strings(b"a", b"b"), site_id=2))
    assert made.account().in_flight == 4
    assert not made.clauses[0].log.counts().received
    held.release()
    settle(made)
    assert numbers_in_log(made) == [0, 1, 7, 8]


def test_what_engines_test_does_not_wait(thread: Evaluating) -> None:
    made = subscription(thread, "arg0 > 1")
    held = Held(thread)
    deliver(made, texts(3, 5))
    assert numbers_in_log(made) == [0, 1, 2]
    held.release()


class Clocks:
    """A slice takes half a second of the processor's time, and no other time passes but by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worked = 0.0

    def cpu(self) -> float:
        self.worked += 0.5
        return self.worked


def test_a_client_has_a_share_while_others_have_subscriptions() -> None:
    clocks = Clocks()
    thread = Evaluating(Shares(lambda: clocks.now, clocks.cpu))
    log: list[str] = []
    greedy = Evaluated(thread, "greedy", 1, Recorded(log, "greedy"))
    thread.began("greedy")
    greedy.add(numbers(3 * 6144))
    greedy.settled().result(PATIENCE_SECONDS)
    assert log == ["greedy"] * 3
    thread.began("other")
    greedy.add(numbers(6144))
    settled = greedy.settled()
    other = Evaluated(thread, "other", 1, Recorded(log, "other"))
    other.add(numbers(1))
    other.settled().result(PATIENCE_SECONDS)
    assert log == ["greedy"] * 3 + ["other"]
    assert not settled.done()
    clocks.now = 1000.0
    other.add(numbers(1))
    greedy.settled().result(PATIENCE_SECONDS)
    assert sorted(log) == ["greedy"] * 4 + ["other"] * 2
    thread.stop()


@pytest.mark.parametrize("how", ["hurry", "others end"])
def test_a_share_does_not_bind_who_is_alone(how: str) -> None:
    clocks = Clocks()
    thread = Evaluating(Shares(lambda: clocks.now, clocks.cpu))
    for client in ("greedy", "other"):
        thread.began(client)
    backlog = Evaluated(thread, "greedy", 1, Recorded([], "greedy"))
    backlog.add(numbers(5 * 6144))
    settled = backlog.settled()
    wait_for(thread.ask().done, "the thread to rest")
    assert not settled.done()
    if how == "hurry":
        thread.hurry()
    else:
        thread.ended("other")
    settled.result(PATIENCE_SECONDS)
    thread.stop()


def test_all_that_waits_is_evaluated_before_the_thread_ends() -> None:
    thread = Evaluating(Shares())
    log: list[str] = []
    held = Held(thread)
    Evaluated(thread, "one", 1, Recorded(log, "one")).add(numbers(4 * 6144))
    asked = thread.ask()
    assert not asked.done()
    held.release()
    thread.stop()
    assert log == ["one"] * 4
    assert asked.done()


def test_rows_are_added_up_part_by_part_between_others_turns(thread: Evaluating) -> None:
    log: list[str] = []
    held = Held(thread)
    many = [Rows(log, name) for name in ("anne", "bert")]
    backlogs = [thread.backlog(rows.name, 1) for rows in many]
    for backlog, rows in zip(backlogs, many, strict=True):
        backlog.add_rows(Parts(rows, rows))
    settled = [backlog.settled() for backlog in backlogs]
    assert not any(each.done() for each in settled)
    held.release()
    for each in settled:
        each.result(PATIENCE_SECONDS)
    assert log == ["anne", "bert"] * 3
    assert [len(rows.added) for rows in many] == [3, 3]


def test_rows_that_cannot_be_decoded_are_lost_and_others_are_not(thread: Evaluating) -> None:
    log: list[str] = []
    backlog = thread.backlog("anne", 1)
    broken, sound = Rows(log, "broken", fails_at=1), Rows(log, "sound")
    for rows in (broken, sound):
        backlog.add_rows(Parts(rows, rows))
    backlog.settled().result(PATIENCE_SECONDS)
    assert (len(broken.added), broken.lost) == (1, 40)
    assert (len(sound.added), sound.lost) == (3, 0)
    assert broken.is_dropped
    assert sound.is_dropped
