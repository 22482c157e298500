"""Stream: order of messages, both encodings, losses, coming back, leases, objects that come and go."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from stapsdtd.api.event_reader import EventReader
from stapsdtd.api.stream import StreamTurns, SubscriptionStream, TakenOverError
from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog.selectors import parse
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.model import Object, Unavailable
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.subscribe_options import Scope
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import argument, batch, signed, site, strings, unsigned

Row = tuple[Any, ...]
T = TypeVar("T")
ARMED, DISARMED = pb.SiteStatus.STATE_ARMED, pb.SiteStatus.STATE_DISARMED


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(2) as started:
        yield started


@pytest.fixture
def app(server: Served, pids: list[int]) -> Object:
    """Probes `plain` (site 1 of app:*), `number` (2) and `text` (3), mapped by the first process."""
    unavailable = argument(Unavailable("no way to %xmm0"), 8, text="8f@%xmm0")
    found = server.file_object(
        site("plain", 1),
        site("number", 2, [argument(signed=True), unavailable]),
        site("text", 3, [argument(), argument()]),
    )
    server.map(pids[0], found)
    return found


def kinds(messages: Iterable[pb.StreamResponse]) -> list[str | None]:
    return [message.WhichOneof("payload") for message in messages]


def value_of(value: pb.Value) -> Any:
    kind = value.WhichOneof("kind")
    assert kind is not None
    return None if kind == "unavailable" else getattr(value, kind)


def rows(messages: Iterable[pb.StreamResponse]) -> list[Row]:
    events = [event for message in messages for event in message.rows.events]
    heads = [(each.seq, each.time_ns, each.pid, each.tid, each.cpu, each.comm, each.site_id) for each in events]
    return [(*head, *map(value_of, event.values)) for head, event in zip(heads, events, strict=True)]


def column_values(column: pb.Column, count: int) -> list[Any]:
    if column.type == pb.Column.TYPE_STRING:
        ends = np.frombuffer(column.ends, "<u4").tolist()
        assert ends[-1] == len(column.data)
        values: list[Any] = [column.data[start:end] for start, end in itertools.pairwise([0, *ends])]
    else:
        values = np.frombuffer(column.data, "<i8" if column.type == pb.Column.TYPE_SIGNED else "<u8").tolist()
    missing = column.unavailable or bytes(count)
    return [None if gone else value for value, gone in zip(values, missing, strict=True)]


def columns(messages: Iterable[pb.StreamResponse]) -> list[Row]:
    """As rows are, in the order of their numbers."""
    found: list[Row] = []
    for message in messages:
        for each in message.columns.blocks:
            heads = [
                np.frombuffer(data, dtype).tolist()
                for data, dtype in (
                    (each.seq, "<u8"), (each.time_ns, "<i8"), (each.pid, "<i4"), (each.tid, "<i4"), (each.cpu, "<u2"),
                )
            ]  # fmt: skip
            comms = [comm.decode() for comm in np.frombuffer(each.comm, "S16").tolist()]
            site_ids = np.frombuffer(each.site_id, "<u4").tolist()
            values = [column_values(column, each.count) for column in each.values]
            found += zip(*heads, comms, site_ids, *values, strict=True)
    return sorted(found)


def seqs(messages: Iterable[pb.StreamResponse]) -> list[int]:
    return [row[0] for row in rows(messages)]


def finished(server: Served, subscription_id: str, encoding: str = "ROWS", from_seq: int | None = None) -> list[Any]:
    """All that a subscription which ended has to say."""
    return list(server.stream(subscription_id, encoding, from_seq))


def ended_with(call: Any) -> tuple[grpc.StatusCode, Any]:
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    return raised.value.code(), raised.value.details()


@pytest.mark.usefixtures("app")
class TestEncodings:
    def events(self, server: Served, encoding: str) -> tuple[list[pb.StreamResponse], int]:
        ident = server.subscribe("app:text(arg0:str, arg1)", "app:*").subscription_id
        server.fire(
            batch([100, 400], site_id=1, comm=[b"naive", b"\xff\xfe"], cpu=[3, 65535], tid=[2**22, 1]),
            batch([200, 500], signed(-(1 << 63), None), unsigned(None, None), site_id=2),
            batch([150, 300, 600], strings(b"SELECT", None, b""), unsigned((1 << 64) - 1, 0, 5), site_id=3),
        )
        server.fire(batch([700], site_id=1))
        ((subscription, *_),) = server.subscriptions.all()
        server.unsubscribe(ident)
        return finished(server, ident, encoding, from_seq=1), subscription.wall_clock.time_ns(0)

    def test_rows(self, server: Served) -> None:
        messages, offset = self.events(server, "ROWS")
        found = rows(messages)
        assert [row[0] for row in found] == list(range(1, 9))
        assert [row[1] - offset for row in found] == [100, 150, 200, 300, 400, 500, 600, 700]
        assert [row[7:] for row in found] == [
            (), (b"SELECT", (1 << 64) - 1), (-(1 << 63), None), (None, 0), (), (None, None), (b"", 5), (),
        ]  # fmt: skip
        assert found[0][2:7] == (10, 2**22, 3, "naive", 1)
        assert found[4][2:7] == (10, 1, 65535, r"\xff\xfe", 1)

    def test_columns_equal_rows(self, server: Served) -> None:
        by_rows, first_offset = self.events(server, "ROWS")
        by_columns, second_offset = self.events(server, "COLUMNS")

        def without_comm(found: list[Row], offset: int) -> list[Row]:
            return [(row[0], row[1] - offset, *row[2:5], *row[6:]) for row in found]

        # a name that is not UTF-8 is bytes in columns
        for message in by_columns:
            for each in message.columns.blocks:
                each.comm = each.comm.replace(b"\xff\xfe", b"\\x")
        assert without_comm(columns(by_columns), second_offset) == without_comm(rows(by_rows), first_offset)
        assert kinds(by_rows) == ["descriptions", "rows", "rows", "end"]
        assert kinds(by_columns) == ["descriptions", "columns", "columns", "end"]

    def test_why_a_value_is_missing(self, server: Served) -> None:
        messages, _ = self.events(server, "ROWS")
        reasons = [
            value.unavailable
            for message in messages
            for event in message.rows.events
            for value in event.values
            if value.HasField("unavailable")
        ]
        nowhere = "the memory it points to could not be read"
        # the third is in a register, which always has it
        assert reasons == ["no way to %xmm0", nowhere, "", "no way to %xmm0"]

    def test_each_columns_message_is_complete_up_to_its_next_seq(self, server: Served) -> None:
        """So that a client that goes on from there misses nothing, though layouts come one behind the other."""
        ident = server.subscribe("app:text(arg0:str)", "app:*").subscription_id
        times = np.arange(20_000)
        server.fire(
            batch(times[::2].tolist(), strings(*[b"x" * 200] * 10_000), site_id=3),
            batch(times[1::2].tolist(), site_id=1),
        )
        server.unsubscribe(ident)
        following = 1
        for message in finished(server, ident, "COLUMNS"):
            if message.HasField("columns"):
                found = [row[0] for row in columns([message])]
                assert found == list(range(following, message.columns.next_seq))
                following = message.columns.next_seq
        assert following == 20_001

    @pytest.mark.parametrize("encoding", ["ROWS", "COLUMNS"])
    def test_long_strings_make_no_message_beyond_grpcs_limit(self, server: Served, encoding: str) -> None:
        ident = server.subscribe("app:text(arg0:str)", "app:number()").subscription_id
        server.fire(batch(range(3000), strings(*[b"x" * 4000] * 3000), site_id=3))
        server.unsubscribe(ident)
        messages = finished(server, ident, encoding)
        assert [row[0] for row in (rows(messages) or columns(messages))] == list(range(1, 3001))

    def test_rows_come_in_messages_of_some_hundred(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.fire(batch(range(2500), site_id=1))
        server.unsubscribe(ident)
        messages = finished(server, ident)
        assert [len(message.rows.events) for message in messages if message.HasField("rows")] == [1000, 1000, 500]


@pytest.mark.usefixtures("app")
class TestOrder:
    def test_sites_are_described_once_and_before_use(self, server: Served) -> None:
        ident = server.subscribe("app:text(arg1:hex, arg0:str)", "app:*").subscription_id
        server.fire(batch([1], site_id=1))
        call = server.stream(ident)
        (description,) = next(call).descriptions.probes
        assert (description.probe.name, description.probe.sites[0].site_id, list(description.captures)) == (
            "plain",
            1,
            [],
        )
        assert seqs([next(call)]) == [1]
        server.fire(batch([2, 3], site_id=1), batch([4], unsigned(1), strings(b""), site_id=3))
        (description,) = next(call).descriptions.probes
        assert description.probe.name == "text"
        assert [(each.index, each.is_string, each.is_hex) for each in description.captures] == [
            (1, False, True),
            (0, True, False),
        ]
        assert seqs([next(call)]) == [2, 3, 4]
        call.cancel()
        # another stream knows nothing yet
        server.unsubscribe(ident)
        messages = finished(server, ident, from_seq=1)
        assert [[each.probe.name for each in message.descriptions.probes] for message in messages] == [
            ["plain"],
            [],
            ["text"],
            [],
            [],
        ]

    def test_event_reaches_an_open_stream_at_once(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        call = server.stream(ident)
        server.wait_until_streaming()
        for number in range(1, 4):
            server.fire(batch([number], site_id=1))
            if number == 1:
                assert kinds([next(call)]) == ["descriptions"]
            assert seqs([next(call)]) == [number]
        call.cancel()

    def test_losses_are_told_once_with_their_stage(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.lose(LossStage.KERNEL_BUFFER, 3)
        server.lose(LossStage.DECODE, 1)
        call = server.stream(ident)
        losses = [next(call).loss, next(call).loss]
        assert {(loss.stage, loss.count, loss.total) for loss in losses} == {
            (pb.Loss.STAGE_KERNEL_BUFFER, 3, 3), (pb.Loss.STAGE_DECODE, 1, 1),
        }  # fmt: skip
        server.lose(LossStage.KERNEL_BUFFER, 2)
        loss = next(call).loss
        assert (loss.stage, loss.count, loss.total) == (pb.Loss.STAGE_KERNEL_BUFFER, 2, 5)
        server.unsubscribe(ident)
        (message,) = call
        account = message.end.account
        assert (account.lost_kernel_buffer, account.lost_decode, account.fired) == (5, 1, 6)

    def test_slow_client_is_told_what_made_room(self, server: Served) -> None:
        ident = server.subscribe(queue_bytes=10_000).subscription_id
        for number in range(20):
            server.fire(batch([number], site_id=1))
        server.unsubscribe(ident)
        loss, _, *events, end = finished(server, ident)
        assert loss.loss.stage == pb.Loss.STAGE_QUEUE
        account = end.end.account
        numbers = seqs(events)
        assert loss.loss.count == account.lost_queue == 20 - len(numbers) > 0
        assert numbers == list(range(account.lost_queue + 1, 21))
        assert (account.delivered, account.in_flight, account.fired) == (len(numbers), 0, 20)

    def test_events_that_the_engine_filters_are_counted_and_not_numbered(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.sink.filtered(1)
        server.fire(batch([2], pid=[12], site_id=1))
        server.sink.filtered(1)
        account = server.unsubscribe(ident)
        assert (account.filtered, account.in_flight, account.delivered, account.fired) == (2, 1, 0, 3)
        _, events, end = finished(server, ident)
        assert [row[:1] + row[2:3] for row in rows([events])] == [(1, 12)]
        assert (end.end.account.filtered, end.end.account.delivered) == (2, 1)


def streams_of(ident: str) -> list[SubscriptionStream]:
    """Return the streams of a subscription that anything still refers to."""
    gc.collect()
    streams = (each for each in gc.get_objects() if type(each) is SubscriptionStream)
    return [stream for stream in streams if stream.subscription.id == ident]


@pytest.mark.usefixtures("app")
class TestEnds:
    def test_unsubscribe_delivers_what_had_fired_to_the_open_stream(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        call = server.stream(ident)
        server.wait_until_streaming()
        server.engine.last_events = [batch(range(3000), site_id=1)]
        account = server.unsubscribe(ident)
        assert account.fired == 3000
        messages = list(call)
        assert seqs(messages) == list(range(1, 3001))
        assert messages[-1].end.reason == pb.End.REASON_UNSUBSCRIBED
        final = messages[-1].end.account
        assert (final.delivered, final.in_flight, final.fired, final.sites) == (3000, 0, 3000, 3)
        assert server.engine.armed == {}
        wait_for(lambda: not streams_of(ident), "the stream to be forgotten")

    def test_end_comes_when_the_last_that_fired_is_there_and_nobody_else_waits(self, server: Served) -> None:
        """A hit that the kernel holds up is delivered to whose it is, however long that takes."""
        ident = server.subscribe().subscription_id
        call = server.stream(ident)
        server.wait_until_streaming()
        sink = server.sink
        server.engine.last_read = Future()
        unsubscribing = server.stub.Unsubscribe.future(
            pb.UnsubscribeRequest(subscription_id=ident), timeout=PATIENCE_SECONDS
        )
        wait_for(lambda: not server.held(), "it to be disarmed")
        assert server.subscribe().subscription_id != ident
        sink.fired(2)
        sink.deliver(batch([1], site_id=1))
        assert not unsubscribing.done()
        sink.deliver(batch([2], site_id=1))
        server.engine.last_read.set_result(None)
        assert unsubscribing.result().account.fired == 2
        messages = list(call)
        assert seqs(messages) == [1, 2]
        assert messages[-1].end.reason == pb.End.REASON_UNSUBSCRIBED
        final = messages[-1].end.account
        assert (final.delivered, final.in_flight, final.fired) == (2, 0, 2)

    def test_stream_may_begin_after_the_end_again_and_again(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.fire(batch([1], site_id=1))
        server.unsubscribe(ident)
        assert kinds(finished(server, ident)) == ["descriptions", "rows", "end"]
        assert kinds(finished(server, ident)) == ["end"]
        assert seqs(finished(server, ident, from_seq=1)) == [1]

    def test_lease_runs_out_without_a_stream(self, server: Served) -> None:
        server.engine.last_events = [batch([1], site_id=1)]
        ident = server.subscribe(lease_seconds=1).subscription_id
        wait_for(lambda: not server.held(), "the lease to run out")
        server.settle()
        assert server.engine.sinks == {}
        _, events, end = finished(server, ident)
        assert seqs([events]) == [1]
        assert end.end.reason == pb.End.REASON_LEASE_EXPIRED

    def test_stream_holds_the_lease(self, server: Served) -> None:
        ident = server.subscribe(lease_seconds=60).subscription_id
        call = server.stream(ident)
        server.wait_until_streaming()
        ((subscription, is_streaming, lease_left_seconds),) = server.subscriptions.all()
        assert (is_streaming, lease_left_seconds) == (True, 0)
        # from here on a second is enough; to begin the stream may have taken longer
        subscription.spec = replace(subscription.spec, lease_seconds=1)
        call.cancel()
        wait_for(lambda: not server.held(), "the lease to run out")
        assert finished(server, ident)[-1].end.reason == pb.End.REASON_LEASE_EXPIRED
        code, _ = ended_with(server.stream("0" * 16))
        assert code is grpc.StatusCode.NOT_FOUND

    def test_server_that_stops_says_so(self, server: Served) -> None:
        calls = [server.stream(server.subscribe().subscription_id) for _ in range(3)]
        wait_for(lambda: all(each.streaming for each in server.held()), "the streams")
        # one that does not end cleanly keeps the others from nothing
        server.engine.failures["close"] = TracefsRejectedError("instances", "rmdir", 16, "")
        server.close_all()
        assert [[message.end.reason for message in call] for call in calls] == [[pb.End.REASON_SERVER_STOPPING]] * 3


@pytest.mark.usefixtures("app")
class TestComingBack:
    def test_from_a_number(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.fire(batch([1, 2, 3, 4], site_id=1))
        call = server.stream(ident)
        assert seqs([next(call), next(call)]) == [1, 2, 3, 4]
        call.cancel()
        server.wait_until_streaming(False)
        server.fire(batch([5, 6], site_id=1))
        server.unsubscribe(ident)
        assert seqs(finished(server, ident, from_seq=3)) == [3, 4, 5, 6]
        assert seqs(finished(server, ident, "COLUMNS", from_seq=3)) == []
        assert [row[0] for row in columns(finished(server, ident, "COLUMNS", from_seq=6))] == [6]
        account = finished(server, ident)[-1].end.account
        assert (account.delivered, account.fired) == (6, 6)

    def test_without_a_number_from_what_no_stream_had(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        server.fire(batch([1, 2], site_id=1))
        call = server.stream(ident)
        assert seqs([next(call), next(call)]) == [1, 2]
        # the message behind is asked for, so the ones before were handed out
        server.lose(LossStage.DECODE, 1)
        assert kinds([next(call)]) == ["loss"]
        call.cancel()
        # a call that was cancelled and is still there might be given the next ones
        server.wait_until_streaming(False)
        server.fire(batch([3], site_id=1))
        server.unsubscribe(ident)
        assert seqs(finished(server, ident)) == [3]

    def test_second_stream_takes_over(self, server: Served) -> None:
        ident = server.subscribe().subscription_id
        first = server.stream(ident)
        server.wait_until_streaming()
        server.fire(batch([1], site_id=1))
        assert seqs([next(first), next(first)]) == [1]
        second = server.stream(ident)
        assert ended_with(first) == (grpc.StatusCode.ABORTED, "another stream of this subscription took over")
        server.fire(batch([2], site_id=1))
        assert seqs([next(second), next(second)]) == [2]
        assert [each.streaming for each in server.held()] == [True]
        server.unsubscribe(ident)
        assert kinds(second) == ["end"]

    def test_client_that_goes_leaves_nothing(self, server: Served) -> None:
        """Wherever it is when it goes: waiting for news, or held up by its own slowness."""
        ident = server.subscribe(lease_seconds=60).subscription_id
        ((subscription, *_),) = server.subscriptions.all()
        for encoding in ("ROWS", "COLUMNS"):
            call = server.stream(ident, encoding)
            server.wait_until_streaming()
            call.cancel()
            server.wait_until_streaming(False)
        server.fire(batch(range(300_000), site_id=1))
        call = server.stream(ident)
        server.wait_until_streaming()
        assert kinds([next(call)]) == ["descriptions"]
        call.cancel()
        server.wait_until_streaming(False)
        wait_for(lambda: not subscription.is_read, "the waiter to be forgotten")
        wait_for(lambda: not streams_of(ident), "the stream to be forgotten")
        assert server.held()[0].lease_left_ms > 0

    def test_client_that_goes_before_its_stream_began_does_not_hold_the_lease(self, server: Served) -> None:
        ident = server.subscribe(lease_seconds=60).subscription_id
        with server.control_held():
            asked = server.control.asked
            call = server.stream(ident)
            wait_for(lambda: server.control.asked == asked + 1, "the stream to be asked for")
            call.cancel()
            wait_for(lambda: server.control.asked == asked + 2, "the cancellation")
        server.wait_until_streaming(False)
        assert server.held()[0].lease_left_ms > 0


class TestObjectsThatComeAndGo:
    def statuses(self, call: Any) -> list[tuple[str, int]]:
        return [(status.name, status.state) for status in next(call).status.sites]

    def test_many_statuses_come_in_messages_that_clients_take(self, server: Served, pids: list[int]) -> None:
        call = server.stream(server.subscribe("app:b*").subscription_id)
        path = "/" + "d" * 4000
        server.map(pids[0], server.file_object(*(site(f"b{number}", 1 + number) for number in range(1000)), path=path))
        told: list[str] = []
        while len(told) < 1000:
            message = next(call)
            assert message.ByteSize() < 1 << 20
            told += [status.name for status in message.status.sites]
        assert told == [f"b{number}" for number in range(1000)]
        call.cancel()

    def test_later_object_is_armed_and_told(self, server: Served, pids: list[int]) -> None:
        call = server.stream(server.subscribe("app:b", "app:a").subscription_id)
        server.map(pids[0], server.file_object(site("a"), site("b", 2), site("c", 3)))
        assert self.statuses(call) == [("a", ARMED), ("b", ARMED)]
        (target,) = server.engine.armed.values()
        assert [wanted.site.name for wanted in target.sites] == ["a", "b"]
        server.map(pids[1], server.file_object(site("d"), name="other"), "other")
        assert len(server.engine.armed) == 1
        call.cancel()

    def test_file_of_the_host_stays_armed(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        server.subscribe()
        server.unmap(pids[0], found)
        server.in_control(server.subscriptions.housekeeping.clean_up)
        (target,) = server.engine.armed.values()
        assert not target.is_ephemeral
        server.map(pids[1], found)
        assert server.engine.calls.count("arm") == 1

    def test_deleted_file_is_disarmed_when_nobody_maps_it(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        call = server.stream(server.subscribe().subscription_id)
        server.unmap(pids[0], found)
        (server.folder / "app").unlink()
        server.in_control(server.subscriptions.housekeeping.clean_up)
        assert self.statuses(call) == [("a", DISARMED)]
        assert server.engine.armed == {}
        call.cancel()

    def test_path_that_is_unknown_for_a_moment_disarms_nothing(self, tmp_path: Path, pids: list[int]) -> None:
        class BusyFilesystems(Filesystems):
            is_busy = False

            @contextmanager
            def held(self, path: str) -> Iterator[int]:
                if self.is_busy:
                    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", path)
                with super().held(path) as descriptor:
                    yield descriptor

        now = 0.0
        filesystems = BusyFilesystems()
        with served(tmp_path, clock=lambda: now, filesystems=filesystems) as server:
            found = server.file_object(site("a"))
            server.map(pids[0], found)
            call = server.stream(server.subscribe().subscription_id)
            for _ in range(2):
                filesystems.is_busy = True
                server.unmap(pids[0], found)
                server.in_control(server.subscriptions.housekeeping.clean_up)
                filesystems.is_busy = False
                now += 10
                server.map(pids[0], found)
            assert len(server.engine.armed) == server.engine.calls.count("arm") == 1
            # one that was deleted stays unknown
            filesystems.is_busy = True
            server.unmap(pids[0], found)
            now += 1
            server.in_control(server.subscriptions.housekeeping.clean_up)
            assert self.statuses(call) == [("a", DISARMED)]
            assert server.engine.armed == {}
            call.cancel()

    def test_memfd_is_armed_as_passing_and_disarmed_with_its_last_process(
        self, server: Served, pids: list[int]
    ) -> None:
        found = server.file_object(site("a"), site("b", 2), path="/memfd:jit")
        server.engine.refuse = {"b": "no"}
        server.map(pids[0], found)
        call = server.stream(server.subscribe().subscription_id)
        (target,) = server.engine.armed.values()
        assert target.is_ephemeral
        server.map(pids[1], found)
        server.unmap(pids[0], found)
        assert server.engine.armed
        server.unmap(pids[1], found)
        assert server.engine.armed == {}
        # what was refused was never armed, so it is not disarmed either
        assert self.statuses(call) == [("a", DISARMED)]
        server.map(pids[0], found)
        server.engine.refuse = {}
        assert [name for name, _ in self.statuses(call)] == ["a", "b"]
        assert server.held()[0].account.sites == 1
        call.cancel()

    def test_scope_counts_for_what_stays_armed(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), path="/memfd:jit")
        server.map(pids[0], found)
        server.map(pids[1], found)
        server.subscribe(scope=pb.Scope(pids=[pids[0]]))
        assert server.engine.armed
        server.unmap(pids[0], found)
        assert server.engine.armed == {}

    def test_site_keeps_its_number_when_its_object_comes_back(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), path="/memfd:jit")
        server.map(pids[0], found)
        server.subscribe()
        first = [[wanted.site_id for wanted in target.sites] for target in server.engine.armed.values()]
        server.unmap(pids[0], found)
        server.map(pids[0], found)
        assert [[wanted.site_id for wanted in target.sites] for target in server.engine.armed.values()] == first

    def test_object_that_cannot_be_reached_is_left_out(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"))
        (server.folder / "app").unlink()
        server.map(pids[0], found)
        assert list(server.subscribe().sites) == []
        assert "arm" not in server.engine.calls

    def test_engine_that_cannot_disarm_does_not_stop_the_rest(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), path="/memfd:jit")
        server.map(pids[0], found)
        call = server.stream(server.subscribe().subscription_id)
        server.engine.failures["disarm"] = TracefsRejectedError("instances", "rmdir", 16, "")
        server.unmap(pids[0], found)
        assert self.statuses(call) == [("a", DISARMED)]
        server.map(pids[0], server.file_object(site("b"), name="next"), "next")
        assert self.statuses(call) == [("b", ARMED)]
        call.cancel()


def test_stream_that_was_taken_over_meanwhile_does_not_count_what_it_sent() -> None:
    """Its successor begins with the same events, and is the one to say whether they were delivered."""
    spec = SubscriptionSpec((ClauseSpec((parse("app:*"),)),), Scope(), 30, 1 << 20, 64)
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None)
    subscription.clauses[0].sink.deliver(batch([1, 2]))

    async def at_once(steps: Generator[None, None, T]) -> T:
        return finish(steps)

    turns = StreamTurns(at_once, at_once)
    encoding, wall_clock = pb.StreamRequest.ENCODING_ROWS, subscription.wall_clock
    reader = EventReader(subscription.clauses[0], encoding, None, turns, wall_clock=wall_clock)
    stream = SubscriptionStream(subscription, [reader], turns)

    async def read() -> None:
        messages = stream.messages()
        assert seqs([pb.StreamResponse.FromString(await anext(messages))]) == [1, 2]
        stream.stop(TakenOverError())
        with pytest.raises(TakenOverError):
            await anext(messages)

    asyncio.run(read())
    assert (subscription.account().in_flight, subscription.account().delivered) == (2, 0)
    assert not subscription.is_read


def test_subscription_that_ends_is_known_all_the_while(server: Served) -> None:
    """A stream asks for it from another thread."""
    ident = server.subscribe("app:number()").subscription_id
    seen: list[bool] = []
    server.engine.last_events = [batch([1], site_id=1)]
    subscription = server.subscriptions.get(ident)
    # called when the engine delivers the last events, in its thread, and when all is over, in the control thread
    subscription.wake_with(lambda: seen.append(server.subscriptions.get(ident) is subscription))
    server.unsubscribe(ident)
    assert seen == [True, True]
