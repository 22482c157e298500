"""What all of one client's subscriptions share."""

from __future__ import annotations

import itertools

import pytest

from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog.selectors import parse
from stapsdtd.config import NO_QUOTAS, Quotas
from stapsdtd.errors import LimitReachedError
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.token_bucket import TokenBucket
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import batch


def test_no_quotas() -> None:
    client = Principal()
    for _ in range(1000):
        client.begin(1 << 40)
    assert (client.sites_left, client.events) == (None, None)


def test_subscriptions_and_queues() -> None:
    client = Principal("uid 7", Quotas(max_subscriptions=2, max_queue_bytes=100))
    client.begin(40)
    with pytest.raises(LimitReachedError, match="uid 7's queues would take 101 bytes, and its role allows 100"):
        client.begin(61)
    client.begin(60)
    with pytest.raises(LimitReachedError, match="uid 7 has 2 subscriptions, as many as its role allows"):
        client.begin(0)
    client.end(60)
    client.begin(60)
    assert (client.subscriptions, client.queue_bytes) == (2, 100)


def test_sites() -> None:
    client = Principal("uid 7", Quotas(max_sites=5))
    client.sites = 3
    assert client.sites_left == 2
    client.change_quotas(Quotas(max_sites=2))
    assert client.sites_left == 0


def test_what_it_has_beyond_new_quotas_it_keeps() -> None:
    client = Principal("uid 7", Quotas(max_subscriptions=2))
    client.begin(10)
    client.begin(10)
    client.change_quotas(Quotas(max_subscriptions=1, max_queue_bytes=5))
    with pytest.raises(LimitReachedError):
        client.begin(0)
    client.end(10)
    client.end(10)
    client.begin(5)


def test_equal_quotas_fill_no_bucket() -> None:
    client = Principal("uid 7", Quotas(max_events_per_second=1000))
    before = client.events
    assert before is not None
    client.change_quotas(Quotas(max_events_per_second=1000))
    assert client.events is before
    client.change_quotas(Quotas(max_events_per_second=2000))
    assert client.events is not None
    assert client.events.per_second == 2000
    client.change_quotas(NO_QUOTAS)
    assert client.events is None


def test_quota_that_goes_while_events_come() -> None:
    """The reader's thread delivers what SIGHUP's has another policy for."""

    class Vanishing(Principal):
        _asked = 0

        @property
        def events(self) -> TokenBucket | None:
            self._asked += 1
            return TokenBucket(2) if self._asked == 1 else None

        @events.setter
        def events(self, value: object) -> None:
            pass

    spec = SubscriptionSpec((ClauseSpec((parse("a:b"),)),), Scope(), 30, 1 << 20, 64)
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None, Vanishing("uid 7"))
    subscription.clauses[0].sink.deliver(batch([1, 2, 3]))
    assert subscription.clauses[0].losses()[LossStage.QUOTA] == 1
