"""What is kept where not all can be."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog.selectors import parse
from stapsdtd.config import Quotas
from stapsdtd.events.batch import EventBatch, merge
from stapsdtd.events.columns import Numbers
from stapsdtd.sessions.fairness import Admission, shared_out
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.token_bucket import TokenBucket
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import batch, columns_of, unsigned

# a batch is made of lists of pids; each list is of events that follow each other in time
PIDS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=40), min_size=1, max_size=4)


def batch_of(pids: list[list[int]]) -> EventBatch:
    """Times interleave, and each event has a number of its own as its value."""
    count = len(pids)
    return merge(
        [
            batch(
                [row * count + number for row in range(len(each))],
                unsigned(*(1000 * number + row for row in range(len(each)))),
                pid=each,
            )
            for number, each in enumerate(pids)
        ]
    )


def events(found: EventBatch) -> list[tuple[int, int, int]]:
    """Time, process and value of each."""
    (column,) = columns_of(found)
    assert isinstance(column, Numbers)
    return list(zip(found.time_ns.tolist(), found.pid.tolist(), column.data.tolist(), strict=True))


@given(PIDS, st.integers(0, 100))
def test_shares(pids: list[list[int]], room: int) -> None:
    fired_batch = batch_of(pids)
    everything, kept = events(fired_batch), events(shared_out(fired_batch, room))
    assert kept == sorted(kept)
    assert set(kept) <= set(everything)
    fired, left = (Counter(pid for _, pid, _ in rows) for rows in (everything, kept))
    if len(everything) <= room:
        assert kept == everything
        return
    assert len(kept) <= room
    # whoever got less than all got as much as anybody, and one event more for each would be too many
    share = max([0, *left.values()])
    assert all(left[pid] == min(fired[pid], share) for pid in fired)
    assert sum(min(count, share + 1) for count in fired.values()) > room
    assert_earliest(kept, everything)


def assert_earliest(kept: list[tuple[int, int, int]], everything: list[tuple[int, int, int]]) -> None:
    left = Counter(pid for _, pid, _ in kept)
    for pid in {row[1] for row in everything}:
        assert [row for row in kept if row[1] == pid] == [row for row in everything if row[1] == pid][: left[pid]]


@given(st.lists(st.tuples(PIDS, st.booleans()), min_size=1, max_size=8), st.integers(0, 200), st.integers(0, 8))
def test_nobody_holds_more_than_stays_free(
    rounds: list[tuple[list[list[int]], bool]], room: int, at_least: int
) -> None:
    admission = Admission()
    held: Counter[int] = Counter()
    for position, (pids, is_read) in enumerate(rounds):
        if is_read:
            admission.read(position)
            held.clear()
        fired_batch, free = batch_of(pids), max(room - held.total(), 0)
        kept_batch = admission.admit(fired_batch, free, at_least)
        everything, kept = events(fired_batch), events(kept_batch)
        fired, let_in = (Counter(pid for _, pid, _ in rows) for rows in (everything, kept))
        assert_earliest(kept, everything)
        still_free = free - let_in.total()
        for pid in fired:
            has_now = held[pid] + let_in[pid]
            assert not let_in[pid] or has_now <= max(still_free, at_least)
            # one more event for each that wanted more would be too many
            assert let_in[pid] == fired[pid] or has_now >= min(at_least, held[pid] + fired[pid])
            assert let_in[pid] == fired[pid] or has_now + 1 > still_free - len(fired)
        if len(kept_batch):
            admission.admitted(kept_batch, position + 1)
        held += let_in


def test_few_events_of_one_process_stay_beside_a_flood_however_long_the_client_stalls() -> None:
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(), 30, 1 << 20, 64)
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None)
    flooding, quiet, bursts = 1, 2, 60
    for burst in range(bursts):
        subscription.clauses[0].sink.deliver(
            batch(range(burst * 1000, burst * 1000 + 1000), pid=[flooding] * 999 + [quiet])
        )
    read: Counter[int] = Counter()
    while (entry := subscription.clauses[0].log.read(None)) is not None:
        read.update(entry.batch.pid.tolist())
        subscription.clauses[0].log.handed_out(entry, entry.next_seq)
    assert read[quiet] == bursts
    account = subscription.account()
    assert account.lost_queue == bursts * 1000 - read.total() > 0
    # the flood has most of the queue all the same
    assert read[flooding] > 15_000


def test_one_that_floods_costs_none_but_itself() -> None:
    kept = shared_out(batch(range(1020), pid=[1] * 1000 + [2] * 10 + [3] * 10), 100)
    assert Counter(kept.pid.tolist()) == {1: 80, 2: 10, 3: 10}


@given(
    st.lists(st.tuples(PIDS, st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=12),
    st.integers(200, 20_000),
    st.one_of(st.none(), st.integers(1, 60)),
)
def test_account_holds_under_pressure(
    rounds: list[tuple[list[list[int]], bool, int, int]], queue_bytes: int, per_second: int | None
) -> None:
    """Fired = delivered + filtered + lost + pending, whatever queue and quota withhold."""
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(), 30, queue_bytes, 64)
    client = Principal("uid 1", Quotas(max_events_per_second=per_second))
    # time stands still, so that there are no more than these
    client.events = None if per_second is None else TokenBucket(per_second, lambda: 0.0)
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None, client)
    fired = filtered = lost = delivered = 0
    for pids, reads, more_filtered, more_lost in rounds:
        subscription.clauses[0].sink.deliver(batch_of(pids))
        subscription.clauses[0].sink.filtered(more_filtered)
        subscription.clauses[0].sink.lost(LossStage.KERNEL_BUFFER, more_lost)
        filtered += more_filtered
        lost += more_lost
        fired += sum(map(len, pids)) + more_filtered + more_lost
        while reads and (entry := subscription.clauses[0].log.read(None)) is not None:
            subscription.clauses[0].log.handed_out(entry, entry.next_seq)
            delivered += len(entry.batch)
        account = subscription.account()
        assert account.fired == fired
        assert (account.filtered, account.lost_kernel_buffer, account.delivered) == (filtered, lost, delivered)
        assert account.lost == sum(subscription.clauses[0].losses().values())
        assert account.lost_quota == 0 or per_second is not None
    if per_second is not None:
        assert subscription.clauses[0].log.counts().received <= per_second
