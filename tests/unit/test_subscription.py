from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog.selectors import SelectedSite, parse
from stapsdtd.config import NO_QUOTAS, Quotas
from stapsdtd.model import Capture
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions import log
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.spec import ClauseSpec, SpanSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import EndReason, SiteState, SiteStatus, Subscription
from stapsdtd.sessions.sweeping import settled_spans
from stapsdtd.spans.span import Span, SpanCounts
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import argument, batch, captured, sample_object, site

_T = TypeVar("_T")

OWN_PID = 999
FOUND = sample_object(site("a", 1), site("b", 2, [argument()]))
A, B = FOUND.parsed.sites


def make(
    queue_bytes: int = 1 << 20, exclude_pids: frozenset[int] = frozenset(), quotas: Quotas = NO_QUOTAS
) -> Subscription:
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(exclude_pids=exclude_pids), 30, queue_bytes, 64)
    return Subscription("id", itertools.count(1), spec, OWN_PID, lambda *_: None, Principal("", quotas))


def status(subscription: Subscription, selected: SelectedSite, state: SiteState = SiteState.ARMED) -> SiteStatus:
    return SiteStatus(state, subscription.site_id(FOUND, selected), FOUND, selected.capture.site)


def test_what_the_engine_filters_is_counted() -> None:
    subscription = make()
    subscription.clauses[0].sink.filtered(3)
    subscription.clauses[0].sink.deliver(batch([1, 2]))
    subscription.clauses[0].sink.filtered(2)
    account = subscription.account()
    assert (account.in_flight, account.filtered, account.fired) == (2, 5, 7)


def test_starts_of_threads_that_ended_are_told_at_the_end() -> None:
    span = SpanSpec(Span(), (parse("app:a"),))
    spec = SubscriptionSpec((ClauseSpec((parse("app:b()"),), span=span),), Scope(), 30, 1 << 20, 64)
    subscription = Subscription("id", itertools.count(1), spec, OWN_PID, lambda *_: None)
    clause = subscription.clauses[0]
    begin = clause.id_to_arm(FOUND, replace(captured(A), is_start=True))
    with subprocess.Popen("true") as ended:
        pass
    clause.sink.deliver(batch([1], pid=[ended.pid], tid=[ended.pid], site_id=begin))
    assert subscription.account().spans == SpanCounts(starts=1)
    finish(settled_spans(subscription.clauses))
    subscription.end(EndReason.UNSUBSCRIBED)
    assert subscription.account().spans == SpanCounts(starts=1, died=1)


def test_the_daemon_itself_is_always_excluded() -> None:
    assert make().excluded == {OWN_PID}
    assert make(exclude_pids=frozenset({7})).excluded == {7, OWN_PID}


def test_site_ids_name_a_site_and_what_is_captured_there() -> None:
    subscription = make()
    first = SelectedSite(captured(A), None)
    assert [subscription.site_id(FOUND, first) for _ in range(2)] == [1, 1]
    assert subscription.site_id(FOUND, SelectedSite(captured(B), None)) == 2
    assert subscription.site_id(FOUND, SelectedSite(captured(B, Capture(0, is_string=True)), None)) == 3
    assert subscription.site_id(sample_object(A, inode=2), first) == 4
    known = subscription.clauses[0].known_sites([1, 3, 99])
    assert {number: site.capture for number, site in known.items()} == {
        1: captured(A), 3: captured(B, Capture(0, is_string=True)),
    }  # fmt: skip


def test_losses_are_counted_by_stage() -> None:
    subscription = make()
    subscription.clauses[0].sink.lost(LossStage.KERNEL_BUFFER, 3)
    subscription.clauses[0].sink.lost(LossStage.DECODE, 1)
    subscription.clauses[0].sink.lost(LossStage.KERNEL_BUFFER, 2)
    assert subscription.clauses[0].losses() == {
        LossStage.KERNEL_BUFFER: 5,
        LossStage.DECODE: 1,
        LossStage.QUEUE: 0,
        LossStage.QUOTA: 0,
        LossStage.TABLE_FULL: 0,
        LossStage.MISSED: 0,
        LossStage.FILTER: 0,
    }
    account = subscription.account()
    assert (account.lost_kernel_buffer, account.lost_decode, account.lost_queue) == (5, 1, 0)
    assert account.lost == account.fired == 6


