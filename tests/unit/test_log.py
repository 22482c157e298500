from __future__ import annotations

import itertools
import threading
import tracemalloc
from time import thread_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stapsdtd.events.batch import EventBatch, merge
from stapsdtd.sessions.log import Entry, EventLog
from stapsdtd.sessions.seq_ranges import SeqRanges
from tests.unit.samples import batch, event_rows, signed, strings, unsigned

ROOM = 1 << 20


def numbers_of(entry: Entry | None) -> list[int]:
    assert entry is not None
    return list(range(entry.first_seq, entry.first_seq + len(entry.batch)))


def times_of(entry: Entry) -> list[int]:
    """In the order of their numbers."""
    times: list[int] = entry.batch.time_ns.tolist()
    return times


def log_of(max_bytes: int = ROOM) -> EventLog:
    return EventLog(max_bytes, lambda: None)


def one_entry_bytes() -> int:
    """What an entry of one event takes of the room."""
    log = log_of()
    log.append(batch([1]))
    entry = log.read(None)
    assert entry is not None
    return entry.nbytes


def read_all(log: EventLog, seq: int | None = None) -> list[Entry]:
    entries = []
    while (entry := log.read(seq)) is not None:
        log.handed_out(entry, entry.next_seq)
        entries.append(entry)
        seq = entry.next_seq
    return entries


