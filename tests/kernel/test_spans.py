"""Spans on the real kernel: what pairs tell, and what becomes of starts without an end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from stapsdtd.client import Account, Aggregate, Client, Event, OpenSpans, Span, SpanAccount, SubscribeOptions
from stapsdtd.query.compile import NOT_INTEGER
from tests.support import TICKER, Daemon, Ticker, compile_target, stapsdt, wait_for

pytestmark = pytest.mark.kernel

_DEFAULTS = SubscribeOptions()
SPANNER = TICKER.replace("ticker", "spanner")


@pytest.fixture(scope="session")
def spanner_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "spanner"
    return compile_target("spanner.c", output, f"-DPROVIDER={SPANNER}", "-lpthread")


@pytest.fixture
def spanner(spanner_program: Path) -> Iterator[Ticker]:
    with Ticker(spanner_program) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as connected:
        yield connected


def probe(name: str, captures: str = "") -> str:
    return f"{SPANNER}:{name}{captures}"


def check(account: Account) -> SpanAccount:
    spans = account.spans
    assert account.fired == (
        account.delivered + account.aggregated + account.filtered + account.lost + spans.starts + spans.unmatched
    )
    assert account.in_flight == 0
    assert spans.starts == (spans.paired + spans.nested + spans.died + spans.timed_out + spans.table_full + spans.open)
    return spans


def pairs_of(
    client: Client,
    spanner: Ticker,
    *commands: str,
    ends: str = "(arg1)",
    starts: str = "(arg1)",
    options: SubscribeOptions = _DEFAULTS,
    **wanted: object,
) -> tuple[list[Event], Account]:
    """What the commands have the program do."""
    span = Span(start_selectors=[probe("begin", starts)], **wanted)  # type: ignore[arg-type]
    with client.subscribe(probe("end", ends), options, span) as subscription:
        for command in commands:
            spanner.do(command)
        account = subscription.unsubscribe()
        events = list(subscription.events())
        final = subscription.account or account
    return events, final


@pytest.mark.vm
def test_a_pair_tells_of_both_ends_and_the_time_between(client: Client, spanner: Ticker, engine: str) -> None:
    options = SubscribeOptions(fields=["uid"])
    events, account = pairs_of(
        client, spanner, "pairs 500", ends="(arg1, arg2)", starts="(arg1, arg2:str)", options=options
    )
    assert len(events) == 500
    for number, event in enumerate(events):
        end, at_least, start, text, elapsed, uid = event.values
        assert (end, start, text) == (number, number, f"work {number % 7}")
        assert uid == (0 if engine == "bpf" else None)
        assert isinstance(elapsed, int)
        assert isinstance(at_least, int)
        assert at_least < elapsed
    assert check(account) == SpanAccount(starts=500, paired=500)
    assert account.delivered == 500


@pytest.mark.vm
def test_elapsed_times_add_up(client: Client, spanner: Ticker) -> None:
    wanted = Aggregate(functions=["count", "sum", "max", "quantize"], value="elapsed", by=["start.arg0"])
    span = Span(start_selectors=[probe("begin")])
    with client.aggregate(probe("end"), wanted, span=span) as subscription:
        at_most = spanner.do("threads 8 2000")
        subscription.unsubscribe()
        (snapshot,) = subscription.snapshots()
    assert {row.key: row.values["count"] for row in snapshot.rows} == {(thread,): 2000 for thread in range(8)}
    total = sum(int(row.values["sum"] or 0) for row in snapshot.rows)
    assert 8 * 2000 * 2000 <= total <= at_most
    assert all(sum(bucket.count for bucket in row.buckets) == 2000 for row in snapshot.rows)
    assert check(snapshot.account) == SpanAccount(starts=16_000, paired=16_000)
    assert snapshot.account.aggregated == 16_000


def test_the_first_start_wins(client: Client, spanner: Ticker) -> None:
    events, account = pairs_of(client, spanner, "recurse 5")
    assert [event.values[:2] for event in events] == [(4, 0)]
    assert check(account) == SpanAccount(starts=5, paired=1, nested=4, unmatched=4)


def test_the_latest_start_wins_where_it_replaces_the_others(client: Client, spanner: Ticker) -> None:
    events, account = pairs_of(client, spanner, "recurse 5", latest=True)
    assert [event.values[:2] for event in events] == [(4, 4)]
    assert check(account) == SpanAccount(starts=5, paired=1, nested=4, unmatched=4)
    by_number = pairs_of(client, spanner, "recurse 5", "recurse 5", latest=True, key=["arg0"])
    assert [event.values[:2] for event in by_number[0]] == [(4, 4), (4, 4)]


def test_nested_spans(client: Client, spanner: Ticker) -> None:
    events, account = pairs_of(client, spanner, "recurse 140", nested=True)
    # deeper ones are not kept, and their ends are nobody else's
    assert [event.values[:2] for event in events] == [(depth, depth) for depth in range(127, -1, -1)]
    assert check(account) == SpanAccount(starts=140, paired=128, nested=12, unmatched=12)


@pytest.mark.vm
def test_threads_that_end_between(client: Client, spanner: Ticker) -> None:
    span = Span(start_selectors=[probe("begin")])
    # an emulated machine takes long to end so many threads
    with client.subscribe(probe("end"), SubscribeOptions(lease_seconds=600), span=span) as subscription:
        spanner.do("die 10000")

        def spans() -> SpanAccount:
            (found,) = (each for each in client.subscriptions() if each.id == subscription.id)
            return found.account.spans

        wait_for(lambda: spans().died == 10_000, "all threads to be missed")
        assert spans().open == 0
        spanner.do("pairs 3")
        account = subscription.unsubscribe()
        assert len(list(subscription.events())) == 3
        account = subscription.account or account
    assert check(account) == SpanAccount(starts=10_003, paired=3, died=10_000)


def test_threads_that_ended_by_the_end_of_a_short_subscription(client: Client, spanner: Ticker) -> None:
    """Which the daemon pairs, as long as nobody has looked for them."""
    _, account = pairs_of(client, spanner, "die 20", "pairs 1", nested=True)
    assert check(account) == SpanAccount(starts=21, paired=1, died=20)


def test_a_key_of_ones_own(client: Client, spanner: Ticker) -> None:
    commands = ["begin 7", "begin 8", "begin 9", "end 8", "end 7", "end 6"]
    events, account = pairs_of(client, spanner, *commands, ends="(arg0)", starts="(arg2:str)", key=["arg0"])
    assert [event.values[:2] for event in events] == [(8, "8"), (7, "7")]
    assert check(account) == SpanAccount(starts=3, paired=2, open=1, unmatched=1)


def test_a_key_of_texts(client: Client, spanner: Ticker) -> None:
    events, account = pairs_of(client, spanner, "pairs 2", starts="()", ends="()", key=["execname", "pid"])
    assert len(events) == 2
    assert check(account) == SpanAccount(starts=2, paired=2)


def test_full_tables_cost_starts_alone(client: Client, spanner: Ticker) -> None:
    commands = [f"begin {number}" for number in range(10)] + [f"end {number}" for number in range(10)]
    events, account = pairs_of(client, spanner, *commands, ends="(arg0)", key=["arg0"], max_open=4)
    assert [event.values[0] for event in events] == [0, 1, 2, 3]
    assert check(account) == SpanAccount(starts=10, paired=4, table_full=6, unmatched=6)


def test_starts_time_out(client: Client, spanner: Ticker) -> None:
    span = Span(start_selectors=[probe("begin")], key=["arg0"], timeout_ms=1)
    with client.subscribe(probe("end"), span=span) as subscription:
        spanner.do("begin 1")

        def spans() -> SpanAccount:
            (found,) = (each for each in client.subscriptions() if each.id == subscription.id)
            return found.account.spans

        wait_for(lambda: spans().timed_out == 1, "the start to time out")
        spanner.do("end 1")
        account = subscription.unsubscribe()
        assert list(subscription.events()) == []
        account = subscription.account or account
    assert check(account) == SpanAccount(starts=1, timed_out=1, unmatched=1)


@pytest.mark.vm
@pytest.mark.parametrize(
    ("span", "captures"),
    [
        (Span(start_selectors=[probe("begin")]), 0),
        (Span(start_selectors=[probe("begin", "(arg1)")]), 1),
        (Span(start_selectors=[probe("begin", "(arg0, arg2:str)")], key=["arg0"]), 2),
        (Span(start_selectors=[probe("begin", "(arg0)")], key=["arg0"]), 1),
        (Span(start_selectors=[probe("begin", "(arg0)")], nested=True), 1),
    ],
)
def test_what_is_open_is_told(client: Client, spanner: Ticker, span: Span, captures: int) -> None:
    """During the subscription, once, and at its end; whoever pairs."""
    span = replace(span, report_open_ms=50, start_where="arg0 != 9")
    with client.subscribe(probe("end", "(arg0)"), span=span) as subscription:
        messages = iter(subscription.messages())
        spanner.do("begin 5")
        (told,) = next(each for each in messages if isinstance(each, OpenSpans)).spans
        assert (told.pid, told.tid) == (spanner.pid, spanner.pid)
        assert told.waiting_ns >= 50_000_000
        assert abs(time.time_ns() - told.begin_ns - told.waiting_ns) < 60 * 10**9
        assert told.key == ((5,) if span.key else ())
        assert told.values == ((0,) if captures == 1 and not span.key and not span.nested else (5, "5")[:captures])
        if span.key:
            spanner.do("begin 9")
            spanner.do("begin 6")
            (told,) = next(each for each in messages if isinstance(each, OpenSpans)).spans
            assert told.key == (6,)
            spanner.do("end 5")
        subscription.unsubscribe()
        rest = list(messages)
        assert not any(isinstance(each, OpenSpans) for each in rest)
    (last,) = subscription.open_spans.values()
    assert (last.count, [each.key for each in last.spans]) == (1, [(6,) if span.key else ()])
    assert [each.of_start for each in last.captures] == [True] * captures


@pytest.mark.vm
def test_snapshots_tell_what_is_open(client: Client, spanner: Ticker) -> None:
    wanted = Aggregate(functions=["count"], by=["start.arg0"], interval_ms=50)
    span = Span(start_selectors=[probe("begin")], key=["arg0"])
    with client.aggregate(probe("end"), wanted, span=span) as subscription:
        snapshots = iter(subscription.snapshots())
        assert next(snapshots).open is None
        spanner.do("begin 7")
        waiting = next(each.open for each in snapshots if each.open)
        assert [(each.pid, each.key, each.values) for each in waiting.spans] == [(spanner.pid, (7,), (7,))]
        spanner.do("end 7")
        next(each for each in snapshots if each.open is None)
        spanner.do("begin 8")
        subscription.unsubscribe()
        last = list(snapshots)[-1].open
    assert last is not None
    assert [each.key for each in last.spans] == [(8,)]


def test_filters_of_both_ends_and_of_pairs(client: Client, spanner: Ticker) -> None:
    options = SubscribeOptions(where="arg1 % 2 == 0 && elapsed > 0")
    events, account = pairs_of(client, spanner, "pairs 100", options=options, start_where="arg1 >= 50")
    assert [event.values[:2] for event in events] == [(number, number) for number in range(50, 100, 2)]
    assert check(account) == SpanAccount(starts=100, paired=100)
    assert (account.delivered, account.filtered) == (25, 75)


@pytest.mark.vm
@pytest.mark.parametrize(
    ("wanted", "starts"),
    [
        ({"nested": True}, "(arg1)"),
        ({"nested": True, "timeout_ms": 60_000}, "(arg1)"),
        ({}, "(arg1)"),
        ({}, "()"),
        ({"key": ["arg0"], "timeout_ms": 60_000}, "(arg1)"),
    ],
)
def test_filters_do_not_change_which_start_an_end_belongs_to(
    client: Client, spanner: Ticker, wanted: dict[str, object], starts: str
) -> None:
    """In a recursion, where the first start has the last end; or the innermost one, if spans are nested."""
    spans = {}
    for start_where, where in [("", ""), ("arg1 >= 3", ""), ("", "arg1 % 2 == 0"), ("arg1 == 0", "arg1 == 4")]:
        options = SubscribeOptions(where=where)
        events, account = pairs_of(
            client,
            spanner,
            "recurse 5",
            starts=starts,
            options=options,
            start_where=start_where,
            **wanted,  # type: ignore[arg-type]
        )
        spans[start_where, where] = check(account)
        pairs = [(depth, depth) for depth in range(4, -1, -1)] if wanted.get("nested") else [(4, 0)]
        kept = [
            (end, start)
            for end, start in pairs
            if (start >= 3 if start_where == "arg1 >= 3" else start == 0 or not start_where)
            and (end % 2 == 0 if where == "arg1 % 2 == 0" else end == 4 or not where)
        ]
        found = [(event.values[0], event.values[1] if starts == "(arg1)" else None) for event in events]
        assert found == [(end, start if starts == "(arg1)" else None) for end, start in kept]
        assert account.filtered == len(pairs) - len(kept)
    assert len(set(spans.values())) == 1


def test_filters_of_starts_that_are_texts(client: Client, spanner: Ticker) -> None:
    """Which the daemon tests, so that it pairs, too."""
    events, account = pairs_of(client, spanner, "pairs 20", start_where='str(arg2) ~ "work [12]"')
    assert [event.values[:2] for event in events] == [(number, number) for number in range(20) if number % 7 in {1, 2}]
    assert check(account) == SpanAccount(starts=20, paired=20)
    assert account.filtered == 20 - len(events)


def test_undecided_starts_are_told_where_their_pairs_are_filtered(client: Client, spanner: Ticker) -> None:
    where = 'str(arg2) ~ "*" && 10 / arg1 > 3'
    _, account = pairs_of(client, spanner, "begin 7", start_where=where, key=["arg0"])
    assert check(account) == SpanAccount(starts=1, open=1)
    assert (account.filtered, account.undecided) == (0, 0)
    commands = "begin 7", "begin 8", "end 8", "pairs 5"
    events, account = pairs_of(client, spanner, *commands, start_where=where, key=["arg0"])
    assert [event.values[0] for event in events] == [1, 2]
    assert check(account) == SpanAccount(starts=7, paired=6, open=1)
    assert (account.filtered, account.undecided) == (4, 2)


@pytest.mark.vm
def test_pairs_that_start_filters_leave_are_added_up(client: Client, spanner: Ticker) -> None:
    span = Span(start_selectors=[probe("begin")], start_where="arg1 >= 30")
    for wanted in (Aggregate(), Aggregate(functions=["count", "max"], value="arg1", by=["start.arg1"])):
        with client.aggregate(probe("end"), wanted, SubscribeOptions(where="arg1 < 90"), span) as subscription:
            spanner.do("pairs 100")
            subscription.unsubscribe()
            (snapshot,) = subscription.snapshots()
        assert sum(row.values["count"] or 0 for row in snapshot.rows) == 60
        assert check(snapshot.account) == SpanAccount(starts=100, paired=100)
        assert (snapshot.account.aggregated, snapshot.account.filtered) == (60, 40)


def test_starts_that_are_filtered_time_out_as_others_do(client: Client, spanner: Ticker) -> None:
    _, account = pairs_of(client, spanner, "pairs 10", start_where="arg1 >= 5", timeout_ms=60_000)
    assert check(account) == SpanAccount(starts=10, paired=10)
    span = Span(start_selectors=[probe("begin")], key=["arg0"], start_where="arg0 > 5", timeout_ms=1)
    with client.subscribe(probe("end"), span=span) as subscription:
        spanner.do("begin 1")

        def timed_out() -> bool:
            (found,) = (each for each in client.subscriptions() if each.id == subscription.id)
            return found.account.spans.timed_out == 1

        wait_for(timed_out, "the start to time out")


def test_pairs_that_are_filtered(client: Client, spanner: Ticker) -> None:
    """Every fifth waits for four microseconds, and none for a minute."""
    options = SubscribeOptions(where="elapsed >= 4000 && elapsed < 60000000000")
    events, account = pairs_of(client, spanner, "pairs 100", options=options)
    assert {event.values[0] for event in events} >= set(range(4, 100, 5))
    assert account.delivered + account.filtered == check(account).paired == 100


@pytest.mark.vm
@pytest.mark.parametrize(
    ("where", "is_late"),
    [
        ("elapsed < 0 || arg1 % 3 == 1", False),
        ("elapsed >= 0 ? arg1 % 3 == 1 : arg1 == 5", False),
        ("(elapsed / 1000 + 1) * 0 == arg1 % 3 - 1", False),
        ('elapsed < 0 || arg1 % 3 == 1 && execname ~ "*"', True),
    ],
)
def test_pairs_are_filtered_where_they_are_made(
    client: Client, spanner: Ticker, engine: str, where: str, *, is_late: bool
) -> None:
    """With the bpf engine by the kernel, if it can test for them, and otherwise by the daemon with equal results."""
    options, span = SubscribeOptions(where=where), Span(start_selectors=[probe("begin")])
    keys: list[list[str]] = [[], ["arg1 % 2"], ["start.arg1"]]
    wanted = [*(Aggregate(functions=["count", "sum"], value="arg1", by=by) for by in keys), Aggregate()]
    with ExitStack() as stack:
        adding = [stack.enter_context(client.aggregate(probe("end"), each, options, span)) for each in wanted]
        assert [not each.added_late for each in adding] == [engine == "bpf" and not is_late] * len(adding)
        reasons = [NOT_INTEGER] if is_late else []
        assert [list(each.evaluated_late.values()) for each in adding] == [reasons] * len(adding)
        spanner.do("pairs 30")
        spanner.do("threads 4 30")
        accounts = [each.unsubscribe() for each in adding]
        snapshots = [[(row.key, row.values) for one in each.snapshots() for row in one.rows] for each in adding]
    for account in accounts:
        assert check(account) == SpanAccount(starts=150, paired=150)
        assert (account.fired, account.aggregated, account.filtered) == (300, 50, 100)
    numbers = range(1, 30, 3)
    totals = [sum(number for number in numbers if number % 2 == odd) for odd in (0, 1)]
    assert snapshots[0] == [((), {"count": 50, "sum": 5 * sum(numbers)})]
    assert sorted(snapshots[1]) == [((odd,), {"count": 25, "sum": 5 * total}) for odd, total in enumerate(totals)]
    assert sorted(snapshots[2]) == [((number,), {"count": 5, "sum": 5 * number}) for number in numbers]
    assert snapshots[3] == [((), {"count": 50})]


def test_a_site_cannot_be_both(client: Client, spanner: Ticker) -> None:  # noqa: ARG001 - it has the sites
    span = Span(start_selectors=[probe("*")])
    with client.subscribe(probe("end"), span=span) as subscription:
        reasons = Counter(site.reason for site in subscription.sites if site.reason)
    assert reasons == {"it would be both the start and the end of a span": 1}


@pytest.mark.vm
def test_pairs_on_the_command_line(daemon: Daemon, spanner_program: Path) -> None:
    script = f"printf 'pairs 3\\nquit\\n' | {spanner_program}"
    wanted = ["spans", probe("begin", "(arg1, arg2:str)"), probe("end", "(arg1)"), "--file", str(spanner_program)]
    done = stapsdt(daemon.target, *wanted, "--json", "--", "sh", "-c", script)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(event["args"], event["start_args"]) for event in events] == [([n], [n, f"work {n}"]) for n in range(3)]
    assert all(event["elapsed"] > 0 for event in events)
    summary = json.loads(done.stderr.splitlines()[-1])
    assert (summary["delivered"], summary["spans"]["starts"], summary["spans"]["paired"]) == (3, 3, 3)


def test_latency_on_the_command_line(daemon: Daemon, spanner_program: Path) -> None:
    script = f"printf 'pairs 70\\nbegin 1\\nquit\\n' | {spanner_program} > /dev/null"
    wanted = ["latency", probe("begin"), probe("end"), "--by", "start.arg2:str", "--file", str(spanner_program)]
    done = stapsdt(daemon.target, *wanted, "--", "sh", "-c", script)
    titles = [line for line in done.stdout.splitlines() if line.startswith("start.")]
    assert sorted(title.split("  p50")[0] for title in titles) == [
        f"start.arg2:str=work {number}  10 values" for number in range(7)
    ]
    assert "70 pairs aggregated" in done.stderr
    assert "71 starts: 70 paired, 1 " in done.stderr


def test_pairs_that_never_were_are_explained(daemon: Daemon, spanner_program: Path) -> None:
    script = f"printf 'end 1\\nquit\\n' | {spanner_program} > /dev/null"
    wanted = ["latency", probe("begin"), probe("end"), "--file", str(spanner_program)]
    done = stapsdt(daemon.target, *wanted, "--", "sh", "-c", script)
    assert "END fired, but no START before it" in done.stderr
    assert "1 end without a start" in done.stderr


@pytest.mark.parametrize("name", ["latency", "spans"])
def test_starts_without_an_end_are_told_of_or_replaced(daemon: Daemon, spanner_program: Path, name: str) -> None:
    script = f"printf 'recurse 5\\nquit\\n' | {spanner_program} > /dev/null"
    wanted = [name, probe("begin"), probe("end"), "--file", str(spanner_program)]

    def said(*options: str) -> list[str]:
        return stapsdt(daemon.target, *wanted, *options, "--", "sh", "-c", script).stderr.splitlines()

    *_, doubt, first = said()
    assert doubt.startswith("stapsdt: 4 STARTs came while an earlier one waited for its END: if that has none")
    assert "5 starts: 1 paired, 4 within another; 4 ends without a start" in first
    *before, latest = said("--latest")
    assert "5 starts: 1 paired, 4 replaced by a later one; 4 ends without a start" in latest
    assert not any("came while an earlier one" in line for line in before)
    assert "came while an earlier one" in json.loads(said("--json")[-1])["uncertain"]
    assert "uncertain" not in json.loads(said("--json", "--nested")[-1])


@pytest.mark.parametrize("engine", ["bpf"])
def test_programs_that_execute_another_between(client: Client, spanner: Ticker) -> None:
    """Where the kernel pairs: see docs/limits.md."""
    events, account = pairs_of(client, spanner, "exec", "end 0")
    assert events == []
    assert check(account) == SpanAccount(starts=1, died=1, unmatched=1)