def test_events_that_made_room_are_lost_in_the_queue() -> None:
    subscription = make(queue_bytes=1)
    for time in range(5):
        subscription.clauses[0].sink.deliver(batch([time]))
    assert subscription.clauses[0].losses()[LossStage.QUEUE] == 4
    account = subscription.account()
    assert (account.lost_queue, account.in_flight, account.fired) == (4, 1, 5)


def fails_after(count: int, work: Callable[..., _T]) -> Callable[..., _T]:
    """Do work so many times, and have no memory for more."""
    left = iter(range(count))

    def limited(*arguments: Any) -> _T:
        if next(left, None) is None:
            raise MemoryError
        return work(*arguments)

    return limited


@pytest.mark.parametrize("max_events", [None, 8])
def test_events_that_cannot_be_kept_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, max_events: int | None
) -> None:
    subscription = make(quotas=Quotas(max_events_per_second=max_events))
    subscription.clauses[0].sink.deliver(batch([1]))
    subscription.clauses[0].sink.fired(11)
    # the second of two entries cannot be made, so neither is there
    monkeypatch.setattr(log, "_ROWS_PER_ENTRY", 4)
    with monkeypatch.context() as patch:
        patch.setattr(log, "Entry", fails_after(1, log.Entry))
        subscription.clauses[0].sink.deliver(batch(range(10, 20)))
    account = subscription.account()
    kept = 10 if max_events is None else max_events - 1
    assert (account.in_flight, account.lost_decode, account.lost_quota) == (1, kept, 10 - kept)
    assert account.fired == 11
    assert "events could not be kept" in caplog.text