class Accounting(RuleBasedStateMachine):
    """A stream that reads, is slow, breaks and comes back, and a writer that never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.log = log_of(20 * one_entry_bytes())
        self.fired = 0
        self.seen: set[int] = set()
        self.reading: Entry | None = None
        self.seq: int | None = None

    @rule(sizes=st.lists(st.integers(0, 5), max_size=3), is_short=st.booleans())
    def append(self, sizes: list[int], is_short: bool) -> None:
        self.log.append(batch(range(sum(sizes))), is_short=is_short)
        self.fired += sum(sizes)

    @precondition(lambda self: self.reading is None)
    @rule()
    def read(self) -> None:
        before = self.log.counts()
        self.reading = self.log.read(self.seq)
        assert self.log.counts() == before
        if self.reading is None:
            assert before.pending == 0
        else:
            assert numbers_of(self.reading) == list(range(self.reading.first_seq, self.reading.next_seq))

    @precondition(lambda self: self.reading is not None)
    @rule()
    def hand_out(self) -> None:
        assert self.reading is not None
        self.log.handed_out(self.reading, self.reading.next_seq)
        self.seen.update(numbers_of(self.reading))
        self.seq = self.reading.next_seq
        self.reading = None

    @rule()
    def discard(self) -> None:
        self.log.discard()
        assert self.log.counts().pending == 0

    @rule(seq=st.none() | st.integers(1, 60))
    def reconnect(self, seq: int | None) -> None:
        self.reading = None
        self.seq = seq

    @invariant()
    def received_is_delivered_lost_and_pending(self) -> None:
        figures = self.log.counts()
        assert figures.received == self.fired == figures.delivered + figures.lost + figures.pending
        assert min(figures.delivered, figures.lost, figures.pending) >= 0
        # what a stream was given is delivered and not lost, whatever made room meanwhile
        assert figures.delivered == len(self.seen)

    def teardown(self) -> None:
        if self.reading is not None:
            self.hand_out()
        self.seen.update(number for entry in read_all(self.log) for number in numbers_of(entry))
        self.received_is_delivered_lost_and_pending()
        figures = self.log.counts()
        assert figures.pending == 0
        assert figures.lost == self.fired - len(self.seen)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(TestAccounting.settings, max_examples=60, stateful_step_count=40)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20),
        max_size=5,
    )
)
def test_numbers_follow_time_across_layouts(batches: list[list[tuple[int, bool]]]) -> None:
    log = log_of()
    for events in batches:
        first = sorted(time for time, is_string in events if not is_string)
        second = sorted(time for time, is_string in events if is_string)
        found: list[EventBatch] = [
            batch(first, signed(*first)),
            batch(second, strings(*(b"%d" % time for time in second))),
        ]
        log.append(merge(found))
    entries = read_all(log)
    assert [number for entry in entries for number in numbers_of(entry)] == list(range(1, sum(map(len, batches)) + 1))
    wanted = [sorted(time for time, _ in events) for events in batches if events]
    assert [times_of(entry) for entry in entries] == wanted


def test_writer_notifies_after_the_events_are_there() -> None:
    told: list[int] = []
    log = EventLog(ROOM, lambda: told.append(log.counts().pending))
    log.append(batch([1, 2]))
    log.append(batch([3]))
    assert told == [2, 3]


def test_read_answers_nothing_where_there_is_nothing_yet() -> None:
    log = log_of()
    assert log.read(None) is None
    assert log.read(1) is None
    log.append(batch([]))
    assert log.read(None) is None
    log.append(batch([1]))
    read_all(log)
    assert log.read(None) is None
    assert log.read(2) is None


def test_replay_from_the_middle_of_an_entry() -> None:
    log = log_of()
    log.append(merge([batch([1, 3, 5], signed(10, 30, 50)), batch([2, 4, 6], unsigned(20, 40, 60))]))
    log.append(batch([7]))
    read_all(log)
    entry = log.read(4)
    assert entry is not None
    assert (entry.first_seq, entry.next_seq) == (4, 7)
    assert [(row[0], row[-1]) for row in event_rows(entry.batch)] == [(4, 40), (5, 50), (6, 60)]
    assert numbers_of(log.read(entry.next_seq)) == [7]
    assert numbers_of(log.read(6)) == [6]
    assert [len(each.batch.tables) for each in [log.read(6)] if each] == [1]
    assert log.counts().delivered == 7


def test_a_number_beyond_what_was_handed_out_is_the_first_that_was_not() -> None:
    log = log_of()
    log.append(batch([1, 2]))
    read_all(log)
    log.append(batch([3]))
    log.append(batch([4]))
    for seq in (None, 3, 4, 1000):
        assert numbers_of(log.read(seq)) == [3]


def test_what_is_no_longer_kept_is_passed_over() -> None:
    log = log_of(2 * one_entry_bytes())
    for time in range(1, 6):
        log.append(batch([time]))
    assert numbers_of(log.read(1)) == [4]
    assert numbers_of(log.read(None)) == [4]
    assert log.counts().lost == 3
    assert [numbers_of(entry) for entry in read_all(log, 1)] == [[4], [5]]


def test_eviction_of_what_was_delivered_loses_nothing() -> None:
    log = log_of(2 * one_entry_bytes())
    for time in range(1, 6):
        log.append(batch([time]))
        read_all(log)
    figures = log.counts()
    assert (figures.delivered, figures.lost) == (5, 0)
    assert numbers_of(log.read(1)) == [4]


def test_what_makes_room_while_it_is_being_sent_is_delivered() -> None:
    log = log_of(2 * one_entry_bytes())
    log.append(batch([1]))
    entry = log.read(None)
    assert entry is not None
    for time in range(2, 6):
        log.append(batch([time]))
    log.handed_out(entry, entry.next_seq)
    figures = log.counts()
    assert (figures.delivered, figures.lost, figures.pending) == (1, 2, 2)


def test_what_made_room_before_a_broken_stream_came_back_is_lost() -> None:
    log = log_of(2 * one_entry_bytes())
    log.append(batch([1]))
    assert log.read(None) is not None
    for time in range(2, 6):
        log.append(batch([time]))
    read_all(log)
    figures = log.counts()
    assert (figures.delivered, figures.lost, figures.pending) == (2, 3, 0)


def test_few_events_join_an_entry_that_nobody_read_where_room_is_short() -> None:
    log = log_of()
    log.append(merge([batch([1], signed(1)), batch([2], strings(b"2"))]))
    log.append(batch([3], strings(b"3")), is_short=True)
    assert log.unread_bytes < 2 * one_entry_bytes()
    entry = log.read(None)
    assert entry is not None
    assert numbers_of(entry) == times_of(entry) == [1, 2, 3]
    assert [row[-1] for row in event_rows(entry.batch)] == [1, b"2", b"3"]
    log.append(batch([4]), is_short=True)
    log.handed_out(entry, entry.next_seq)
    assert [numbers_of(each) for each in read_all(log)] == [[4]]
    figures = log.counts()
    assert (figures.delivered, figures.lost, log.unread_bytes) == (4, 0, 0)


def test_what_joins_an_entry_is_bounded() -> None:
    log = log_of(100 * one_entry_bytes())
    for time in range(100):
        log.append(batch([time] * 10), is_short=True)
    assert max(entry.nbytes for entry in read_all(log)) <= 7 * one_entry_bytes()
    assert log.counts().lost == 0


def test_one_entry_is_kept_however_little_room_there_is() -> None:
    log = log_of(1)
    log.append(batch(range(100)))
    assert numbers_of(log.read(None)) == list(range(1, 101))


def test_memory_is_bounded() -> None:
    log = log_of(100_000)
    for start in range(0, 50_000, 100):
        log.append(batch(range(start, start + 100), signed(*range(100))))
    entries = read_all(log)
    assert sum(entry.nbytes for entry in entries) <= 100_000
    assert entries[-1].next_seq == 50_001


@pytest.mark.parametrize("distinct_times", [True, False])
def test_large_batches_are_split_in_the_order_of_time(distinct_times: bool) -> None:
    log = log_of(64 << 20)
    times = np.arange(20_000) if distinct_times else np.repeat(np.arange(20), 1000)
    even, odd = np.arange(0, 20_000, 2), np.arange(1, 20_000, 2)
    log.append(merge([batch(times[even].tolist(), signed(*even)), batch(times[odd].tolist(), unsigned(*odd))]))
    entries = read_all(log)
    assert len(entries) >= 2
    assert max(len(entry.batch) for entry in entries) <= 16384
    assert [number for entry in entries for number in numbers_of(entry)] == list(range(1, 20_001))
    assert [time for entry in entries for time in times_of(entry)] == times.tolist()
    values = [row[-1] for entry in entries for row in event_rows(entry.batch)]
    assert sorted(map(int, map(str, values))) == list(range(20_000))


def test_a_moment_with_more_events_than_an_entry_takes_is_split_as_any_other() -> None:
    log = log_of()
    log.append(batch([7] * 20_000, signed(*range(20_000))))
    entries = read_all(log)
    assert [len(entry.batch) for entry in entries] == [16384, 20_000 - 16384]
    assert [row[-1] for entry in entries for row in event_rows(entry.batch)] == list(range(20_000))


def test_a_batch_of_long_strings_is_split_by_its_bytes() -> None:
    log = log_of(64 << 20)
    log.append(batch(range(3000), strings(*[b"x" * 3000] * 3000)))
    entries = read_all(log)
    assert max(entry.nbytes for entry in entries) < 3 << 20
    assert [number for entry in entries for number in numbers_of(entry)] == list(range(1, 3001))


def test_a_writer_and_a_reader_in_two_threads() -> None:
    log = log_of(40 * one_entry_bytes())
    done = threading.Event()

    def write() -> None:
        for time in range(3000):
            log.append(batch([time, time]))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    numbers: list[int] = []
    while not done.is_set() or log.counts().pending:
        entry = log.read(None)
        if entry is not None:
            log.handed_out(entry, entry.next_seq)
            numbers += numbers_of(entry)
    writer.join()
    figures = log.counts()
    assert figures.received == 6000 == figures.delivered + figures.lost
    assert len(numbers) == figures.delivered
    assert all(earlier < later for earlier, later in itertools.pairwise(numbers))


def test_entry_that_was_sent_in_part_goes_on_where_the_client_says() -> None:
    log = log_of()
    log.append(batch([1, 2, 3, 4, 5]))
    entry = log.read(None)
    assert entry is not None
    log.handed_out(entry, 3)  # two events went out in one message, and a second message was cut off
    log.resume(4)
    assert numbers_of(log.read(4)) == [4, 5]
    assert log.counts().delivered == 3


def test_what_was_sent_did_not_arrive_and_is_no_longer_kept_is_lost() -> None:
    log = log_of(2 * one_entry_bytes())
    for time in range(1, 4):
        log.append(batch([time]))
        read_all(log)
    for time in range(4, 7):
        log.append(batch([time]))
    # 1 to 3 were sent; of 4, which nobody read, 5 and 6 are kept
    assert log.counts().lost == 1
    log.resume(2)
    assert [numbers_of(entry) for entry in read_all(log, 2)] == [[5], [6]]
    figures = log.counts()
    assert (figures.received, figures.delivered, figures.lost) == (6, 3, 3)
    log.resume(2)
    assert log.counts() == figures


def test_number_beyond_all_that_was_sent_acknowledges_no_more_than_that() -> None:
    log = log_of()
    log.append(batch([1]))
    log.append(batch([2]))
    assert numbers_of(log.read(None)) == [1]
    log.resume(1000)
    assert numbers_of(log.read(1000)) == [2]
    assert log.counts().delivered == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 12))))
def test_ranges_are_a_set(steps: list[tuple[bool, int, int]]) -> None:
    ranges = SeqRanges()
    expected: set[int] = set()
    for adding, first, length in steps:
        numbers = set(range(first, first + length))
        if adding:
            assert ranges.add(first, first + length) == len(numbers - expected)
            expected |= numbers
        else:
            assert ranges.remove(first, first + length) == len(numbers & expected)
            expected -= numbers
        assert ranges.count == len(expected)


def test_ranges_take_a_bounded_memory() -> None:
    ranges = SeqRanges(most_runs=3)
    for number in range(0, 20, 2):
        assert ranges.add(number, number + 1) == 1
    assert ranges.count == 10
    # the runs of 14, 16 and 18 are known
    assert ranges.remove(14, 17) == 2
    assert ranges.add(13, 20) == 6
    assert ranges.count == 14
    # of those before, only how many there are
    assert ranges.add(0, 13) == 0
    assert ranges.remove(0, 13) == 0
    assert ranges.count == 14


def test_client_that_reads_now_and_then_takes_a_bounded_memory() -> None:
    """Each time, what it did not come to read is lost, and what it reads is not."""
    log = EventLog(1, lambda: None)
    tracemalloc.start()
    try:
        for time_ns in range(0, 20_000, 2):
            log.append(batch([time_ns]))
            log.append(batch([time_ns + 1]))
            entry = log.read(None)
            assert entry is not None
            log.handed_out(entry, entry.next_seq)
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
    counts = log.counts()
    assert (counts.received, counts.delivered, counts.lost) == (20_000, 10_000, 10_000)


def test_client_that_resumes_within_an_entry_is_not_searched_for() -> None:
    """Of 20,000 entries, which are kept until others need their room."""
    log, one = EventLog(1 << 30, lambda: None), batch([1])
    for _ in range(20_000):
        log.append(one)
    log.append(batch([1, 2, 3]))
    seq = None
    while (entry := log.read(seq)) is not None:
        log.handed_out(entry, seq := entry.next_seq)
    begin = thread_time()
    log.resume(20_002)
    assert numbers_of(log.read(20_002)) == [20_002, 20_003]
    assert thread_time() - begin < 0.001
