"""TCP: who a certificate makes one, who does not get in, and what the client says of that."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stapsdtd import config
from stapsdtd.api.listeners import CannotListenError, ListeningSocket
from stapsdtd.api.relay import Relay
from stapsdtd.cli import stapsdt
from stapsdtd.client import AsyncClient, Client, InvalidTargetError, ServerUnavailableError, Tls
from stapsdtd.config import OPERATOR, USER, Config, Listener, Quotas, Role, validated
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.runtime.line_limiter import SHARED_LINES, LineLimiter
from tests.api import http2
from tests.api.served import LONG_TIMEOUTS, PATIENCE_SECONDS, Served, served
from tests.certificates import Authority
from tests.support import descriptors, held_port, wait_for

READER = Role("reader", certificates=("alice", "bob.example"), list=("all",), quotas=Quotas(max_connections=2))
ROLES = (OPERATOR, USER, READER)
MOST_HANDSHAKES = 64
"""The most of one server at a time."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("foreign"), "foreign")


@pytest.fixture(scope="module")
def alice(authority: Authority) -> Tls:
    return authority.client("alice")


@pytest.fixture
def address() -> Iterator[str]:
    with held_port() as port:
        yield f"tcp:127.0.0.1:{port}"


@pytest.fixture
def own(authority: Authority) -> config.Tls:
    """The server's own files."""
    return authority.server()


@pytest.fixture
def server(tmp_path: Path, own: config.Tls, address: str) -> Iterator[Served]:
    with served(tmp_path, roles=ROLES, listeners=[Listener(address, tls=own)]) as started:
        yield started


def target_of(server: Served) -> str:
    return server.server.addresses[1]


@contextmanager
def tcp(server: Served) -> Iterator[socket.socket]:
    host, port = Listener(target_of(server)).host_and_port
    with socket.create_connection((host, port), PATIENCE_SECONDS) as connection:
        yield connection


def is_let_in(server: Served, context: ssl.SSLContext) -> bool:
    """Whether the server speaks HTTP/2, and no less than TLS 1.3, with who shows this."""
    with tcp(server) as connection:
        try:
            with context.wrap_socket(connection, server_hostname="localhost") as secure:
                # a server of TLS 1.3 judges a certificate when the client's part is over
                return bool(secure.recv(1)) and secure.version() == "TLSv1.3"
        except (ssl.SSLError, ConnectionError):
            return False


def context_of(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.authority)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tls.certificate, tls.key)
    return context


# who one is


def role_of(client: Client) -> str:
    access = client.info().access
    assert access is not None
    return access.role


@pytest.mark.parametrize(
    ("name", "alternatives", "role"),
    [
        ("alice", [], "reader"),
        ("bob", ["DNS:bob.example"], "reader"),
        ("carol", ["DNS:carol.example"], "user"),
        ("root", ["email:root"], "user"),
    ],
)
def test_role_goes_by_the_names_in_the_certificate(
    server: Served, authority: Authority, name: str, alternatives: list[str], role: str
) -> None:
    with Client(target_of(server), tls=authority.client(name, *alternatives)) as client:
        access = client.info().access
    assert access is not None
    assert (access.client, access.role) == (f"certificate {name}", role)


def test_another_role_counts_for_a_connection_that_is_open(server: Served, alice: Tls) -> None:
    with Client(target_of(server), tls=alice) as client:
        assert role_of(client) == "reader"
        server.gate.policy = type(server.gate.policy)((OPERATOR, USER))
        assert role_of(client) == "user"


def test_async_client(server: Served, alice: Tls) -> None:
    async def role() -> str:
        async with AsyncClient(target_of(server), tls=alice) as client:
            access = (await client.info()).access
            assert access is not None
            return access.role

    assert asyncio.run(role()) == "reader"


