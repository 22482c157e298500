"""The opener of perf events, built and run as systemd does it, by systemd/stapsdtd-opener.socket."""

from __future__ import annotations

import contextlib
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from tests.units import OPENER_SERVICE, capabilities, with_capabilities

_DENIED = """
import ctypes, errno, os, platform, struct, sys
perf_event_open = {"x86_64": 298, "aarch64": 241}[platform.machine()]
LOAD_NUMBER, IS, ANSWER = 0x20, 0x15, 0x06
lines = [(LOAD_NUMBER, 0, 0, 0), (IS, 0, 1, perf_event_open)]
lines += [(ANSWER, 0, 0, 0x50000 | errno.EACCES), (ANSWER, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
assert ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
DENIED = (sys.executable, "-c", _DENIED)
"""A command that runs another one, which the kernel answers as Debian's does where CAP_SYS_ADMIN is missing."""


def build(folder: Path, *options: str) -> Path:
    """Return the program. options: of the compiler's."""
    program = folder / "stapsdtd-opener"
    assert runpy.run_path(str(ROOT / "systemd" / "build.py"))["build"](program, *options)
    return program


def start(program: Path, connection: socket.socket, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Start it for one connection, with the unit's capabilities."""
    prefix = with_capabilities(capabilities(OPENER_SERVICE))
    return subprocess.Popen([*prefix, str(program)], stdin=connection.fileno(), stderr=stderr)


class OpenerSocket:
    """Starts a process for each connection. folder: where its socket is. is_hanging: only after go_on()."""

    def __init__(self, folder: Path, program: Path, *, is_hanging: bool = False) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._program = program
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept)
        if not is_hanging:
            self.go_on()

    def go_on(self) -> None:
        """Serve who has connected, and everybody from now on."""
        self._thread.start()

    @property
    def path(self) -> str:
        return str(self.folder / "opener.sock")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.processes.append(start(self._program, connection))

    def kill(self) -> None:
        """Kill those that run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Listen no more, and kill those that run."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._thread.join()
            (self.folder / "opener.sock").unlink()
        self.kill()

    def seen_by(self, *command: str) -> list[str]:
        """Return a command that runs another one, which sees this socket where the daemon looks for it."""
        script = (
            "mount -t tmpfs none /run && mkdir /run/stapsdtd-opener && "
            'mount --bind "$0" /run/stapsdtd-opener && exec "$@"'
        )
        return ["unshare", "-m", "sh", "-c", script, str(self.folder), *command]


@contextlib.contextmanager
def listening(folder: Path, program: Path, *, is_hanging: bool = False) -> Iterator[OpenerSocket]:
    """folder: to be made, for the socket alone."""
    folder.mkdir()
    opener = OpenerSocket(folder, program, is_hanging=is_hanging)
    try:
        yield opener
    finally:
        opener.close()
