"""Sockets that somebody else made for the daemon, and certificates that change while it runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stapsdtd import client
from stapsdtd.client import Client, ServerUnavailableError
from tests.certificates import Authority
from tests.support import COMMANDS, require, wait_for

pytestmark = pytest.mark.kernel

_HAND_OVER = """
import os, sys
descriptors, command = map(int, sys.argv[1].split(",")), sys.argv[2:]
# out of the way of each other first
high = [os.dup2(descriptor, 100 + place) for place, descriptor in enumerate(descriptors)]
for place, descriptor in enumerate(high):
    os.dup2(descriptor, 3 + place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(high)))
os.execv(command[0], command)
"""


_LISTENING = "00010000"
"""Among a socket's flags in /proc/net/unix: __SO_ACCEPTCON."""


def handing_over(descriptors: Sequence[int], *options: str) -> list[str]:
    """A command that becomes a daemon which has these as descriptors 3 and following."""
    command = [str(COMMANDS / "stapsdtd"), "--no-inventory", *options]
    return [sys.executable, "-c", _HAND_OVER, ",".join(map(str, descriptors)), *command]


@contextmanager
def running(log: Path, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that must end cleanly when it is told to; or whatever starts one, with the same process id."""
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stderr=file, pass_fds=pass_fds)
    try:
        yield process
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()
        assert " ERROR " not in log.read_text()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def is_listening(path: Path) -> bool:
    """Without connecting to it, which would start a daemon."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any((fields[3], fields[-1]) == (_LISTENING, str(path)) for fields in sockets)


def test_socket_activation(tmp_path: Path) -> None:
    """Who connects first waits until the daemon serves."""
    activate = shutil.which("systemd-socket-activate")
    require(activate, "systemd-socket-activate")
    assert activate
    path = tmp_path / "activated.sock"
    command = [activate, "-l", str(path), "--", str(COMMANDS / "stapsdtd"), "--no-inventory"]
    with running(tmp_path / "log", command) as process:
        wait_for(lambda: is_listening(path), "the socket")
        with Client(f"unix:{path}") as first:
            info = first.info()
        assert info.pid == process.pid
        assert info.access is not None
        assert info.access.role == "operator"
    assert path.exists(), "whoever made it may start the next daemon with it"


def test_inherited_unix_and_tls(tmp_path: Path) -> None:
    """As descriptors 3 and 4, beside a socket that the daemon makes itself; and SIGHUP renews the certificates."""
    authority = Authority(tmp_path / "old")
    tls, alice = authority.server(), authority.client("alice")
    inherited, own = tmp_path / "inherited.sock", tmp_path / "own.sock"
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(inherited))
        unix.listen()
        address = f"tcp:127.0.0.1:{tcp.getsockname()[1]}"
        configuration = tmp_path / "stapsdtd.toml"
        configuration.write_text(f"""
            [[listen]]
            address = "unix:{own}"
            mode = "0600"
            [[listen]]
            address = "{address}"
            certificate = "{tls.certificate}"
            key = "{tls.key}"
            client_authority = "{tls.client_authority}"
            [[listen]]
            address = "unix:{inherited}"
            role = "reader"
            [roles.reader]
            list = "all"
            certificates = ["alice"]
        """)
        descriptors = [unix.fileno(), tcp.fileno()]
        command = handing_over(descriptors, "--config", str(configuration))
        with running(tmp_path / "log", command, pass_fds=descriptors) as process:
            wait_for(lambda: "serving on" in (tmp_path / "log").read_text(), "the daemon")
            assert [role_at(f"unix:{path}") for path in (own, inherited)] == ["operator", "reader"]
            with Client(address, tls=alice) as early:
                assert early.info().pid == process.pid
                renewed = Authority(tmp_path / "new")
                new_tls = renewed.server()
                for new, old in (
                    (new_tls.certificate, tls.certificate),
                    (new_tls.key, tls.key),
                    (new_tls.client_authority, tls.client_authority),
                ):
                    shutil.copy(new, old)
                process.send_signal(signal.SIGHUP)
                wait_for(lambda: "reloaded" in (tmp_path / "log").read_text(), "the daemon to read them")
                assert role_at(address, renewed.client("alice")) == "reader"
                with (
                    Client(address, tls=replace(alice, authority=str(renewed.path))) as late,
                    pytest.raises(ServerUnavailableError, match="a certificate that its authority signed"),
                ):
                    late.info()
                assert early.info().pid == process.pid
    assert inherited.exists()
    assert not own.exists()


def role_at(address: str, tls: client.Tls | None = None) -> str:
    with Client(address, tls=tls) as asking:
        access = asking.info().access
    assert access is not None
    return access.role


def test_socket_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for number, each in enumerate((one, two)):
            each.bind(str(tmp_path / f"{number}.sock"))
            each.listen()
        own = tmp_path / "own.sock"
        descriptors = [one.fileno(), two.fileno()]
        command = handing_over(descriptors, "--listen", f"unix:{own}")
        done = subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"stapsdtd: unix:{tmp_path}/0.sock was passed to the daemon")
    assert not os.path.exists(own)
