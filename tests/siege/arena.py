"""What an attack works with: connections, calls whose refusals count, programs, and a time at which it is over."""

from __future__ import annotations

import errno
import mmap
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub

T = TypeVar("T")

_CALL_SECONDS = 10.0
_SOCKET_SECONDS = 2.0
_REFUSED_PAUSE_SECONDS = 0.005
_EXAMPLE = 120
"""Characters of what the daemon said."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where an attack takes place.

    target: the daemon's address. folder: the attacker's own. raiding, crowding: the programs of
    tests/targets. shared: the bystander's program, which the attacker may run, too. provider: that of its probes.
    """

    target: str
    folder: Path
    raiding: Path
    crowding: Path
    shared: Path
    provider: str


class Arena:
    """For one attack, in a process of its own.

    done: what succeeded, by name. refusals: what did not, by gRPC code, errno or state of a site. examples: what the
    first of a code said.
    """

    def __init__(self, ground: Ground, seconds: float) -> None:
        self.target = ground.target
        self.folder = ground.folder
        self.raiding = ground.raiding
        self.crowding = ground.crowding
        self.shared = ground.shared
        self.provider = ground.provider
        self.done: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self._deadline = time.monotonic() + seconds
        self._programs: list[subprocess.Popen[str]] = []
        self._mappings: list[mmap.mmap] = []

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def goes_on(self) -> bool:
        return self.seconds_left > 0

    def rest(self) -> None:
        """Wait for the end of the attack."""
        time.sleep(self.seconds_left)

    # calls

    @property
    def timeout(self) -> float:
        """Of a call, in seconds."""
        return min(_CALL_SECONDS, self.seconds_left + 1.0)

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A connection of its own: gRPC shares those to one address otherwise."""
        with grpc.insecure_channel(self.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel

    @contextmanager
    def stub(self) -> Iterator[StapsdtServiceStub]:
        with self.channel() as channel:
            yield StapsdtServiceStub(channel)

    def call(self, name: str, call: Callable[[], T]) -> T | None:
        """Make a call and count what became of it; return None if it was refused."""
        try:
            answer = call()
        except grpc.RpcError as error:
            self.refused(error.code().name, error.details() or "")
            return None
        self.done[name] += 1
        return answer

    def refused(self, code: str, said: str = "") -> None:
        self.refusals[code] += 1
        self.examples.setdefault(code, said[:_EXAMPLE])
        # else most of the attacker's processor would go into being refused
        time.sleep(_REFUSED_PAUSE_SECONDS)

    def in_threads(self, count: int, work: Callable[[StapsdtServiceStub], None]) -> None:
        """Repeat work until the end, each thread with a connection of its own."""

        def repeat() -> None:
            with self.stub() as stub:
                while self.goes_on:
                    work(stub)

        self.together(*[repeat] * count)

    def together(self, *works: Callable[[], None]) -> None:
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # sockets

    @contextmanager
    def connection(self, *, reads: bool = True) -> Iterator[socket.socket]:
        """Connect. reads: whether a thread takes what the server says, and forgets it."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SOCKET_SECONDS)
            connection.connect(self.target.removeprefix("unix:"))
            if reads:
                threading.Thread(target=_drain, args=(connection,), daemon=True).start()
            yield connection

    def on_sockets(self, count: int, work: Callable[[], None]) -> None:
        """Repeat work in threads until the end; an error of a socket counts as refusal."""

        def repeat() -> None:
            while self.goes_on:
                try:
                    work()
                except OSError as error:
                    self.refused(errno.errorcode.get(error.errno or 0, type(error).__name__))

        self.together(*[repeat] * count)

    # programs and files

    def start(self, *command: Path | str) -> subprocess.Popen[str]:
        """Start a program that says a line when it is ready. It ends with the attack."""
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._programs.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def raid(self, length: int, hits: int = 1 << 40, pause_us: int = 0) -> subprocess.Popen[str]:
        """Have a process fire raid:text(a string of so many bytes, number) and raid:number(number)."""
        process = self.start(self.raiding, str(length))
        tell(process, f"fire {hits} {pause_us}")
        return process

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def map(self, path: Path) -> None:
        """Map a file executable, in this process, until the end of the attack."""
        with open(path, "rb") as file:
            self.keep(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))

    def keep(self, mapping: mmap.mmap) -> None:
        """Keep a mapping until the end of the attack."""
        self._mappings.append(mapping)
        self.done["mapped"] += 1

    def close(self) -> None:
        for process in self._programs:
            process.kill()
        for process in self._programs:
            process.communicate()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _drain(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass
