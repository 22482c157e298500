"""`buf()`, the bytes that an argument points to, on the real kernel: captured, as a key, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stapsdtd.client import Aggregate, Client, SiteState, SubscribeOptions
from tests.kernel.test_where import accounted, of
from tests.support import Daemon, Recorder, Ticker, stapsdt

pytestmark = pytest.mark.kernel

ON_BPF = pytest.mark.parametrize("engine", ["bpf"])

TEXTS = ("SELECT 1", "S\x01\x7f~", "SELECT 2", "SE")
REASON = ": the ftrace engine cannot fetch the bytes it points to"


def written(text: str, size: int) -> bytes:
    """What the program has where it keeps a line: at least two zeros are behind its text."""
    assert size <= len(text) + 2
    return text.encode().ljust(size, b"\0")[:size]


@pytest.mark.vm
def test_events_have_the_bytes(daemon: Daemon, engine: str, ticker: Ticker, ticker_program: Path) -> None:
    fields = ["buf(arg0, 1)", "arg1 > 4 ? buf(arg0, 8) : buf(arg0, 4)"]
    with (
        Client(daemon.target) as client,
        client.subscribe(of(ticker_program, "text(arg0:buf[4], arg1)"), SubscribeOptions(fields=fields)) as events,
    ):
        for text in TEXTS:
            ticker.do(f"text {text}")
        events.unsubscribe()
        told = [(event.values, event.unavailable) for event in events.events()]
    if engine == "ftrace":
        assert [values for values, _ in told] == [(None, len(text), None, None) for text in TEXTS]
        assert {reason.endswith(REASON) for _, unavailable in told for reason in unavailable.values()} == {True}
    else:
        assert told == [
            ((written(text, 4), len(text), written(text, 1), written(text, 8 if len(text) > 4 else 4)), {})
            for text in TEXTS
        ]


@ON_BPF
@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ('buf(arg0, 6) == "SELECT"', ["SELECT 1", "SELECT 2"]),
        ('buf(arg0, 4) == "SE\\x00\\x00" && arg1 < 5', ["SE"]),
        ('buf(arg0, 2) != "SE"', ["S\x01\x7f~"]),
        ("buf(arg0, 3) == buf(arg0, 3) && arg1 == 8", ["SELECT 1", "SELECT 2"]),
        ('buf(arg0, 3) ~ "*\\x00" || buf(arg0, 8) ~ "*2"', ["SELECT 2", "SE"]),
    ],
)
def test_bytes_are_compared(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, where: str, wanted: list[str]
) -> None:
    with Recorder(daemon.target, of(ticker_program, "text(arg0:str)"), where=where) as recorder:
        for text in TEXTS:
            ticker.do(f"text {text}")
    assert recorder.values() == [(text,) for text in wanted]
    assert accounted(recorder.finish()) == (len(TEXTS), len(wanted), len(TEXTS) - len(wanted))


@pytest.mark.parametrize("argument", ["arg0", "arg1"])
def test_site_where_they_cannot_be_had_is_refused(
    daemon: Daemon, engine: str, ticker: Ticker, ticker_program: Path, argument: str
) -> None:
    where = f'buf({argument}, 3) == "SEL"'
    with Recorder(daemon.target, of(ticker_program, "text()"), where=where) as recorder:
        ticker.do("text SELECT 1")
    (status,) = recorder.sites
    if engine == "ftrace":
        assert (status.state, status.reason.endswith(REASON)) == (SiteState.REFUSED, True)
    elif argument == "arg1":
        why = "is 4 bytes wide, which is no pointer to bytes"
        assert (status.state, why in status.reason) == (SiteState.REFUSED, True)
    else:
        assert accounted(recorder.finish()) == (1, 1, 0)


@pytest.mark.vm
@ON_BPF
def test_bytes_are_keys(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """Whoever adds up by them; a key that is too long for the kernel is left to the daemon, which `info` says."""
    selector = of(ticker_program, "text")
    wanted = [["buf(arg0, 4)", "arg1"], ["arg0:buf[4]", "arg1"], ["arg1 ? buf(arg0, 4) : buf(arg0, 1)", "arg1"]]
    expected = {(b"SELE", 8): 2, (b"S\x01\x7f~", 4): 1, (b"SE\0\0", 2): 1}
    with Client(daemon.target) as client:
        adding = [client.aggregate(selector, Aggregate(by=by)) for by in wanted]
        long = client.aggregate(selector, Aggregate(by=["buf(arg0, 265)"]))
        assert [each.added_late for each in adding[:2]] == [{}, {}]
        (reason,) = adding[2].added_late
        assert "the kernel does not calculate (arg1 != 0) ? buf(arg0, 4) : buf(arg0, 1)" in reason
        assert long.added_late == {"its key takes 280 bytes, and in the kernel at most 272": 1}
        assert "its key takes 280 bytes" in " ".join(stapsdt(daemon.target, "info").stdout.split())
        for text in TEXTS:
            ticker.do(f"text {text}")
        for each in (*adding, long):
            account = each.unsubscribe()
            assert (account.fired, account.aggregated, account.lost) == (4, 4, 0)
            rows = {row.key: row.values["count"] for snapshot in each.snapshots() for row in snapshot.rows}
            if each is long:
                assert {len(key) for (key,) in rows if isinstance(key, bytes)} == {265}
            else:
                assert rows == expected


@ON_BPF
def test_bytes_that_cannot_be_read_are_unavailable(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """All bits of the argument are set."""
    with (
        Client(daemon.target) as client,
        client.subscribe(of(ticker_program, "values(arg7:buf[8])")) as events,
        client.aggregate(of(ticker_program, "values"), Aggregate(by=["buf(arg7, 8)"])) as rows,
        client.subscribe(of(ticker_program, "values"), SubscribeOptions(where='buf(arg7, 1) != "a"')) as chosen,
    ):
        ticker.do("values")
        accounts = [each.unsubscribe() for each in (events, rows, chosen)]
        (event,) = events.events()
        # the compiler has it in memory
        reason = "the memory that holds it, or memory it points to, could not be read"
        assert (event.values, event.unavailable) == ((None,), {0: reason})
        assert [(row.key, row.values["count"]) for each in rows.snapshots() for row in each.rows] == [((None,), 1)]
    assert [(each.fired, each.aggregated, each.filtered) for each in accounts] == [(1, 0, 0), (1, 1, 0), (1, 0, 1)]


@ON_BPF
def test_commands_print_what_is_printable(daemon: Daemon, ticker_program: Path) -> None:

    def printed(*arguments: str) -> str:
        command = [*arguments, "--file", str(ticker_program), "--", str(ticker_program), "1"]
        return stapsdt(daemon.target, *command).stdout

    tick = of(ticker_program, "tick")
    assert ' "tick\\x00" (buf(arg2, 2))="ti"\n' in printed("trace", f"{tick}(arg2:buf[5])", "--fields", "buf(arg2, 2)")
    (event,) = map(json.loads, printed("trace", f"{tick}(arg2:buf[5])", "--json").splitlines())
    assert event["args"] == [b"tick\0".hex()]
    assert printed("count", tick, "--by", "buf(arg2, 5)").splitlines()[-1].split() == ["1", "tick\\x00"]
    assert json.loads(printed("count", tick, "--by", "buf(arg2, 5)", "--json")) == {
        "key": [b"tick\0".hex()],
        "count": 1,
    }
