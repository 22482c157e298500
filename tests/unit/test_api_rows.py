"""Events on the wire: whatever they hold, rows read as if each field had been set, and columns tell the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.api import rows
from stapsdtd.api.convert import columns, descriptions
from stapsdtd.client import DescribedSite, Event, ProtocolError
from stapsdtd.client.decode import described_sites
from stapsdtd.client.events import event_batch
from stapsdtd.client.messages import Value
from stapsdtd.events.columns import Block, Numbers, Strings, ValueColumn
from stapsdtd.model import Capture
from stapsdtd.sessions.log import Entry, Numbered
from stapsdtd.sessions.subscription import KnownSite
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.unit.samples import argument, captured, sample_object, site

_OFFSET_NS = 1_700_000_000_000_000_000
_UNREADABLE = "the memory it points to could not be read"

_signed = st.integers(-(1 << 63), (1 << 63) - 1)
_unsigned = st.integers(0, (1 << 64) - 1)
_pids = st.integers(-1, (1 << 22) - 1)
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
        st.none() | st.binary(max_size=300),
        st.none() | st.floats(allow_nan=False),
    ),
    min_size=1,
    max_size=8,
)
_Event = tuple[int, int, int, int, bytes, int, int, int | None, bytes | None, float | None]


def _block(events: list[_Event], *, with_string: bool) -> Block:
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
    return Block(
        np.array(times, np.int64),
        np.array(pids, np.int32),
        np.array(tids, np.int32),
        np.array(cpus, np.uint16),
        np.array(comms, "S16"),
        np.array(site_ids, np.uint32),
        tuple(values),
    )


def _wanted(seq: int, event: _Event, *, with_string: bool) -> pb.Event:
    time_ns, pid, tid, cpu, comm, site_id, signed, unsigned, string, real = event
    unavailable = pb.Value(unavailable=_UNREADABLE)
    values = [pb.Value(signed=signed), unavailable if unsigned is None else pb.Value(unsigned=unsigned)]
    if with_string:
        values.append(unavailable if string is None else pb.Value(string=string))
        values.append(unavailable if real is None else pb.Value(float=real))
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


def _entry(first_seq: int, blocks: list[Block]) -> Entry:
    """Their events take turns, for as long as there are several."""
    count = sum(map(len, blocks))
    places = sorted((row, number) for number, block in enumerate(blocks) for row in range(len(block)))
    seqs: list[list[int]] = [[] for _ in blocks]
    for seq, (_, number) in enumerate(places, first_seq):
        seqs[number].append(seq)
    numbered = (Numbered(np.array(each, np.uint64), block) for each, block in zip(seqs, blocks, strict=True))
    return Entry(first_seq, count, 0, tuple(numbered))


@given(_events, _events, st.integers(1, 1 << 62))
def test_every_field_arrives_in_the_order_of_seq(numbers: list[_Event], strings: list[_Event], first_seq: int) -> None:
    blocks = [_block(numbers, with_string=False), _block(strings, with_string=True)]
    entry = _entry(first_seq, blocks)
    ((message, next_seq),) = rows.messages(entry, _OFFSET_NS, _SITES)
    wanted = [
        _wanted(seq, event, with_string=with_string)
        for numbered, events, with_string in zip(entry.blocks, (numbers, strings), (False, True), strict=True)
        for seq, event in zip(numbered.seq.tolist(), events, strict=True)
    ]
    assert list(message.rows.events) == sorted(wanted, key=lambda event: event.seq)
    assert next_seq == entry.next_seq


def test_a_message_is_no_larger_than_a_client_takes() -> None:
    string = b"x" * 60_000
    event: _Event = (1, 2, 3, 4, b"comm", 5, 6, 7, string, 0.5)
    many = list(rows.messages(_entry(1, [_block([event] * 2500, with_string=False)]), _OFFSET_NS, _SITES))
    assert [next_seq for _, next_seq in many] == [1001, 2001, 2501]
    long = list(rows.messages(_entry(1, [_block([event] * 100, with_string=True)]), _OFFSET_NS, _SITES))
    assert max(message.ByteSize() for message, _ in long) < 2 << 20
    assert sum(len(message.rows.events) for message, _ in long) == 100


def _described(site_ids: Iterable[int]) -> dict[int, DescribedSite]:
    sites = descriptions(dict.fromkeys(site_ids, _KNOWN))
    return {each.site.site_id: each for each in described_sites(sites)}


def _as_client(event: pb.Event, described: DescribedSite) -> Event:
    kinds = [value.WhichOneof("kind") for value in event.values]
    values: list[Value] = []
    for kind, value in zip(kinds, event.values, strict=True):
        match kind:
            case "string":
                values.append(value.string.decode("utf-8", "backslashreplace"))
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
    )


@given(_events, _events, st.integers(1, 1 << 62))
def test_a_client_reads_the_same_from_columns(numbers: list[_Event], strings: list[_Event], first_seq: int) -> None:
    entry = _entry(first_seq, [_block(numbers, with_string=False), _block(strings, with_string=True)])
    ((message, _),) = rows.messages(entry, _OFFSET_NS, _SITES)
    described = _described({event.site_id for event in message.rows.events})
    wanted = tuple(_as_client(event, described[event.site_id]) for event in message.rows.events)
    assert event_batch(columns(entry, _OFFSET_NS), described).events == wanted


def test_columns_that_do_not_fit_together_are_an_error() -> None:
    event: _Event = (1, 2, 3, 4, b"comm", 5, 6, 7, b"x", 0.5)
    sent = columns(_entry(1, [_block([event] * 3, with_string=True)]), _OFFSET_NS)
    for field in ("seq", "pid", "comm", "site_id"):
        short = pb.Columns()
        short.CopyFrom(sent)
        setattr(short.blocks[0], field, getattr(sent.blocks[0], field)[:-1])
        with pytest.raises(ProtocolError, match="inconsistent columns"):
            event_batch(short, _described([5]))
