"""The daemon's part of a filter, on batches as engines deliver them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import pytest

from stapsdtd.catalog.selectors import parse as parse_selector
from stapsdtd.config import Quotas
from stapsdtd.events.batch import EventBatch, join
from stapsdtd.model import Capture, SiteCapture
from stapsdtd.query.expression import Condition
from stapsdtd.query.parse import parse
from stapsdtd.query.site_filter import SiteFilter
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import argument, batch, captured, event_rows, sample_object, signed, site, strings, unsigned

WIDE = site("wide", 0x10, [argument(), argument()])
NARROW = site("narrow", 0x20, [argument(), argument()])
FOUND = sample_object(WIDE, NARROW, path="/opt/bin/app")
SITES = {1: captured(WIDE, Capture(0), Capture(1)), 2: captured(NARROW, Capture(0)), 3: captured(WIDE)}


def filter_of(text: str, sites: Mapping[int, SiteCapture] = SITES) -> ConditionFilter:
    def known(site_ids: Iterable[int]) -> dict[int, KnownSite]:
        return {each: KnownSite(FOUND, sites[each], lambda *_: None) for each in site_ids if each in sites}

    return ConditionFilter(lambda captured: SiteFilter.of(where(text), captured), known)


def where(text: str) -> Condition:
    return parse(text, lambda _: None)


def values(events: EventBatch) -> list[tuple[object, ...]]:
    return [row[5:] for row in event_rows(events)]


def test_what_engines_test_is_not_evaluated_again() -> None:
    made = batch([1, 2], unsigned(1, 2), unsigned(3, 4))
    assert filter_of("arg0 == 1").rest(made) == (made, 0)


def test_what_was_captured_for_the_filter_alone_is_taken_off() -> None:
    made = batch([1, 2, 3], unsigned(1, 2, 3), unsigned(3, 2, 2), site_id=2)
    assert values(filter_of("arg0 + arg1 == 4.0").rest(made)[0]) == [(2, 1), (2, 2)]


def test_sites_whose_values_have_the_same_types_are_told_apart() -> None:
    """Both share a table, of which the one keeps two columns and the other one."""
    made = batch([1, 2, 3, 4], unsigned(1, 2, 3, 4), unsigned(9, 8, 9, 8), site_id=[1, 2, 2, 1])
    rest = filter_of("arg0 + arg1 != 10.0 || name == 'wide' && module == 'app'").rest(made)[0]
    assert values(rest) == [(1, 1, 9), (2, 3), (1, 4, 8)]


def test_tables_of_several_types() -> None:
    made = join([
        batch([1, 2], signed(1, 2), unsigned(5, 6), strings(b"S", None), site_id=1),
        batch([3, 4, 5], unsigned(7, None, 8), unsigned(0, 1, 1), strings(b"S 1", b"S 2", b"x"), site_id=3),
    ])  # fmt: skip
    sites = {1: captured(NARROW, Capture(0), Capture(1)), 3: captured(WIDE, Capture(0), Capture(1))}
    rest = filter_of('name == "narrow" ? arg0 == 2 : str(arg1) ~ "S*"', sites)
    assert values(rest.rest(made.take(made.time_ns.argsort()))[0]) == [(1, 2, 6), (3, 7, 0), (3, None, 1)]


def test_nothing_may_be_left() -> None:
    made = batch([1, 2], unsigned(1, 2), unsigned(3, 4), site_id=2)
    assert len(filter_of("arg0 == arg1 * 1.0").rest(made)[0]) == 0


def test_what_cannot_be_told_is_left_out_and_counted() -> None:
    made = batch([1, 2, 3, 4], unsigned(1, 2, 3, None), unsigned(0, 2, 9, 3))
    rest, undecided = filter_of("arg0 / arg1 >= 0.5").rest(made)
    assert (values(rest), undecided) == ([(1, 2, 2)], 2)


def test_quota_is_of_the_events_on_which_the_filter_is_evaluated() -> None:
    spec = SubscriptionSpec(
        (ClauseSpec((parse_selector("app:*"),), predicate=where("arg0 % 2 == 1.0")),), Scope(), 30, 1 << 20, 64
    )
    client = Principal("", Quotas(max_events_per_second=8))
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None, client)
    site_id = subscription.clauses[0].id_to_arm(FOUND, SITES[1])
    subscription.clauses[0].sink.deliver(batch(range(12), unsigned(*range(12)), unsigned(*range(12)), site_id=site_id))
    subscription.clauses[0].sink.fired(12)
    account = subscription.account()
    assert (account.fired, account.lost_quota, account.lost) == (12, 4, 4)
    assert account.filtered + account.in_flight == 8
    assert account.in_flight == 4


def test_site_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        filter_of("arg0 == arg1 * 1.0").rest(batch([1], unsigned(1), site_id=9))