def test_waiter_that_fails_costs_no_event_and_no_other_waiter(caplog: pytest.LogCaptureFixture) -> None:
    subscription = make()
    woken: list[int] = []
    subscription.wake_with(lambda: 1 // 0)
    subscription.wake_with(lambda: woken.append(1))
    subscription.clauses[0].sink.deliver(batch([1, 2]))
    account = subscription.account()
    assert (woken, account.in_flight, account.lost) == ([1], 2, 0)
    assert "could not be woken" in caplog.text


def test_whoever_waits_is_woken_by_all_that_is_new_until_he_forgets() -> None:
    subscription = make()
    woken: list[str] = []
    forget = subscription.wake_with(lambda: woken.append("first"))
    subscription.wake_with(lambda: woken.append("second"))
    subscription.clauses[0].sink.deliver(batch([1], pid=[10]))
    subscription.clauses[0].sink.lost(LossStage.DECODE, 1)
    subscription.changed([status(subscription, SelectedSite(captured(A), None))])
    subscription.end(EndReason.UNSUBSCRIBED)
    assert woken == ["first", "second"] * 4
    forget()
    subscription.clauses[0].sink.lost(LossStage.DECODE, 1)
    assert woken[8:] == ["second"]


def test_nobody_is_woken_by_what_is_filtered() -> None:
    subscription = make()
    woken: list[int] = []
    subscription.wake_with(lambda: woken.append(1))
    subscription.clauses[0].sink.filtered(1)
    subscription.clauses[0].sink.deliver(batch([]))
    assert woken == []


def test_sites_counts_what_is_armed_now() -> None:
    subscription = make()
    first, second = SelectedSite(captured(A), None), SelectedSite(captured(B), None)
    subscription.changed([status(subscription, first), status(subscription, second, SiteState.REFUSED)])
    assert subscription.account().sites == 1
    assert [each.state for each in subscription.new_statuses()] == [SiteState.ARMED, SiteState.REFUSED]
    assert subscription.new_statuses() == []
    subscription.changed([status(subscription, first, SiteState.DISARMED)])
    assert subscription.account().sites == 0


def test_end_is_told_to_whoever_waits_for_it() -> None:
    subscription = make()
    woken: list[EndReason | None] = []
    subscription.wake_with(lambda: woken.append(subscription.end_reason))
    assert (subscription.end_reason, subscription.ended.done()) == (None, False)
    # who gives up waiting keeps nobody else from it
    assert not subscription.ended.cancel()
    subscription.end(EndReason.LEASE_EXPIRED)
    assert (woken, subscription.end_reason) == ([EndReason.LEASE_EXPIRED], EndReason.LEASE_EXPIRED)
    assert subscription.ended.result() is None


def test_what_fired_and_is_nowhere_yet_is_in_flight() -> None:
    subscription = make()
    subscription.clauses[0].sink.fired(10)
    assert figures(subscription) == (10, 0, 0, 0, 10)
    subscription.clauses[0].sink.deliver(batch([1, 2, 3]))
    subscription.clauses[0].sink.filtered(4)
    subscription.clauses[0].sink.lost(LossStage.KERNEL_BUFFER, 1)
    # 3 of them in the queue and 2 on their way
    assert figures(subscription) == (10, 0, 4, 1, 5)
    subscription.clauses[0].sink.lost(LossStage.DECODE, 2)
    assert figures(subscription) == (10, 0, 4, 3, 3)
    entry = subscription.clauses[0].log.read(None)
    assert entry is not None
    subscription.clauses[0].log.handed_out(entry, 3)
    assert figures(subscription) == (10, 2, 4, 3, 1)


def test_what_is_delivered_before_it_is_told_to_have_fired_is_counted_once() -> None:
    """The engine tells a few times a second what fired."""
    subscription = make()
    subscription.clauses[0].sink.deliver(batch([1, 2, 3]))
    subscription.clauses[0].sink.filtered(1)
    assert figures(subscription) == (4, 0, 1, 0, 3)
    subscription.clauses[0].sink.fired(2)
    assert figures(subscription) == (4, 0, 1, 0, 3)
    subscription.clauses[0].sink.fired(3)
    assert figures(subscription) == (5, 0, 1, 0, 4)


def test_what_the_queue_had_no_room_for_is_not_in_flight() -> None:
    subscription = make(queue_bytes=batch([1]).nbytes)
    subscription.clauses[0].sink.fired(5)
    for time in range(5):
        subscription.clauses[0].sink.deliver(batch([time]))
    assert figures(subscription) == (5, 0, 0, 4, 1)


def figures(subscription: Subscription) -> tuple[int, int, int, int, int]:
    """fired, delivered, filtered, lost, in flight."""
    found = subscription.account()
    return found.fired, found.delivered, found.filtered, found.lost, found.in_flight


def pass_events(subscription: Subscription, count: int = 100) -> None:
    """Have so many come and be read; of the ones before, few are kept."""
    for time in range(count):
        subscription.clauses[0].sink.deliver(batch([time]))
        while (entry := subscription.clauses[0].log.read(None)) is not None:
            subscription.clauses[0].log.handed_out(entry, entry.next_seq)


def test_sites_of_gone_objects_are_remembered_as_long_as_events_may_name_them() -> None:
    now = 1000.0
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(), 30, 40_000, 64)
    subscription = Subscription("id", itertools.count(1), spec, OWN_PID, lambda *_: None, clock=lambda: now)
    staying, going = SelectedSite(captured(A), None), SelectedSite(captured(B), None)

    def known() -> list[int]:
        subscription.changed([])
        return sorted(subscription.clauses[0].known_sites([1, 2, 3]))

    subscription.changed([status(subscription, staying), status(subscription, going)])
    subscription.clauses[0].sink.deliver(batch([1], site_id=2))
    subscription.changed([status(subscription, going, SiteState.DISARMED)])
    now += 61
    assert known() == [1, 2], "its event is kept"
    pass_events(subscription)
    assert known() == [1]
    subscription.changed([status(subscription, going)])
    subscription.changed([status(subscription, going, SiteState.DISARMED)])
    pass_events(subscription)
    assert known() == [1, 3], "the last of its events may still come"
    now += 61
    assert known() == [1]


def test_site_that_is_armed_again_is_not_forgotten() -> None:
    now = 1000.0
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(), 30, 40_000, 64)
    subscription = Subscription("id", itertools.count(1), spec, OWN_PID, lambda *_: None, clock=lambda: now)
    selected = SelectedSite(captured(A), None)
    for state in (SiteState.ARMED, SiteState.DISARMED, SiteState.ARMED):
        subscription.changed([status(subscription, selected, state)])
    now += 61
    subscription.changed([])
    assert subscription.clauses[0].known_sites([1])
