"""Who is at the other end of a connection, and clients that stall, flood and lie, beside one that means well.

The latter's calls are what is asserted: that they are answered meanwhile, not how fast.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import grpc
import pytest

from stapsdtd.api import subscription_messages
from stapsdtd.api.half import Half
from stapsdtd.api.listeners import open_listeners
from stapsdtd.api.peers import ADDRESS_PREFIX, PeerTable
from stapsdtd.api.relay import Relay
from stapsdtd.api.rights import Peer
from stapsdtd.api.server import Server
from stapsdtd.client import Client, ServerUnavailableError
from stapsdtd.config import OPERATOR, USER, Listener, Quotas, Role
from stapsdtd.errors import AccessDeniedError
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.runtime.line_limiter import LineLimiter
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.subscription import EndReason
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api import http2
from tests.api.served import LONG_TIMEOUTS, PATIENCE_SECONDS, Served, served
from tests.support import descriptors, wait_for
from tests.unit.samples import batch, site
from tests.users import ANNE, BERT, User, public_folder

BOUNDED = Role("bounded", quotas=Quotas(max_connections=3))
ROLES = (OPERATOR, USER, BOUNDED)
MOST_CONNECTIONS = 24
BUFFER_BYTES = 120_000
"""The most that the relay reads at once."""
EVENTS = batch(range(10_000))
CONNECT = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print('there', flush=True); input()"
)

LEAVE_IT = "import os, time; heir = os.fork(); heir and (print(heir, flush=True), os._exit(0)); time.sleep(1000)"


@pytest.fixture
def server() -> Iterator[Served]:
    """Who comes by bounded.sock has the role `bounded`, whoever that is."""
    with public_folder() as folder:
        bounded = Listener(f"unix:{folder / 'bounded.sock'}", role=BOUNDED.name)
        with served(folder, roles=ROLES, listeners=[bounded], max_connections=MOST_CONNECTIONS) as started:
            started.held()
            yield started


@contextmanager
def connected(server: Served, said: bytes = b"", name: str = "served.sock") -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(server.folder / name))
        if said:
            connection.sendall(said)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closed it; what it says until then is read."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def wait_for_connections(server: Served, count: int) -> None:
    """The stub's own is one of them."""
    wait_for(lambda: server.relay.connections == count, f"{count} connections")
    wait_for(lambda: len(server.peers.known()) == count, f"{count} names")


# who is there


@contextmanager
def connecting_as(server: Served, user: User) -> Iterator[subprocess.Popen[str]]:
    command = user.command("/usr/bin/python3", "-c", CONNECT, server.socket)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "there\n"
            yield child
        finally:
            child.kill()


def only_peer_of(server: Served, user: User) -> Peer:
    (found,) = wait_for(
        lambda: [peer for peer in server.peers.known().values() if peer.uid == user.uid],
        f"user {user.uid}'s connection",
    )
    return found


def test_peer_is_who_the_kernel_says(server: Served) -> None:
    user = User(ANNE.uid, (64200, 64201))
    with connecting_as(server, user) as child:
        assert only_peer_of(server, user) == Peer(
            f"unix:{server.socket}", user.uid, frozenset({user.uid, 64200, 64201}), child.pid
        )
    wait_for_connections(server, 1)


def test_who_is_in_more_groups_than_are_told_is_in_none_but_his_own(server: Served) -> None:
    user = User(ANNE.uid, tuple(range(64200, 64500)))
    with connecting_as(server, user):
        assert only_peer_of(server, user).groups == {user.uid}


def test_processes_that_are_connected_leave_no_events_in_others_subscriptions(server: Served) -> None:
    ident = server.subscribe("app:*").subscription_id
    with connecting_as(server, ANNE) as child:
        only_peer_of(server, ANNE)
        server.fire(batch([1, 2, 3], pid=[child.pid, 10, os.getpid()]))
        child.kill()
        wait_for_connections(server, 1)
        server.fire(batch([4], pid=[child.pid]))
    account = server.unsubscribe(ident)
    assert (account.in_flight, account.filtered, account.fired) == (3, 1, 4)


