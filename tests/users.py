"""Ordinary users of the host, as tests that run as root play them. They need not be in /etc/passwd."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import select
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support import SYSTEM_PYTHON, require

# setgroups, setresgid, setresuid: the C library's functions change all threads
_SYSCALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
_doors = itertools.count()


# what has left the host's namespace may map nobody but itself
_IN_NAMESPACE = """
import ctypes, os, sys
left, leave = os.pipe()
me = os.getpid()
if not os.fork():
    os.read(left, 1)
    for kind in "uid", "gid":
        with open(f"/proc/{me}/{kind}_map", "w") as file:
            file.write("0 0 70000")
    os._exit(0)
os.setresuid(*[int(sys.argv[1])] * 3)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
os.write(leave, b".")
os.wait()
os.setresuid(0, 0, 0)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class User:
    uid: int
    groups: tuple[int, ...] = ()

    def command(self, *command: Path | str, options: Sequence[str] = ()) -> list[str]:
        """What runs a command as this user. options: further ones of setpriv(1)."""
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        ids = (f"--reuid={self.uid}", f"--regid={self.uid}", groups)
        # setpriv keeps what lets it do this until it executes something
        return ["setpriv", *ids, *options, "env", *map(str, command)]

    def in_namespace_of(self, maker: int, *command: Path | str) -> list[str]:
        """The same in a user namespace that some user made, with the host's ids."""
        return [SYSTEM_PYTHON, "-c", _IN_NAMESPACE, str(maker), *self.command(*command)]

    @contextmanager
    def connecting(self, target: str) -> Iterator[str]:
        """Answer where to connect to within it, which goes on to target as this user's connection, while it lasts."""
        path = target.removeprefix("unix:")
        door = f"{path}.{self.uid}.{next(_doors)}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(door)
            listening.listen()
            thread = threading.Thread(target=self._pass_on, args=(listening, path), daemon=True)
            thread.start()
            try:
                yield f"unix:{door}"
            finally:
                os.unlink(door)
                listening.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _pass_on(self, listening: socket.socket, path: str) -> None:
        """In a thread that is this user's from now on, as are those that it starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        setgroups, setresgid, setresuid = _SYSCALLS[platform.machine()]
        groups = (ctypes.c_uint32 * len(self.groups))(*self.groups)
        assert libc.syscall(setgroups, len(self.groups), groups) == 0
        assert libc.syscall(setresgid, self.uid, self.uid, self.uid) == 0
        assert libc.syscall(setresuid, self.uid, self.uid, self.uid) == 0
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(path)
                threading.Thread(target=_pump, args=(client, server), daemon=True).start()


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Pass on what either says, until one of them has nothing more to say."""
    other = {client: server, server: client}
    with client, server, suppress(OSError):
        while True:
            for ready in select.select(list(other), [], [])[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                other[ready].sendall(data)


_FIRST_UID = 64101 + 20 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Tests that run in another process have users of their own."""
ANNE, BERT = User(_FIRST_UID), User(_FIRST_UID + 1)


@contextmanager
def public_folder() -> Iterator[Path]:
    """Pytest's own folders are root's alone."""
    require(os.geteuid() == 0, "root")
    with tempfile.TemporaryDirectory(prefix="stapsdtd-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)
