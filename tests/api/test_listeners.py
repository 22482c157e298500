"""The sockets that a daemon makes, and those that it is given."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.api.listeners import CannotListenError, ListeningSocket, open_listeners
from stapsdtd.config import Listener
from tests.api.served import served
from tests.support import ROOT, require

LISTEN_AND_DIE = """
import os, signal, sys
from stapsdtd.api.listeners import open_listeners
from stapsdtd.config import Listener
listening = open_listeners([Listener(sys.argv[1])])
os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(path: Path, **settings: object) -> ListeningSocket:
    (only,) = open_listeners([Listener(f"unix:{path}", **settings)])  # type: ignore[arg-type]
    return only


def test_second_server_on_one_path_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        with pytest.raises(CannotListenError, match="another stapsdtd serves it"):
            opened(server.socket)
        assert server.held() == []


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o600])
def test_mode(tmp_path: Path, mode: int) -> None:
    listening = opened(tmp_path / "sock", mode=mode)
    assert (tmp_path / "sock").stat().st_mode & 0o777 == mode
    listening.close()
    assert not (tmp_path / "sock").exists()


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(
        CannotListenError,
        match="its directory is missing: make it with 'mkdir -p'",
    ):
        opened(tmp_path / "missing" / "sock")


def test_path_that_no_socket_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(CannotListenError, match=str(path)):
        opened(path)
    # and the lock is free again
    with pytest.raises(CannotListenError, match=str(path)):
        opened(path)


def test_what_a_killed_daemon_left_is_in_nobodys_way(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", LISTEN_AND_DIE, f"unix:{tmp_path / 'sock'}"], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "sock").is_socket()
    opened(tmp_path / "sock").close()


def test_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    (tmp_path / "sock").write_text("precious")
    with pytest.raises(CannotListenError, match="Address already in use"):
        opened(tmp_path / "sock")
    assert (tmp_path / "sock").read_text() == "precious"


def test_owner_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CannotListenError, match="nobody-of-this-name"):
        opened(tmp_path / "sock", owner="nobody-of-this-name")
    assert os.listdir(tmp_path) == ["sock.lock"]


def test_path_on_which_a_service_manager_listens_is_not_taken_away(tmp_path: Path) -> None:
    with listening_unix(tmp_path / "sock"):
        with pytest.raises(CannotListenError, match="another process listens there"):
            opened(tmp_path / "sock")
        assert (tmp_path / "sock").exists()


def test_owner_and_group(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "root")
    listening = opened(tmp_path / "sock", owner="daemon", group="nogroup")
    found = (tmp_path / "sock").stat()
    assert (found.st_uid, found.st_gid) == (pwd.getpwnam("daemon").pw_uid, grp.getgrnam("nogroup").gr_gid)
    listening.close()


def test_lock_in_the_way_of_which_a_link_was_put(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "sock.lock").symlink_to("precious")
    with pytest.raises(CannotListenError, match="a symbolic link is in its place: remove it"):
        opened(tmp_path / "sock")


def test_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp:127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(CannotListenError, match=f"{address}: Address already in use"):
            open_listeners([Listener(address, role="user", plain=True)])


def test_a_name_that_only_seems_to_be_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 50051))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(CannotListenError, match="not a loopback address"):
        open_listeners([Listener("tcp:localhost:50051", role="user", plain=True)])


def test_what_was_opened_is_closed_where_the_next_cannot_be(tmp_path: Path) -> None:
    listeners = [Listener(f"unix:{tmp_path / 'one'}"), Listener(f"unix:{tmp_path / 'missing' / 'two'}")]
    with pytest.raises(CannotListenError, match="missing"):
        open_listeners(listeners)
    assert os.listdir(tmp_path) == ["one.lock"]
    opened(tmp_path / "one").close()


# inherited ones


@contextmanager
def listening_unix(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()
        yield made


def inherit(*descriptors: int, options: Sequence[str] = (), addresses: Sequence[str] = ()) -> str:
    command = [sys.executable, "-m", "tests.api.inherit", *options, "--fd", *map(str, descriptors), "--", *addresses]
    done = subprocess.run(
        command,
        cwd=ROOT,
        pass_fds=[each for each in descriptors if each > 2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout.rstrip("\n")


def test_inherited_socket_takes_the_defaults_place_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with listening_unix(path) as passed:
        assert inherit(passed.fileno()) == f"unix:{path}"
        assert path.exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_inherited_sockets_are_found_by_address(tmp_path: Path) -> None:
    with listening_unix(tmp_path / "one") as one, socket.create_server(("127.0.0.1", 0)) as two:
        addresses = [
            f"tcp:127.0.0.1:{two.getsockname()[1]}",
            f"unix:{tmp_path / 'three'}",
            f"unix:{tmp_path / 'one'}",
        ]
        assert inherit(one.fileno(), two.fileno(), options=["--plain"], addresses=addresses) == " ".join(addresses)
        assert sorted(os.listdir(tmp_path)) == ["one", "one.lock", "three.lock"]


def test_sockets_of_another_process_are_none_of_ours(tmp_path: Path) -> None:
    own = f"unix:{tmp_path / 'own'}"
    with listening_unix(tmp_path / "sock") as passed:
        assert inherit(passed.fileno(), options=["--pid", "1"], addresses=[own]) == own


def test_inherited_socket_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    with listening_unix(tmp_path / "sock") as passed:
        told = inherit(passed.fileno(), addresses=[f"unix:{tmp_path / 'own'}"])
    assert (
        told == f"refused: unix:{tmp_path / 'sock'} was passed to the daemon but is not configured; add it to 'listen'"
    )
    assert os.listdir(tmp_path) == ["sock"]


def test_tcp_never_takes_the_defaults_place() -> None:
    """It would be plain, and everybody's."""
    with socket.create_server(("127.0.0.1", 0)) as passed:
        assert "is not configured; add it to 'listen'" in inherit(passed.fileno())


def test_descriptors_that_do_not_listen(tmp_path: Path) -> None:
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, open(os.devnull, "rb") as file:
        for each in (left, datagrams):
            assert "is not a listening stream socket" in inherit(each.fileno())
        assert "is not a socket" in inherit(file.fileno())
    assert "descriptor 3 was passed to the daemon but is not a socket" in inherit(options=["--count", "1"])
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{tmp_path}")
        abstract.listen()
        assert "is not configured; add it to 'listen'" in inherit(abstract.fileno(), addresses=["unix:x"])


def test_second_server_on_an_inherited_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    first = opened(path)
    with first.socket.dup() as passed:
        assert "another stapsdtd serves it" in inherit(passed.fileno())
    first.close()