def test_number_of_a_process_that_connected_and_ended_is_anybodys(server: Served) -> None:
    """Whoever gets it next would leave no events, for as long as another process holds the connection."""
    ident = server.subscribe("app:*").subscription_id
    command = ANNE.command("/usr/bin/python3", "-c", CONNECT.replace("input()", f"input(); {LEAVE_IT}"), server.socket)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        only_peer_of(server, ANNE)
        server.fire(batch([1], pid=[child.pid]))
        assert child.stdin is not None
        print(file=child.stdin, flush=True)
        heir = int(child.stdout.readline())
        assert child.wait(PATIENCE_SECONDS) == 0
        wait_for(lambda: child.pid not in server.connected.pids.tolist(), "it to be gone")
        assert len(server.peers.known()) == 2
        server.fire(batch([2], pid=[child.pid]))
        os.kill(heir, signal.SIGKILL)
    wait_for_connections(server, 1)
    account = server.unsubscribe(ident)
    assert (account.in_flight, account.filtered, account.fired) == (1, 1, 2)


def test_processes_that_are_connected_are_traced_where_they_are_named(server: Served) -> None:
    with connecting_as(server, ANNE) as child:
        only_peer_of(server, ANNE)
        for scope in (pb.Scope(pids=[child.pid]), pb.Scope(include_clients=True)):
            ident = server.subscribe("app:*", scope=scope).subscription_id
            (held,) = server.held()
            assert held.scope == scope
            server.fire(batch([1], pid=[child.pid]))
            assert server.unsubscribe(ident).in_flight == 1


def test_two_users_are_two_clients(server: Served) -> None:
    with connecting_as(server, ANNE), connecting_as(server, BERT):
        wait_for(lambda: server.relay.clients == 3, "three clients")


@pytest.mark.usefixtures("server")
def test_the_inner_socket_has_no_path() -> None:
    links = {link for _, link in open_files()}
    listening = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "grpc.sock" in line]
    own = [path for *_, inode, path in listening if f"socket:[{inode}]" in links]
    assert own
    assert not os.path.exists(own[0])
    way_in = f"/proc/{os.getpid()}/fd/{inner_socket()}"
    attempt = f"import socket; socket.socket(socket.AF_UNIX).connect({way_in!r})"
    tried = subprocess.run(ANNE.command("/usr/bin/python3", "-c", attempt), capture_output=True, text=True, check=False)
    assert "PermissionError" in tried.stderr


def open_files() -> list[tuple[int, str]]:
    """Return the descriptors of this process, and what they lead to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def inner_socket() -> int:
    """Where the relay has the gRPC server's socket open, whose path is gone."""
    (descriptor,) = [descriptor for descriptor, link in open_files() if link.endswith("/grpc.sock (deleted)")]
    return descriptor


def test_a_name_of_the_relays_pattern_makes_nobody_somebody(server: Served) -> None:
    """Not even of somebody who got to the inner socket."""
    with ExitStack() as stack:
        forger = stack.enter_context(socket.socket(socket.AF_UNIX))
        forger.bind(f"\0{ADDRESS_PREFIX}{'0' * 32}")
        forger.settimeout(PATIENCE_SECONDS)
        forger.connect(f"/proc/self/fd/{inner_socket()}")
        forger.sendall(http2.greeting() + http2.request("ListSubscriptions"))
        said = b""
        while b"unknown connection" not in said:
            more = forger.recv(1 << 16)
            assert more
            said += more
        assert len(server.peers.known()) == 1


def test_name_of_a_closed_connection_is_nobodys(server: Served) -> None:
    with connected(server, http2.greeting(), "bounded.sock"):
        wait_for_connections(server, 2)
        (name,) = [name for name, peer in server.peers.known().items() if peer.listener_role == BOUNDED.name]
        assert server.peers.find(f"unix-abstract:{name}").listener_role == BOUNDED.name
    wait_for_connections(server, 1)
    with pytest.raises(AccessDeniedError):
        server.peers.find(f"unix-abstract:{name}")