def test_frames_are_read_after_they_are_decrypted(server: Served, alice: Tls) -> None:
    with tcp(server) as connection, context_of(alice).wrap_socket(connection, server_hostname="localhost") as secure:
        secure.sendall(http2.greeting() + http2.frame(http2.HEADERS, b"\xbe", http2.END_HEADERS, 1))
        said = b""
        with suppress(ConnectionError, ssl.SSLError):
            while more := secure.recv(1 << 16):
                said += more
    assert said.endswith(b"Invalid table index 62")
    assert server.gate.refusals["frames"] == 1


def test_quota_of_connections_is_the_names(server: Served, alice: Tls) -> None:
    with ExitStack() as stack:
        context = context_of(alice)
        for _ in range(2):
            connection = stack.enter_context(tcp(server))
            secure = stack.enter_context(context.wrap_socket(connection, server_hostname="localhost"))
            assert secure.recv(1)
        assert not is_let_in(server, context)
        assert server.held() == []


# who does not get in


def test_tls_1_2_is_refused(server: Served, alice: Tls) -> None:
    context = context_of(alice)
    assert is_let_in(server, context)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with tcp(server) as connection, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(connection, server_hostname="localhost")


def test_without_a_certificate(server: Served, authority: Authority) -> None:
    assert not is_let_in(server, ssl.create_default_context(cafile=str(authority.path)))


@pytest.mark.parametrize("wrong", ["foreign", "expired", "of a server", "another's key"])
def test_certificates_that_are_refused(
    server: Served, authority: Authority, foreign: Authority, alice: Tls, wrong: str
) -> None:
    match wrong:
        case "foreign":
            tls = replace(foreign.client("alice"), authority=alice.authority)
        case "expired":
            tls = authority.client("late", days=0)
        case "of a server":
            tls = authority.client("server2", usage="serverAuth")
        case _:
            with pytest.raises(InvalidTargetError, match="key values mismatch"):
                Client(target_of(server), tls=replace(alice, key=foreign.client("bob").key))
            return
    assert not is_let_in(server, context_of(tls))
    with (
        Client(target_of(server), tls=tls) as client,
        pytest.raises(ServerUnavailableError, match="a certificate that"),
    ):
        client.info()
    with Client(target_of(server), tls=alice) as client:
        assert role_of(client) == "reader"


def test_a_session_is_not_taken_up_again(server: Served, alice: Tls) -> None:
    """Its certificate may have expired, or its authority be none any more."""
    context = context_of(alice)
    with tcp(server) as connection, context.wrap_socket(connection, server_hostname="localhost") as secure:
        secure.recv(1)
        assert secure.session is None or not secure.session.has_ticket


# renewal


def test_renewed_certificates_count_for_who_comes_then(
    server: Served, own: config.Tls, foreign: Authority, alice: Tls, tmp_path: Path
) -> None:
    stranger = foreign.client("alice")
    with ExitStack() as stack:
        early = stack.enter_context(Client(target_of(server), tls=alice))
        early.info()
        renewed = foreign.server()
        files = {
            renewed.certificate: own.certificate,
            renewed.key: own.key,
            renewed.client_authority: own.client_authority,
        }
        for old in files.values():
            saved = tmp_path / Path(old).name
            shutil.copy(old, saved)
            stack.callback(shutil.copy, saved, old)
        for new, old in files.items():
            shutil.copy(new, old)
        assert not is_let_in(server, context_of(stranger)), "not before it is told"
        server.call_in_api(server.server.renew_certificates)
        assert is_let_in(server, context_of(stranger))
        context = context_of(replace(alice, authority=stranger.authority))
        assert not is_let_in(server, context), "an authority that was replaced is not trusted any more"
        assert role_of(early) == "reader"


