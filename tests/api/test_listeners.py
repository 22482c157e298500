"""The sockets that a daemon makes, and those that it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stapsdtd.api.listeners import CannotListenError, ListeningSocket, open_listeners
from stapsdtd.config import Listener
from tests.api.served import served


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
    with pytest.raises(CannotListenError, match="does its folder exist"):
        opened(tmp_path / "missing" / "sock")


def test_path_that_no_socket_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(CannotListenError, match=str(path)):
        opened(path)
    # and the lock is free again
    with pytest.raises(CannotListenError, match=str(path)):
        opened(path)


def test_what_a_killed_daemon_left_is_in_nobodys_way(tmp_path: Path) -> None:
    left = opened(tmp_path / "sock")
    left.socket.close()
    left._release()
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