def test_names_cannot_be_guessed() -> None:
    table = PeerTable(ConnectedClients())
    names = {table.add(Peer("unix:x")) for _ in range(100)}
    assert len(names) == 100
    assert all(len(bytes.fromhex(name.removeprefix(ADDRESS_PREFIX))) == 16 for name in names)


# too many


def test_no_more_connections_than_the_role_allows(server: Served) -> None:
    with ExitStack() as stack:
        flood = [stack.enter_context(connected(server, name="bounded.sock")) for _ in range(60)]
        # the stub's connection is the same user's
        wait_for(lambda: sum(map(is_closed, flood)) == 60 - 2, "all but two to be closed")
        assert server.held() == []
        with (
            pytest.raises(ServerUnavailableError, match="too many connections"),
            Client(f"unix:{server.folder / 'bounded.sock'}") as one_more,
        ):
            one_more.info()
        assert server.gate.refusals["connection"] >= 58
    wait_for_connections(server, 1)


def test_no_more_connections_than_the_server_allows(server: Served) -> None:
    most = MOST_CONNECTIONS - 1
    with ExitStack() as stack:
        flood = [stack.enter_context(connected(server)) for _ in range(100)]
        wait_for(lambda: sum(map(is_closed, flood)) == 100 - most, "as many to stay as there may be")
        assert server.held() == []
        assert server.relay.connections == MOST_CONNECTIONS
    wait_for_connections(server, 1)
    with connected(server):
        wait_for_connections(server, 2)


def test_many_bounded_users_leave_room_for_who_has_no_bound(server: Served) -> None:
    room = MOST_CONNECTIONS - MOST_CONNECTIONS // 8
    with ExitStack() as stack:
        users = [User(65000 + number) for number in range(MOST_CONNECTIONS)]
        children = [stack.enter_context(connecting_as(server, user)) for user in users]
        assert len(children) > room
        wait_for(lambda: server.relay.connections == room, "no more to be let in")
        with Client(f"unix:{server.folder / '.' / 'served.sock'}") as operator:
            access = operator.info().access
            assert access is not None
            assert access.role == "operator"


def test_descriptors_go_back_to_where_they_were(server: Served) -> None:
    before = descriptors(os.getpid())
    for _ in range(5):
        with ExitStack() as stack:
            for said in (b"", b"junk" * 10, http2.PREFACE, http2.greeting() + http2.request("ListProbes")):
                for _ in range(4):
                    stack.enter_context(connected(server, said))
            wait_for(lambda: server.relay.connections >= 13, "the connections")
        wait_for_connections(server, 1)
    wait_for(lambda: descriptors(os.getpid()) <= before, f"{before} descriptors again")


@contextmanager
def descriptors_limited_to(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_lower_descriptors() -> Iterator[None]:
    """What is opened inside gets a number that is higher than all others."""
    gc.collect()
    with ExitStack() as stack:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (filling := os.dup(0)) <= highest:
            stack.callback(os.close, filling)
        os.close(filling)
        yield


def test_connections_leave_descriptors_for_the_rest(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with no_lower_descriptors(), descriptors_limited_to(descriptors(os.getpid()) + 6), connected(server) as refused:
        wait_for(lambda: is_closed(refused), "the connection to be refused")
        assert server.held() == []
    assert "short of file descriptors" in caplog.text
    with connected(server):
        wait_for_connections(server, 2)


def test_without_descriptors_who_waits_is_let_in_later(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as waiting:
        with descriptors_limited_to(3):
            waiting.connect(str(server.socket))
            wait_for(lambda: "Too many open files" in caplog.text, "accept to fail")
        wait_for_connections(server, 2)
        assert not is_closed(waiting)
        assert server.held() == []
    # once for each attempt, not for each connection that waits
    assert caplog.text.count("Too many open files") < 20


def test_refusals_do_not_fill_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        flood = [stack.enter_context(connected(server, name="bounded.sock")) for _ in range(300)]
        wait_for(lambda: sum(map(is_closed, flood)) == 298, "them to be refused")
    told = [record for record in caplog.records if "connect refused" in record.message]
    # further ones are counted alone
    assert server.gate.refusals["connection"] == 298
    assert 0 < len(told) <= 298
    assert sum(map(LineLimiter().admits, told)) == 1


# nonsense, and slowly


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(100_000),
        http2.PREFACE + b"\xff" * 1000,
        http2.greeting() + http2.frame(http2.HEADERS, b"\xff" * 1000, http2.END_HEADERS, 1),
    ],
    ids=["http1", "zeros", "no-frames", "no-hpack"],
)
def test_bytes_that_are_no_http2_end_their_connection_alone(server: Served, said: bytes) -> None:
    with connected(server) as connection:
        with suppress(ConnectionError):
            connection.sendall(said)
        wait_for(lambda: is_closed(connection), "the server to close")
    wait_for_connections(server, 1)
    assert server.held() == []


def test_half_a_request_keeps_nobody_waiting(server: Served) -> None:
    """Slow-loris: as much as one may have, each a byte further from time to time."""
    said = http2.greeting() + http2.request("ListProbes")[:-1]
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(server, said[:1])) for _ in range(MOST_CONNECTIONS - 1)]
        for place in range(1, len(said)):
            for connection in slow:
                connection.sendall(said[place : place + 1])
            if place % 20 == 0:
                assert server.held() == []
        assert not any(map(is_closed, slow))
        assert server.held() == []