def test_certificates_that_cannot_be_renewed_stay(server: Served, authority: Authority, alice: Tls) -> None:
    before = authority.path.read_text()
    try:
        authority.path.write_text("junk")
        with pytest.raises(CannotListenError, match=r"authority\.pem cannot be used"):
            server.call_in_api(server.server.renew_certificates)
    finally:
        authority.path.write_text(before)
    assert is_let_in(server, context_of(alice))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"certificate": "/nowhere"}, "/nowhere and .*server.key cannot be used: No such file"),
        ({"key": "/dev/null"}, "server.pem and /dev/null cannot be used"),
        ({"client_authority": "/dev/null"}, "/dev/null cannot be used"),
    ],
)
def test_files_that_no_server_can_use(authority: Authority, address: str, wrong: dict[str, str], told: str) -> None:
    with pytest.raises(CannotListenError, match=told):
        ListeningSocket(Listener(address, tls=replace(authority.server(), **wrong)))


# who says nothing


def test_half_open_handshakes_keep_nobody_out(server: Served, alice: Tls, caplog: pytest.LogCaptureFixture) -> None:
    with Client(target_of(server), tls=alice) as client:
        assert role_of(client) == "reader"
    server.held()
    wait_for(lambda: server.relay.connections == 1, "the stub's connection alone")
    before = descriptors(os.getpid())
    with ExitStack() as stack:
        half_open = [stack.enter_context(tcp(server)) for _ in range(MOST_HANDSHAKES + 32)]
        half_open[-1].sendall(b"\x16\x03\x01")
        wait_for(lambda: closed(half_open) == 32, "the oldest to be given up")
        with Client(target_of(server), tls=alice) as client:
            assert role_of(client) == "reader"
        assert server.held() == []
        assert len(half_open) - closed(half_open) <= MOST_HANDSHAKES
    wait_for(lambda: descriptors(os.getpid()) <= before, "their descriptors to be free")
    assert "aborting the connection from 127.0.0.1" not in caplog.text, "nobody had to wait until then"


def closed(connections: list[socket.socket]) -> int:
    found = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            found += not connection.recv(1)
        except BlockingIOError:
            pass
        except ConnectionError:
            found += 1
    return found


