"""Events on the wire: whatever they hold, rows read as if each field had been set, and columns tell the same."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stapsdtd.api import columns, rows
from stapsdtd.api.subscription_messages import description
from stapsdtd.client import CutText, DescribedSite, Event, ProtocolError
from stapsdtd.client.decode import described_sites
from stapsdtd.client.events import event_batch
from stapsdtd.client.messages import Value
from stapsdtd.events.batch import EventBatch, ValueTable, join
from stapsdtd.events.columns import CUT, Numbers, Strings, ValueColumn
from stapsdtd.model import Capture
from stapsdtd.sessions.log import Entry
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.unit.samples import argument, captured, sample_object, site

_OFFSET_NS = 1_700_000_000_000_000_000

_signed = st.integers(-(1 << 63), (1 << 63) - 1)
_unsigned = st.integers(0, (1 << 64) - 1)
_pids = st.integers(-1, (1 << 22) - 1)
_strings = st.binary(max_size=300).map(lambda string: string.replace(CUT, b"."))
_events = st.lists(
    st.tuples(
        st.integers(0, 1 << 53),
        _pids,
        _pids,
        st.integers(0, (1 << 16) - 1),
        st.binary(max_size=16).map(lambda comm: comm.rstrip(b"\0")),
        st.integers(0, (1 << 32) - 1),
        _signed,
        st.none() | _unsigned,
        st.none() | _strings | _strings.map(lambda string: string + CUT),
        st.none() | st.floats(allow_nan=False),
    ),
    min_size=1,
    max_size=8,
)
_Event = tuple[int, int, int, int, bytes, int, int, int | None, bytes | None, float | None]


def _batch(events: list[_Event], *, with_string: bool) -> EventBatch:
    times, pids, tids, cpus, comms, site_ids, signed, unsigned, strings, floats = zip(*events, strict=True)
    missing = np.array([number is None for number in unsigned])
    numbers = np.array([number or 0 for number in unsigned], np.uint64)
    values: list[ValueColumn] = [
        Numbers(np.array(signed, np.int64)),
        Numbers(numbers, missing if missing.any() else None),
    ]
    if with_string:
        values.append(Strings.of(strings))
        absent = np.array([number is None for number in floats])
        values.append(
            Numbers(
                np.array([0.0 if number is None else number for number in floats]), absent if absent.any() else None
            )
        )
    return EventBatch(
        np.array(times, np.int64),
        np.array(pids, np.int32),
        np.array(tids, np.int32),
        np.array(cpus, np.uint16),
        np.array(comms, "S16"),
        np.array(site_ids, np.uint32),
        (ValueTable(tuple(values)),),
    )


def _text(string: bytes) -> pb.Value:
    return pb.Value(string=string.removesuffix(CUT), truncated=string.endswith(CUT))


def _unavailable(position: int) -> pb.Value:
    return pb.Value(unavailable=_KNOWN.why_missing(position))


def _wanted(seq: int, event: _Event, *, with_string: bool) -> pb.Event:
    time_ns, pid, tid, cpu, comm, site_id, signed, unsigned, string, real = event
    values = [pb.Value(signed=signed), _unavailable(1) if unsigned is None else pb.Value(unsigned=unsigned)]
    if with_string:
        values.append(_unavailable(2) if string is None else _text(string))
        values.append(_unavailable(3) if real is None else pb.Value(float=real))
    text = comm.decode(errors="backslashreplace")
    return pb.Event(
        seq=seq, time_ns=time_ns + _OFFSET_NS, pid=pid, tid=tid, cpu=cpu, comm=text, site_id=site_id, values=values
    )


class _AnySite(dict[int, KnownSite]):
    def __missing__(self, number: int) -> KnownSite:
        return _KNOWN


_SITE = site(arguments=[argument(signed=True), argument(), argument(), replace(argument(), is_float=True)])
_KNOWN = KnownSite(
    sample_object(_SITE),
    captured(_SITE, Capture(0), Capture(1), Capture(2, is_string=True), Capture(3)),
    lambda *_: None,
)
_SITES = _AnySite()


def _entry(first_seq: int, batches: list[EventBatch]) -> Entry:
    """Their events take turns, for as long as there are several."""
    joined = join(batches)
    turns = sorted((row, number) for number, batch in enumerate(batches) for row in range(len(batch)))
    begins = [sum(map(len, batches[:number])) for number in range(len(batches))]
    return Entry(first_seq, joined.take(np.array([begins[number] + row for row, number in turns])), 0)


def _as_rows(entry: Entry) -> list[tuple[pb.Rows, int]]:
    messages = rows.messages(entry, _OFFSET_NS, _SITES)
    return [(pb.StreamResponse.FromString(message).rows, next_seq) for message, next_seq in messages]


def _as_columns(entry: Entry) -> pb.Columns:
    return pb.StreamResponse.FromString(columns.message(entry, _OFFSET_NS)).columns


def _taking_turns(numbers: list[_Event], strings: list[_Event]) -> list[tuple[_Event, bool]]:
    """Events with whether they have a string, in the order of `_entry`."""
    turns = [(row, False, event) for row, event in enumerate(numbers)]
    turns += [(row, True, event) for row, event in enumerate(strings)]
    return [(event, with_string) for _, with_string, event in sorted(turns, key=lambda turn: turn[:2])]


@given(_events, _events, st.integers(1, 1 << 62))
def test_every_field_arrives_in_the_order_of_seq(numbers: list[_Event], strings: list[_Event], first_seq: int) -> None:
    entry = _entry(first_seq, [_batch(numbers, with_string=False), _batch(strings, with_string=True)])
    ((message, next_seq),) = _as_rows(entry)
    assert list(message.events) == [
        _wanted(seq, event, with_string=with_string)
        for seq, (event, with_string) in enumerate(_taking_turns(numbers, strings), first_seq)
    ]
    assert (next_seq, message.realtime_offset_ns) == (entry.next_seq, _OFFSET_NS)


@pytest.mark.parametrize("offset_ns", [-(1 << 63), -1, 0, (1 << 63) - 1])
def test_any_offset_arrives(offset_ns: int) -> None:
    batch = _batch([(0, 2, 3, 4, b"comm", 5, 6, 7, None, None)], with_string=False)
    ((as_rows, _),) = rows.messages(Entry(1, batch, 0), offset_ns, _SITES)
    as_columns = columns.message(Entry(1, batch, 0), offset_ns)
    assert pb.StreamResponse.FromString(as_rows).rows.realtime_offset_ns == offset_ns
    assert pb.StreamResponse.FromString(as_columns).columns.realtime_offset_ns == offset_ns


@given(_events, st.integers(1, 1 << 62), st.booleans())
def test_events_of_one_layout_arrive(events: list[_Event], first_seq: int, with_string: bool) -> None:
    ((message, next_seq),) = _as_rows(_entry(first_seq, [_batch(events, with_string=with_string)]))
    assert list(message.events) == [
        _wanted(seq, event, with_string=with_string) for seq, event in enumerate(events, first_seq)
    ]
    assert (next_seq, message.realtime_offset_ns) == (first_seq + len(events), _OFFSET_NS)


def test_a_message_is_no_larger_than_a_client_takes() -> None:
    string = b"x" * 60_000
    event: _Event = (1, 2, 3, 4, b"comm", 5, 6, 7, string, 0.5)
    many = _as_rows(_entry(1, [_batch([event] * 2500, with_string=False)]))
    assert [next_seq for _, next_seq in many] == [1001, 2001, 2501]
    assert [event.seq for message, _ in many for event in message.events] == list(range(1, 2501))
    long = _as_rows(_entry(1, [_batch([event] * 100, with_string=True)]))
    assert max(message.ByteSize() for message, _ in long) < 2 << 20
    assert [event.seq for message, _ in long for event in message.events] == list(range(1, 101))
    assert [next_seq for _, next_seq in long] == [message.events[-1].seq + 1 for message, _ in long]


def _described(site_ids: Iterable[int]) -> dict[int, DescribedSite]:
    sites = pb.Descriptions(probes=[description(site_id, _KNOWN) for site_id in site_ids])
    return {each.site.site_id: each for each in described_sites(sites, "")}


def _as_client(event: pb.Event, described: DescribedSite) -> Event:
    kinds = [value.WhichOneof("kind") for value in event.values]
    values: list[Value] = []
    for kind, value in zip(kinds, event.values, strict=True):
        match kind:
            case "string":
                text = value.string.decode("utf-8", "backslashreplace")
                values.append(CutText(text) if value.truncated else text)
            case "unavailable":
                values.append(None)
            case _:
                values.append(getattr(value, str(kind)))
    return Event(
        event.seq,
        event.time_ns,
        event.pid,
        event.tid,
        event.cpu,
        event.comm,
        described.probe,
        described.site,
        tuple(values),
        {at: value.unavailable for at, value in enumerate(event.values) if kinds[at] == "unavailable"},
        monotonic_ns=event.time_ns - _OFFSET_NS,
    )


@given(_events, _events, st.integers(1, 1 << 62))
def test_a_client_reads_the_same_from_columns(numbers: list[_Event], strings: list[_Event], first_seq: int) -> None:
    entry = _entry(first_seq, [_batch(numbers, with_string=False), _batch(strings, with_string=True)])
    ((message, _),) = _as_rows(entry)
    described = _described({event.site_id for event in message.events})
    wanted = tuple(_as_client(event, described[event.site_id]) for event in message.events)
    found = _as_columns(entry)
    read = event_batch(found, described).events
    assert read == wanted
    assert [list(map(type, event.values)) for event in read] == [list(map(type, event.values)) for event in wanted]
    assert (len(found.blocks), found.next_seq) == (2, entry.next_seq)


def test_columns_that_do_not_fit_together_are_an_error() -> None:
    event: _Event = (1, 2, 3, 4, b"comm", 5, 6, 7, b"x", 0.5)
    sent = _as_columns(_entry(1, [_batch([event] * 3, with_string=True)]))
    for field in ("seq", "pid", "comm", "site_id"):
        short = pb.Columns()
        short.CopyFrom(sent)
        setattr(short.blocks[0], field, getattr(sent.blocks[0], field)[:-1])
        with pytest.raises(ProtocolError, match="inconsistent columns"):
            event_batch(short, _described([5]))
