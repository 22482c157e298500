"""Whose events are left out since they are the daemon's own clients."""

from __future__ import annotations

import threading

import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.sessions.own_clients import ClientFilter, ConnectedClients
from stapsdtd.sessions.subscription import Subscription, SubscriptionSpec
from stapsdtd.subscribe_options import Scope
from tests.unit.samples import block

EVERYBODY = Scope()


def connected(*pids: int) -> ConnectedClients:
    clients = ConnectedClients()
    for pid in pids:
        clients.joined(pid)
    return clients


def delivered(spec: SubscriptionSpec, clients: ConnectedClients) -> tuple[list[int], int]:
    """The processes whose events come, of one of each of 5, 6, 7 and the command 8, and how many are filtered."""
    subscription = Subscription("id", 1, spec, 999, lambda *_: None, clients=clients)
    comms = [b"app", b"app", b"app", b"stapsdt"]
    subscription.deliver([block([1, 2, 3, 4], pid=[5, 6, 7, 8], comm=comms)])
    entry = subscription.log.read(None)
    came = [] if entry is None else [pid for each in entry.blocks for pid in each.block.pid.tolist()]
    return came, subscription.account().filtered


def spec(scope: Scope = EVERYBODY, selector: str = "app:*", subscriber_pid: int | None = None) -> SubscriptionSpec:
    return SubscriptionSpec((parse(selector),), scope, 30, 1 << 20, 64, subscriber_pid=subscriber_pid)


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


def test_blocks_without_clients_are_not_copied() -> None:
    blocks = [block([1], pid=[5]), block([2, 3], pid=[6, 5]), block([4], pid=[6])]
    first, second = ClientFilter(connected(6), ()).rest(blocks)
    assert first is blocks[0]
    assert second.pid.tolist() == [5]


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