def refused_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(vars(record)["fields"]["reason"]) for record in caplog.records if record.message == "connect refused"]


PIECES = http2.greeting() + http2.frame(http2.HEADERS, http2.headers("ListProbes"), http2.END_HEADERS, 1)
GREETING_BYTES = len(http2.PREFACE) + len(http2.frame(http2.SETTINGS, bytes(6)))


@pytest.mark.parametrize("said", [0, 1, len(http2.PREFACE), GREETING_BYTES - 1])
def test_who_does_not_greet_in_time_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: int
) -> None:
    timeouts = replace(LONG_TIMEOUTS, greeting_seconds=0.5)
    with served(tmp_path, timeouts=timeouts) as server:
        server.held()
        with connected(server, PIECES[:said]) as slow, connected(server, PIECES[:GREETING_BYTES]) as polite:
            wait_for(lambda: is_closed(slow), "it to be given up")
            wait_for_connections(server, 2)
            assert not is_closed(polite)
            assert server.held() == []
        assert server.gate.refusals["connection"] == 1
    assert refused_in(caplog) == ["timed out after 0.5 s waiting for the HTTP/2 preface and settings"]


@pytest.mark.parametrize("said", [GREETING_BYTES, len(PIECES) - 1])
def test_who_never_asks_anything_is_disconnected(tmp_path: Path, caplog: pytest.LogCaptureFixture, said: int) -> None:
    with served(tmp_path, timeouts=replace(LONG_TIMEOUTS, request_seconds=0.5)) as server:
        server.held()
        asked = http2.greeting() + http2.request("ListProbes")
        with connected(server, PIECES[:said]) as slow, connected(server, asked) as asking:
            wait_for(lambda: is_closed(slow), "it to be given up")
            wait_for_connections(server, 2)
            assert not is_closed(asking)
            assert server.held() == []
        assert server.gate.refusals["connection"] == 1
    assert refused_in(caplog) == ["timed out after 0.5 s waiting for a first request"]


@pytest.mark.parametrize("asked", [b"", http2.request("ListSubscriptions")], ids=["first", "later"])
def test_request_that_does_not_end_ends_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: bytes
) -> None:
    """The server of gRPC waits for its last byte for ever, and takes a connection with such a call for busy."""
    body = struct.pack(">BI", 0, 1000) + bytes(10)
    begun = http2.frame(http2.HEADERS, http2.headers("Subscribe"), http2.END_HEADERS, 99)
    begun += http2.frame(http2.DATA, body, 0, 99)
    with served(tmp_path, timeouts=replace(LONG_TIMEOUTS, request_seconds=0.5), idle_seconds=600) as server:
        ident = server.subscribe("app:*").subscription_id
        stream = server.stream(ident)
        server.wait_until_streaming()
        with connected(server, http2.greeting() + asked + begun) as slow:
            wait_for(lambda: is_closed(slow), "it to be given up")
        wait_for_connections(server, 1)
        assert server.gate.refusals["connection"] == 1
        # whose request is over may have events for as long as it likes
        server.unsubscribe(ident)
        assert [message.WhichOneof("payload") for message in stream] == ["end"]
    assert refused_in(caplog) == ["timed out after 0.5 s waiting for the end of a request"]


