"""Converts subscriptions, and what their streams tell, to protobuf."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from dataclasses import fields
from functools import cache

from stapsdtd.aggregate.aggregation import KeyValue
from stapsdtd.api.convert import site_of_probe
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.columns import CUT
from stapsdtd.model import BuiltIn, Site, StartArgument
from stapsdtd.query.text import text_of
from stapsdtd.runtime.slices import Turn
from stapsdtd.runtime.wall_clock import ClockChange, WallClock
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.fields import ComputedField, Delivered
from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.subscription import EndReason, SiteState, SiteStatus, Subscription
from stapsdtd.spans.span import OpenSpans, of_start
from stapsdtd.v1 import stapsdt_pb2 as pb

_STATES = {
    SiteState.ARMING: pb.SiteStatus.STATE_ARMING,
    SiteState.ARMED: pb.SiteStatus.STATE_ARMED,
    SiteState.DISARMING: pb.SiteStatus.STATE_DISARMING,
    SiteState.DISARMED: pb.SiteStatus.STATE_DISARMED,
    SiteState.REFUSED: pb.SiteStatus.STATE_REFUSED,
}
_END_REASONS = {
    EndReason.UNSUBSCRIBED: pb.End.REASON_UNSUBSCRIBED,
    EndReason.SERVER_STOPPING: pb.End.REASON_SERVER_STOPPING,
    EndReason.LEASE_EXPIRED: pb.End.REASON_LEASE_EXPIRED,
    EndReason.ACCESS_REVOKED: pb.End.REASON_ACCESS_REVOKED,
    EndReason.PROCESSES_ENDED: pb.End.REASON_PROCESSES_ENDED,
}
LOSS_STAGES = {
    LossStage.KERNEL_BUFFER: pb.Loss.STAGE_KERNEL_BUFFER,
    LossStage.DECODE: pb.Loss.STAGE_DECODE,
    LossStage.QUEUE: pb.Loss.STAGE_QUEUE,
    LossStage.QUOTA: pb.Loss.STAGE_QUOTA,
    LossStage.TABLE_FULL: pb.Loss.STAGE_TABLE_FULL,
    LossStage.MISSED: pb.Loss.STAGE_MISSED,
    LossStage.FILTER: pb.Loss.STAGE_FILTER,
}


def site_status(subscription: Subscription, status: SiteStatus) -> pb.SiteStatus:
    return pb.SiteStatus(
        state=_STATES[status.state],
        site_id=status.site_id,
        provider=status.site.provider,
        name=status.site.name,
        path=status.object.path,
        offset=status.site.site_offset,
        reason=status.reason,
        armed_after_ns=status.armed_after_ns,
        tag=subscription.clauses[status.clause].spec.tag,
        function=status.site.function or "",
    )


def clock_changes(changes: Iterable[ClockChange]) -> list[pb.ClockChange]:
    return [
        pb.ClockChange(
            time_ns=each.time_ns,
            monotonic_ns=each.monotonic_ns,
            by_ns=each.by_ns,
            suspended_ns=each.suspended_ns,
        )
        for each in changes
    ]


def account(account: Account) -> pb.Account:
    spans = account.spans
    return pb.Account(
        fired=account.fired,
        delivered=account.delivered,
        aggregated=account.aggregated,
        filtered=account.filtered,
        lost_kernel_buffer=account.lost_kernel_buffer,
        lost_queue=account.lost_queue,
        lost_decode=account.lost_decode,
        lost_quota=account.lost_quota,
        lost_table_full=account.lost_table_full,
        lost_missed=account.lost_missed,
        lost_filter=account.lost_filter,
        undecided=account.undecided,
        valueless=account.valueless,
        in_flight=account.in_flight,
        sites=account.sites,
        spans=pb.SpanAccount(
            starts=spans.starts,
            paired=spans.paired,
            nested=spans.nested,
            died=spans.died,
            timed_out=spans.timed_out,
            table_full=spans.table_full,
            open=spans.open,
            unmatched=spans.unmatched,
        )
        if spans.consumed
        else None,
    )


def clause_accounts(subscription: Subscription) -> Generator[None, None, list[pb.ClauseAccount]]:
    """Return, in steps, the account of each clause with the spans that are open."""
    clock = subscription.wall_clock
    accounts = []
    turn = Turn()
    for clause in subscription.clauses:
        spans = yield from open_spans(clause, clock)
        accounts.append(pb.ClauseAccount(tag=clause.spec.tag, account=account(clause.account()), open=spans))
        if turn.is_over:
            yield
            turn.begin()
    return accounts


def open_spans(clause: Clause, wall_clock: WallClock) -> Generator[None, None, pb.OpenSpans | None]:
    """Return, in steps, the starts of a clause that wait for their ends; None if there are none."""
    return encoded_spans(clause, (yield from clause.open_spans()), wall_clock)


def encoded_spans(clause: Clause, spans: OpenSpans, wall_clock: WallClock) -> pb.OpenSpans | None:
    if not spans.count or clause.spec.span is None:
        return None
    captures = clause.spec.span.span.start_captures
    # of a clause that is closed, spans wait no longer
    now_ns = time.monotonic_ns() if clause.closed_ns is None else clause.closed_ns
    return pb.OpenSpans(
        spans=[
            pb.OpenSpan(
                begin_ns=wall_clock.time_ns(each.begin_ns),
                begin_monotonic_ns=each.begin_ns,
                waiting_ns=max(now_ns - each.begin_ns, 0),
                pid=each.thread.pid,
                tid=each.thread.tid,
                key=[_value(value) for value in each.key],
                values=[
                    _value(value, is_raw=capture.is_buffer)
                    for value, capture in zip(each.values, captures, strict=True)
                ],
            )
            for each in spans.oldest
        ],
        count=spans.count,
        captures=[_captured(of_start(capture), "it could not be read") for capture in captures],
    )


def _value(value: KeyValue, *, is_raw: bool = False) -> pb.Value:
    match value:
        case None:
            return pb.Value(unavailable="it could not be read")
        case bytes() if is_raw:
            return pb.Value(raw=value)
        case bytes():
            return pb.Value(string=value.removesuffix(CUT), truncated=value.endswith(CUT))
        case float():
            return pb.Value(float=value)
        case int() if value < 1 << 63:
            return pb.Value(signed=value)
        case int():
            return pb.Value(unsigned=value)


def end(reason: EndReason, subscription: Subscription) -> Generator[None, None, pb.End]:
    """Tell, in steps, that a subscription has ended."""
    clauses = yield from clause_accounts(subscription)
    return pb.End(reason=_END_REASONS[reason], account=account(subscription.account()), clauses=clauses)


def subscription(subscription: Subscription, *, streaming: bool, lease_left_seconds: float) -> pb.Subscription:
    scope, clauses = subscription.spec.scope, subscription.clauses
    values = {each.name: getattr(scope, each.name) for each in fields(scope)}
    return pb.Subscription(
        subscription_id=subscription.id,
        selectors=[selector.text for selector in subscription.spec.selectors],
        scope=pb.Scope(**values | {name: sorted(values[name]) for name in ("pids", "exclude_pids")}),
        where=clauses[0].spec.where if len(clauses) == 1 else "",
        created_ns=subscription.created_ns,
        streaming=streaming,
        lease_left_ms=int(lease_left_seconds * 1000),
        account=account(subscription.account()),
        added_late=added_late(subscription),
        clauses=[
            pb.ClauseStatus(
                tag=clause.spec.tag,
                selectors=[selector.text for selector in clause.spec.selectors],
                where=clause.spec.where,
                account=account(clause.account()),
            )
            for clause in clauses
        ],
    )


def description(site_id: int, known_site: KnownSite) -> pb.Description:
    """Describe a site on its own, since sites of one probe may differ in their arguments."""
    probe = site_of_probe(known_site.object, known_site.capture.site)
    probe.sites[0].site_id = site_id
    captures = (
        _captured(value, known_site.why_missing(position)) for position, value in enumerate(known_site.delivered)
    )
    return pb.Description(probe=probe, captures=captures)


def _captured(capture: Delivered, missing: str) -> pb.CapturedArgument:
    if isinstance(capture, ComputedField):
        return pb.CapturedArgument(field=capture.text, missing=missing)
    message = pb.CapturedArgument(
        is_string=capture.is_string, missing=missing, is_hex=capture.is_hex, is_buffer=capture.is_buffer
    )
    match capture.subject:
        case BuiltIn() as built_in:
            message.field = built_in.value
        case StartArgument(index):
            message.index = index
            message.of_start = True
        case int(index):
            message.index = index
    return message


def late_conditions(
    subscription: Subscription, statuses: Iterable[SiteStatus]
) -> Generator[None, None, list[pb.LateCondition]]:
    """Return, in steps, what of the clauses' filters is not evaluated at the hits of these sites, or of pairs that end
    there.
    """
    sites: dict[int, list[Site]] = {}
    for status in statuses:
        if status.state is not SiteState.REFUSED:
            sites.setdefault(status.clause, []).append(status.site)
    # clauses may have the same one
    text = cache(text_of)
    messages = []
    for position, clause in enumerate(subscription.clauses):
        late = yield from clause.evaluated_late(sites.get(position, ()))
        messages += [pb.LateCondition(text=text(each), reason=why, tag=clause.spec.tag) for each, why in late.items()]
    return messages


def added_late(subscription: Subscription) -> list[pb.LateAggregation]:
    """Return why hits are not added up where they are."""
    return [
        pb.LateAggregation(reason=reason, sites=sites, tag=clause.spec.tag)
        for clause in subscription.clauses
        for reason, sites in clause.added_late().items()
    ]
