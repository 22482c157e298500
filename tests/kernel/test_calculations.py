"""Random expressions of integers, which the kernel calculates: keys and filters are what Python makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stapsdtd.client import Aggregate, Client, SubscribeOptions
from stapsdtd.model import Capture
from stapsdtd.query.compile import MAX_OPERATIONS, operations
from stapsdtd.query.expression import Condition, Expression, Field
from stapsdtd.query.text import text_of
from tests.fuzz.examples import examples
from tests.kernel.test_where import VALUES, of
from tests.support import Daemon, Ticker
from tests.unit.expressions import Row, conditions, numbers, result
from tests.unit.samples import argument, site

pytestmark = pytest.mark.kernel

SITE = site("values", arguments=[argument(size=1 << number // 2, signed=number % 2 == 0) for number in range(8)])
"""As far as the expressions read its arguments."""


FIELDS = (Field.PID,)
CONDITIONS = conditions(simple=True, fields=FIELDS)
KEYS = st.lists(numbers(FIELDS) | CONDITIONS, min_size=1, max_size=4, unique_by=text_of)


@settings(examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KEYS, CONDITIONS)
def test_keys_and_filters(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, keys: list[Expression], condition: Condition
) -> None:
    assume(sum(map(operations, keys)) <= MAX_OPERATIONS)
    assume(operations(condition) <= MAX_OPERATIONS)
    wanted = Aggregate(by=[text_of(key) for key in keys])
    row = Row(ticker.pid, 0, 0, b"ticker", {Capture(index): value for index, value in enumerate(VALUES)})
    expected = tuple(result(key, SITE, row) for key in keys)
    with Client(daemon.target) as client:
        selector = of(ticker_program, "values")
        everything = client.aggregate(selector, wanted)
        chosen = client.aggregate(selector, wanted, SubscribeOptions(where=text_of(condition)))
        assert (everything.added_late == chosen.added_late == {}) == (everything.engine == "bpf")
        ticker.do("values")
        for subscription, is_wanted in (everything, True), (chosen, result(condition, SITE, row) is True):
            account = subscription.unsubscribe()
            rows = [(each.key, each.values["count"]) for snapshot in subscription.snapshots() for each in snapshot.rows]
            assert rows == [(expected, 1)] * is_wanted
            assert (account.fired, account.aggregated, account.filtered) == (1, is_wanted, not is_wanted)