def test_who_asked_once_and_is_idle_since_is_told_to_go(tmp_path: Path) -> None:
    with served(tmp_path, idle_seconds=0.5) as server:
        ident = server.subscribe("app:*").subscription_id
        stream = server.stream(ident)
        server.wait_until_streaming()
        with connected(server, http2.greeting() + http2.request("ListSubscriptions")) as idle:
            kinds = [kind for kind, _, _ in http2.frames(idle)]
        assert http2.GOAWAY in kinds
        wait_for_connections(server, 1)
        # whose stream is open is not idle, and gRPC's own clients come back without a word
        server.unsubscribe(ident)
        assert [message.WhichOneof("payload") for message in stream] == ["end"]
        wait_for(lambda: server.relay.connections == 0, "the stub's connection to be idle")
        assert server.held() == []


def test_request_of_100_megabytes(server: Served) -> None:
    beginning = http2.frame(http2.HEADERS, http2.headers("ListProbes"), http2.END_HEADERS, 1)
    prefix = struct.pack(">BI", 0, 100 << 20)
    chunk = http2.frame(http2.DATA, bytes(16_000), stream=1)
    with connected(server, http2.greeting() + beginning + http2.frame(http2.DATA, prefix, stream=1)) as connection:
        connection.setblocking(False)
        sent = 0
        try:
            while sent < 100 << 20:
                sent += connection.send(chunk)
        except (BlockingIOError, ConnectionError):
            pass
        assert server.held() == []
        assert sent < 20 << 20, "nobody holds the server from reading it all"
    wait_for_connections(server, 1)
    with pytest.raises(grpc.RpcError, match="larger than max"):
        server.stub.Subscribe(pb.SubscribeRequest(selectors=["x" * (2 << 20)]), timeout=PATIENCE_SECONDS)
    assert server.held() == []


def test_ten_thousand_metadata_entries(server: Served) -> None:
    block_of_headers = http2.headers("ListProbes", [(f"x-{number}", "y" * 100) for number in range(10_000)])
    parts = [block_of_headers[start : start + 16_000] for start in range(0, len(block_of_headers), 16_000)]
    said = http2.greeting() + http2.frame(http2.HEADERS, parts[0], http2.END_STREAM, 1)
    said += b"".join(http2.frame(http2.CONTINUATION, part, 0, 1) for part in parts[1:-1])
    said += http2.frame(http2.CONTINUATION, parts[-1], http2.END_HEADERS, 1)
    with connected(server) as connection:
        try:
            connection.sendall(said)
            answered = connection.recv(1 << 16)
        except ConnectionError:
            answered = b""
        assert server.held() == []
        assert b"probes" not in answered
    wait_for_connections(server, 1)


def test_flood_of_requests_that_are_never_read(server: Served) -> None:
    """Each is answered in vain, until the connection is full."""
    with connected(server, http2.greeting()) as connection:
        connection.settimeout(1)
        for number in range(20_000):
            try:
                connection.sendall(http2.request("ListProbes", stream=2 * number + 1))
            except (TimeoutError, ConnectionError):
                break
            if number % 1000 == 0:
                assert server.held() == []
        assert server.held() == []
    wait_for_connections(server, 1)


def test_flood_of_calls_begun_and_reset(server: Served) -> None:
    """CVE-2023-44487."""
    with connected(server, http2.greeting()) as connection:
        for number in range(5_000):
            stream = 2 * number + 1
            reset = http2.frame(http2.RST_STREAM, struct.pack(">I", 8), stream=stream)
            try:
                connection.sendall(http2.request("ListProbes", stream=stream) + reset)
            except ConnectionError:
                break
            if number % 500 == 0:
                assert server.held() == []
        assert server.held() == []
    wait_for_connections(server, 1)


# who never reads


