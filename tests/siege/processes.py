"""Processes and mappings that come and go, scopes of thousands of processes, and the provider socket."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena
from tests.siege.costly import subscribe_once
from tests.unit.elf_builder import NOP, TEXT_VADDR, Elf

_CHILDREN = 100
_HELD = 8
_THREADS = 2


def _library(seed: int) -> bytes:
    elf = Elf(NOP * 256)
    elf.notes = b"".join(
        elf.note(TEXT_VADDR + place, provider=b"loaded", name=b"p%d" % (seed + place)) for place in range(20)
    )
    return elf.build()


def _memfds(arena: Arena) -> None:
    """Libraries in memfds, each mapped once and soon unmapped, while a subscription wants what is in them."""
    held: deque[mmap.mmap] = deque()
    request = pb.SubscribeRequest(selectors=["loaded:*"])
    with arena.stub() as stub:
        answer = arena.call("subscribed", lambda: stub.Subscribe(request, timeout=10))
        number = 0
        while arena.goes_on:
            descriptor = os.memfd_create(f"loaded{number}")
            os.write(descriptor, _library(number))
            held.append(mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
            os.close(descriptor)
            number += 1
            if len(held) > _HELD:
                held.popleft().close()
            arena.done["memfds"] += 1
        if answer:
            unsubscribe = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
            arena.call("unsubscribed", lambda: stub.Unsubscribe(unsubscribe, timeout=10))


def _mappings(arena: Arena) -> None:
    """One file, mapped and unmapped as quickly as possible."""
    with open(arena.write("library", _library(0)), "rb") as file:
        while arena.goes_on:
            for _ in range(100):
                mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
            arena.done["mappings"] += 100


def _executions(arena: Arena) -> None:
    """Short programs, one after the other."""

    def work() -> None:
        while arena.goes_on:
            subprocess.run(["/bin/true"], check=True)
            arena.done["executions"] += 1

    arena.together(*[work] * _THREADS)


def children(count: int) -> tuple[list[int], int]:
    """Fork processes that wait for the end of this one; return their pids, and what to close for them to go on."""
    waits, ends = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
        pids.append(pid)
    os.close(waits)
    return pids, ends


def _forks(arena: Arena) -> None:
    """Processes that fork and end, with all that this one maps."""
    arena.map(arena.write("library", _library(0)))
    while arena.goes_on:
        pids, ends = children(20)
        os.close(ends)
        for pid in pids:
            os.waitpid(pid, 0)
        arena.done["forks"] += len(pids)


def _many_pids(arena: Arena) -> None:
    """Scopes of hundreds of processes, in each of which sites are armed, and of thousands that there are not."""
    arena.map(arena.write("library", _library(0)))
    # before anything of gRPC runs, which does not survive a fork
    pids, ends = children(_CHILDREN)
    requests = [
        pb.SubscribeRequest(selectors=["loaded:*"], scope=pb.Scope(pids=pids)),
        pb.SubscribeRequest(selectors=["loaded:*"], scope=pb.Scope(pids=pids, follow=True)),
        pb.SubscribeRequest(selectors=["loaded:*"], scope=pb.Scope(pids=range(4_000_000, 4_010_000))),
    ]

    def work(stub: StapsdtServiceStub) -> None:
        for request in requests:
            subscribe_once(arena, request, stub)
        arena.call("listed", lambda: stub.ListProbes(pb.ListProbesRequest(pids=pids), timeout=arena.timeout))

    arena.in_threads(_THREADS, work)
    os.close(ends)
    for pid in pids:
        os.waitpid(pid, 0)


def _names(arena: Arena) -> None:
    """A process that renames itself all the time, with what would steer a terminal."""
    arena.map(arena.write("library", _library(0)))
    comm = Path("/proc/self/comm")
    while arena.goes_on:
        for name in ("e\x1b[2J", "e\nVmRSS: 1", "\u202ertl", "stapsdt"):
            comm.write_text(name)
            arena.done["names"] += 1


def _provider_socket(arena: Arena) -> None:
    """Wait for probes that nobody arms, on more connections than may wait."""
    path = Path(arena.target.removeprefix("unix:"))
    door = str(path.parent / "provider" / path.name)
    held: deque[socket.socket] = deque()

    def work() -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        connection.connect(door)
        held.append(connection)
        arena.done["connections"] += 1
        if len(held) > 200:
            with suppress(IndexError):
                held.popleft().close()

    arena.map(arena.write("library", _library(0)))
    arena.on_sockets(_THREADS, work)
    while held:
        held.popleft().close()


def _written_file(arena: Arena) -> None:
    """Write into a file that is armed, so that it is disarmed, parsed and armed again."""
    path = arena.write("library", _library(0))
    arena.map(path)
    request = pb.SubscribeRequest(selectors=["loaded:*"])

    def write() -> None:
        with open(path, "r+b") as file:
            while arena.goes_on:
                file.seek(0)
                file.write(b"\x7fELF")
                file.flush()
                arena.done["writes"] += 1
                time.sleep(0.001)

    def subscribe() -> None:
        with arena.stub() as stub:
            while arena.goes_on:
                subscribe_once(arena, request, stub)

    arena.together(write, subscribe)


def _processor(arena: Arena) -> None:
    """Keep the attacker's processor busy, and ask nothing of the daemon: so long do others wait for the host alone."""
    rounds = 0
    while arena.goes_on:
        for _ in range(10_000):
            rounds += 1
    arena.done["rounds"] += rounds


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "processor": _processor,
    "memfds": _memfds,
    "mappings": _mappings,
    "executions": _executions,
    "forks": _forks,
    "many_pids": _many_pids,
    "names": _names,
    "provider_socket": _provider_socket,
    "written_file": _written_file,
}
