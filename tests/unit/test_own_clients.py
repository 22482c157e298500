"""Whose events are left out since they are the daemon's own clients."""

from __future__ import annotations

import itertools
import threading

import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.sessions.own_clients import ClientFilter, ConnectedClients
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import batch

EVERYBODY = Scope()


def connected(*pids: int) -> ConnectedClients:
    clients = ConnectedClients()
    for pid in pids:
        clients.joined(pid)
    return clients


def delivered(spec: SubscriptionSpec, clients: ConnectedClients) -> tuple[list[int], int]:
    """The processes whose events come, of one of each of 5, 6, 7 and the command 8, and how many are filtered."""
    subscription = Subscription("id", itertools.count(1), spec, 999, lambda *_: None, clients=clients)
    comms = [b"app", b"app", b"app", b"stapsdt"]
    subscription.clauses[0].sink.deliver(batch([1, 2, 3, 4], pid=[5, 6, 7, 8], comm=comms))
    entry = subscription.clauses[0].log.read(None)
    came: list[int] = [] if entry is None else entry.batch.pid.tolist()
    return came, subscription.account().filtered


def spec(scope: Scope = EVERYBODY, selector: str = "app:*", subscriber_pid: int | None = None) -> SubscriptionSpec:
    return SubscriptionSpec((ClauseSpec((parse(selector),)),), scope, 30, 1 << 20, 64, subscriber_pid=subscriber_pid)


@pytest.mark.parametrize(
    ("wanted", "came"),
    [
        (spec(), [5]),
        (spec(subscriber_pid=6), [5, 6]),
        (spec(subscriber_pid=8), [5, 8]),
        (spec(selector="app7:::*"), [5, 7]),
        (spec(Scope(include_clients=True)), [5, 6, 7, 8]),
        (spec(Scope(pids=frozenset({6}))), [5, 6, 7, 8]),
        (spec(Scope(execnames=("stapsdt",))), [5, 6, 7, 8]),
        (spec(Scope(uids=(0,))), [5]),
    ],
    ids=["default", "own", "own-command", "suffix", "asked-for", "pid", "execname", "uid"],
)
def test_clients_and_the_command_leave_no_events_unless_they_are_named(
    wanted: SubscriptionSpec, came: list[int]
) -> None:
    assert delivered(wanted, connected(6, 7)) == (came, 4 - len(came))


def test_client_counts_until_its_last_connection_is_closed() -> None:
    clients = connected(6, 6, 7)
    clients.left(6)
    assert clients.pids.tolist() == [6, 7]
    clients.left(6)
    assert clients.pids.tolist() == [7]
    assert delivered(spec(), clients) == ([5, 6], 2)


def test_batch_without_clients_is_not_copied() -> None:
    client_filter = ClientFilter(connected(6), ())
    without = batch([1], pid=[5])
    assert client_filter.rest(without) is without
    assert client_filter.rest(batch([2, 3], pid=[6, 5])).pid.tolist() == [5]
    assert len(client_filter.rest(batch([4], pid=[6]))) == 0


def test_only_the_commands_whole_name_is_the_commands() -> None:
    comms = [b"stapsdt", b"stapsdtd", b"stapsdt-longest", b"stapsd", b"xstapsdt", b""]
    kept = ClientFilter(connected(), ()).rest(batch(range(6), comm=comms))
    assert kept.comm.tolist() == comms[1:]


def test_clients_that_come_and_go_are_followed() -> None:
    clients = connected()
    client_filter = ClientFilter(clients, [7])
    events = batch([1, 2, 3], pid=[5, 6, 7])
    assert client_filter.rest(events).pid.tolist() == [5, 6, 7]
    clients.joined(6)
    clients.joined(7)
    assert client_filter.rest(events).pid.tolist() == [5, 7]
    clients.left(6)
    assert client_filter.rest(events).pid.tolist() == [5, 6, 7]


def test_connections_come_and_go_in_several_threads() -> None:
    clients = ConnectedClients()

    def come_and_go(pid: int) -> None:
        for _ in range(300):
            clients.joined(pid)
            clients.left(pid)

    threads = [threading.Thread(target=come_and_go, args=[pid % 2]) for pid in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients.pids.tolist() == []