def buffered(server: Served) -> int:
    """Bytes that the relay holds for others."""
    halves = list(server.relay._halves)
    return sum(half.transport.get_write_buffer_size() + len(half._unsent) for half in halves)


@contextmanager
def stalled_stream(server: Served) -> Iterator[socket.socket]:
    """A stream of events that nobody reads, while more of them come than the connection takes."""
    found = server.file_object(site("hit"))
    server.map(1, found)
    ident = server.subscribe("app:*", queue_bytes=64 << 20).subscription_id
    wanted = pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_COLUMNS)
    with connected(server, http2.greeting() + http2.request("Stream", wanted.SerializeToString())) as connection:
        server.wait_until_streaming()
        for _ in range(60):
            server.fire(EVENTS)
        wait_for(lambda: buffered(server), "the relay to hold back")
        yield connection


def test_who_never_reads_takes_a_bounded_amount_of_memory(server: Served) -> None:
    with stalled_stream(server):
        for _ in range(20):
            assert buffered(server) < 1 << 20
            assert server.held()
            server.fire(EVENTS)
        (held,) = server.held()
        assert held.account.in_flight > 300_000, "what the connection does not take stays in the subscription's queue"
    wait_for_connections(server, 1)


def test_who_begins_to_read_gets_it_all(server: Served) -> None:
    """What was held back comes, in order: HTTP/2 would not bear a byte that is missing."""
    with stalled_stream(server) as connection:
        (held,) = server.held()
        connection.settimeout(PATIENCE_SECONDS)
        server.unsubscribe(held.subscription_id)
        read = 0
        for kind, flags, payload in http2.frames(connection):
            read += len(payload) if kind == http2.DATA else 0
            if kind == http2.HEADERS and flags & http2.END_STREAM:
                break
        assert read > 60 * 10_000 * 8
        wait_for(lambda: not buffered(server), "the relay to hold nothing back")


def test_who_reads_too_slowly_is_told_what_is_lost_and_why_it_ends(server: Served) -> None:
    with stalled_stream(server) as connection:
        (held,) = server.held()
        subscription = server.subscriptions.get(held.subscription_id)
        server.close_all()
        server.in_api(server.servicer.stop())
        assert subscription.account().in_flight == 0
        connection.settimeout(PATIENCE_SECONDS)
        last = b""
        for kind, flags, payload in http2.frames(connection):
            last = last + payload if kind == http2.DATA else last
            if kind == http2.HEADERS and flags & http2.END_STREAM:
                break
        account = subscription.account()
        assert account.lost_queue > 300_000
        assert account.delivered + account.lost_queue == 60 * len(EVENTS)
        end = pb.StreamResponse(end=finish(subscription_messages.end(EndReason.SERVER_STOPPING, subscription)))
        assert last.endswith(end.SerializeToString())


def test_stopping_while_clients_stall(tmp_path: Path) -> None:
    with ExitStack() as clients:
        with served(tmp_path) as server:
            clients.enter_context(stalled_stream(server))
            clients.enter_context(connected(server))
            clients.enter_context(connected(server, http2.greeting()[:10]))
            wait_for_connections(server, 4)
        assert server.relay.connections == 0
        assert not server.tasks_of(Relay)
        assert not os.path.exists(server.socket)