def test_failed_handshakes_do_not_fill_the_log(
    tmp_path: Path, authority: Authority, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(address, tls=authority.server())
    with served(tmp_path, listeners=[listener], clock=lambda: 0.0) as server:
        with ExitStack() as stack:
            junk = [stack.enter_context(tcp(server)) for _ in range(40)]
            for connection in junk:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wait_for(lambda: closed(junk) == 40, "them to be refused")
        wait_for(lambda: server.gate.refusals["connection"] == 40, "them to be counted")
    told = [record for record in caplog.records if "connection refused" in record.message]
    assert (len(told), sum(map(LineLimiter().admits, told))) == (40, SHARED_LINES)


def test_a_handshake_that_takes_too_long_ends(tmp_path: Path, authority: Authority, address: str) -> None:
    timeouts = replace(LONG_TIMEOUTS, handshake_seconds=0.05)
    listener = Listener(address, tls=authority.server())
    with served(tmp_path, listeners=[listener], timeouts=timeouts) as server, tcp(server) as silent:
        wait_for(lambda: closed([silent]), "it to be given up")
        wait_for(lambda: server.gate.refusals["connection"] == 1, "it to be counted")


def test_stopping_during_a_handshake(tmp_path: Path, authority: Authority, address: str) -> None:
    with ExitStack() as stack:
        with served(tmp_path, listeners=[Listener(address, tls=authority.server())]) as server:
            stack.enter_context(tcp(server))
            wait_for(lambda: server.tasks_of(Relay), "it to begin")
            assert server.relay.connections == 0
        assert not server.tasks_of(Relay)


# what the client says


def test_plain_tcp_on_loopback(tmp_path: Path, address: str) -> None:
    listener = Listener(address, role="user", plain=True)
    with served(tmp_path, listeners=[listener]) as server, Client(target_of(server)) as client:
        assert role_of(client) == "user"


@pytest.mark.parametrize(
    "target",
    [
        *("tcp:localhost", "tcp:localhost:http", "tcp:::1:5", "tcp:a/b:5", "tcp:localhost:65536"),
        *("localhost:50051", "/run/stapsdtd.sock", "x.sock", "", "dns:///localhost:5"),
        *("unix:", "unix-abstract:x"),
    ],
)
def test_addresses_that_are_none(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """GRPC would look for hosts of some of these names, for as long as a call may take."""
    told = f"{target!r} is not of the form unix:PATH or tcp:HOST:PORT"
    for client in (Client, AsyncClient):
        with pytest.raises(InvalidTargetError, match=f"^{re.escape(told)}$"):
            client(target)
    assert stapsdt.run(["--server", target, "list"]) == 2
    assert told in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match=re.escape(told)):
        validated(Config((Listener(target),)))


@pytest.mark.parametrize("host", ["db1.example", "127.0.0.2", "127.1", "127x0.0.1", "127.0.0.1.example", "localhost.x"])
def test_no_plain_tcp_to_elsewhere(host: str) -> None:
    """Neither end does without TLS where the other would want it."""
    with pytest.raises(InvalidTargetError, match="needs a certificate"):
        Client(f"tcp:{host}:50051")
    with pytest.raises(InvalidArgumentError, match="no loopback address"):
        validated(Config((Listener(f"tcp:{host}:50051", role="user", plain=True),)))


def test_unix_takes_no_certificate(alice: Tls) -> None:
    with pytest.raises(InvalidTargetError, match="takes no certificate"):
        Client("unix:/run/x.sock", tls=alice)


def options(tls: Tls) -> list[str]:
    return ["--tls-certificate", tls.certificate, "--tls-key", tls.key, "--tls-authority", tls.authority]


def test_command_with_options(server: Served, alice: Tls, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["--server", target_of(server), *options(alice), "info"]) == 0
    assert "certificate alice" in capsys.readouterr().out


def test_command_with_the_environment(
    server: Served, alice: Tls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAPSDT_SERVER", target_of(server))
    for name in ("certificate", "key", "authority"):
        monkeypatch.setenv(f"STAPSDT_TLS_{name.upper()}", getattr(alice, name))
    assert stapsdt.run(["info"]) == 0
    assert "certificate alice" in capsys.readouterr().out
    assert stapsdt.run(["--server", f"unix:{server.socket}", "info"]) == 0


def test_command_says_in_one_line_what_is_wrong(
    server: Served, foreign: Authority, alice: Tls, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(server)
    unvouched = replace(alice, authority=str(foreign.path))
    unknown = replace(foreign.client("mallory"), authority=alice.authority)
    for address, given, code, told in (
        (target, options(unvouched), 1, "has a certificate that cannot be trusted"),
        (target, options(unknown), 1, "closed the connection: it requires TLS and a certificate that its authority"),
        (target, [], 1, "closed the connection: it requires TLS"),
        (target.replace("127.0.0.1", "127.0.0.2"), options(alice), 1, "cannot connect to"),
        (f"tcp:nowhere.invalid:{50051}", options(alice), 1, "there is no such host"),
        (target, options(alice)[:2], 2, "go together"),
        ("tcp:elsewhere:1", [], 2, "needs a certificate"),
        (target, options(replace(alice, key="/nowhere")), 2, "/nowhere cannot be used: No such file"),
    ):
        assert stapsdt.run(["--server", address, *given, "info"]) == code
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1


def test_certificate_for_another_name(tmp_path: Path, authority: Authority, address: str, alice: Tls) -> None:
    certificate, key = authority.sign("elsewhere", "DNS:elsewhere.example", usage="serverAuth")
    listener = Listener(address, tls=replace(authority.server(), certificate=certificate, key=key))
    with (
        served(tmp_path, listeners=[listener]) as server,
        Client(target_of(server), tls=alice) as client,
        pytest.raises(ServerUnavailableError, match="a certificate for another name"),
    ):
        client.info()
