"""What became of all events, also when subscriptions have ended."""

from __future__ import annotations

from dataclasses import replace

from stapsdtd.capture.engine import LossStage
from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.totals import AccountTotals, SessionMetrics
from tests.unit.samples import batch
from tests.unit.test_subscription import make

NOTHING = Account()


def test_all_subscriptions_are_summed_up() -> None:
    totals = AccountTotals()
    first, second = make(1 << 20), make(1 << 21)
    for subscription in (first, second):
        totals.began(subscription)
        subscription.clauses[0].sink.deliver(batch([1, 2]))
        subscription.clauses[0].sink.filtered(3, 2)
        for number, stage in enumerate(LossStage, 1):
            subscription.clauses[0].sink.lost(stage, number)
    assert totals.metrics() == SessionMetrics(
        2,
        Account(
            filtered=6,
            lost_kernel_buffer=2,
            lost_decode=4,
            lost_queue=6,
            lost_quota=8,
            lost_table_full=10,
            lost_missed=12,
            lost_filter=14,
            undecided=4,
            in_flight=4,
        ),
        0,
        first.clauses[0].log.unread_bytes + second.clauses[0].log.unread_bytes,
        3 << 20,
    )
    assert first.clauses[0].log.unread_bytes > 0


def test_what_ended_still_counts_and_may_still_be_read() -> None:
    totals = AccountTotals()
    subscription = make()
    totals.began(subscription)
    subscription.clauses[0].sink.deliver(batch([1, 2, 3]))
    totals.ended(subscription)
    assert totals.metrics() == SessionMetrics(0, replace(NOTHING, in_flight=3), 0, 0, 0)
    entry = subscription.clauses[0].log.read(None)
    assert entry is not None
    subscription.clauses[0].log.handed_out(entry, 3)
    assert totals.metrics().account == replace(NOTHING, delivered=2, in_flight=1)
    totals.settle(subscription)
    assert totals.metrics() == SessionMetrics(0, replace(NOTHING, delivered=2), 1, 0, 0)