def test_a_server_that_never_started_can_be_stopped(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    path = server.folder / "other.sock"

    async def start_and_stop() -> None:
        other = Server(
            server.servicer, Relay(PeerTable(ConnectedClients()), server.gate, 5), [Listener(f"unix:{path}")]
        )
        with pytest.raises(OSError, match="No space left"):
            await other.start()
        assert path.exists()
        await other.stop()

    server.in_api(start_and_stop())
    assert not path.exists()


# every byte


@contextmanager
def relayed(server: Served) -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """Another relay, and what is connected at its two ends; who serves is no gRPC server."""
    relay = Relay(PeerTable(ConnectedClients()), server.gate, 5)
    path, inner_path = server.folder / "relayed.sock", server.folder / "inner.sock"
    (listening,) = server.call_in_api(lambda: open_listeners([Listener(f"unix:{path}")]))
    with socket.socket(socket.AF_UNIX) as inner, socket.socket(socket.AF_UNIX) as client:
        inner.bind(str(inner_path))
        inner.listen()
        inner.settimeout(PATIENCE_SECONDS)
        client.settimeout(PATIENCE_SECONDS)
        server.call_in_api(lambda: relay.start([listening], str(inner_path)))
        try:
            client.connect(str(path))
            with inner.accept()[0] as served_end:
                served_end.settimeout(PATIENCE_SECONDS)
                yield relay, client, served_end
        finally:
            server.in_api(relay.stop())
            listening.close()


@pytest.mark.parametrize("is_upward", [False, True])
def test_who_closes_at_once_has_still_said_everything(server: Served, is_upward: bool) -> None:
    """And nobody else's data goes the same way: all relays share a buffer."""
    data = random.Random(1)
    everything = http2.greeting() + http2.frame(http2.HEADERS, http2.headers("Subscribe"), http2.END_HEADERS, 1)
    everything += b"".join(http2.frame(http2.DATA, data.randbytes(16_000), stream=1) for _ in range(250))
    with relayed(server) as (relay, client, served_end):
        speaker, hearer = (client, served_end) if is_upward else (served_end, client)

        def speak() -> None:
            speaker.sendall(everything)
            speaker.close()

        speaking = threading.Thread(target=speak)
        speaking.start()
        wait_for(
            lambda: any(half.transport.get_write_buffer_size() for half in list(relay._halves)), "it to be held back"
        )
        server.held()
        heard = bytearray()
        # a little at a time, so that something is still to be written when the other end is gone
        while more := hearer.recv(1 << 12):
            heard += more
        speaking.join()
    assert heard == everything


def test_what_is_said_lastly_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gRPC server is done when it wrote everything, not when that was read; who serves here is none either."""
    last_words = random.Random(2).randbytes(160_000)
    with ExitStack() as stack:
        inner = stack.enter_context(socket.socket(socket.AF_UNIX))
        inner.bind(str(tmp_path / "inner.sock"))
        inner.listen()
        inner.settimeout(PATIENCE_SECONDS)
        with served(tmp_path) as server:
            path = os.open(tmp_path / "inner.sock", os.O_PATH)
            os.dup2(path, inner_socket())
            os.close(path)
            client = stack.enter_context(connected(server))
            served_end, _ = inner.accept()
            stop = server.server._server.stop

            async def stop_with_last_words(grace: float | None) -> None:
                await stop(grace)
                served_end.sendall(last_words)
                served_end.close()

            monkeypatch.setattr(server.server._server, "stop", stop_with_last_words)
        heard = bytearray()
        while more := client.recv(1 << 16):
            heard += more
    assert heard == last_words


# what is in a hurry


def test_what_is_said_before_the_way_is_open_arrives(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one read takes, while the gRPC server is not connected yet."""
    connect = Relay._connect
    held_up = asyncio.Event()

    async def connect_later(self: Relay, outside: Half, peer: Peer) -> Half:
        await held_up.wait()
        return await connect(self, outside, peer)

    monkeypatch.setattr(Relay, "_connect", connect_later)
    with connected(server) as connection:
        padding = [("x-padding", "y" * 100)] * 60
        calls = [
            http2.frame(http2.HEADERS, http2.headers("ListSubscriptions", padding), http2.END_HEADERS, stream)
            + http2.frame(http2.DATA, bytes(5), http2.END_STREAM, stream)
            for stream in range(1, 101, 2)
        ]
        talking = threading.Thread(target=connection.sendall, args=[http2.greeting() + b"".join(calls)])
        talking.start()
        wait_for(lambda: buffered(server), "something to be read")
        assert buffered(server) <= BUFFER_BYTES
        server.call_in_api(held_up.set)
        ends = (kind == http2.HEADERS and flags & http2.END_STREAM for kind, flags, _ in http2.frames(connection))
        assert len(list(islice(filter(None, ends), 50))) == 50
        talking.join()


def test_everything_is_logged_in_lines_that_name_no_traceback(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with connected(server, b"junk"), connected(server):
        wait_for(lambda: server.relay.connections >= 2, "them")
    wait_for_connections(server, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
