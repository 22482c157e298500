"""Processes that cost a daemon which watches all of them, and hardly themselves: by what they map, or how fast."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.api.http2 import PREFACE, SETTINGS, frame, request
from tests.siege.arena import Arena
from tests.siege.catalogue import many_probes
from tests.siege.processes import children
from tests.unit.elf_builder import NOP, TEXT_VADDR, Elf

_FILES = 300
_PROCESSES = 60
_WATCHES = 8
_CONNECTIONS = 10
_LISTS_A_SECOND = 45
_INITIAL_WINDOW_SIZE = 4


def _one_probe(number: int) -> bytes:
    elf = Elf(NOP * 4)
    elf.notes = elf.note(TEXT_VADDR, provider=b"crowd", name=b"p%d" % number)
    return elf.build()


@contextmanager
def _crowd(arena: Arena) -> Iterator[None]:
    """Some processes that do nothing, each of which maps many files with a probe."""
    for number in range(_FILES):
        arena.map(arena.write(f"one{number}", _one_probe(number)))
    # before anything of gRPC runs, which does not survive a fork
    pids, ends = children(_PROCESSES)
    try:
        yield
    finally:
        os.close(ends)
        for pid in pids:
            os.waitpid(pid, 0)


def _idle_crowd(arena: Arena) -> None:
    with _crowd(arena):
        arena.rest()


def _watched_crowd(arena: Arena) -> None:
    """Watches that match nothing, while a crowd comes and goes."""

    def watch(stub: StapsdtServiceStub) -> None:
        calls = stub.WatchProbes(pb.WatchProbesRequest(selectors=["nothing:*"]), timeout=arena.timeout)
        arena.call("watched", lambda: list(calls))

    def come_and_go() -> None:
        while arena.goes_on:
            # children of a program, since this process has threads
            arena.start("/bin/sh", "-c", "echo ready; for i in 1 2 3 4 5; do sleep 0.3 & done; wait")
            time.sleep(0.3)

    with _crowd(arena):
        arena.together(come_and_go, partial(arena.in_threads, _WATCHES, watch))


def _crowding(mode: str, *arguments: str) -> Callable[[Arena], None]:
    """See tests/targets/crowding.c."""

    def run(arena: Arena) -> None:
        places = {"FOLDER": str(arena.folder), "OWN": str(arena.folder / "own")}
        if "OWN" in arguments:
            arena.write("own", _one_probe(0))
        arena.start(arena.crowding, mode, *(places.get(each, each) for each in arguments))
        arena.rest()

    return run


def _unread_lists(arena: Arena) -> None:
    """Ask for lists of very many probes, on streams that have no window."""
    for number in range(4):
        arena.map(arena.write(f"big{number}", many_probes()))
    greeting = PREFACE + frame(SETTINGS, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))

    def work() -> None:
        with arena.connection() as connection:
            connection.sendall(greeting)
            for stream in range(1, 1000, 2):
                connection.sendall(request("ListProbes", b"", stream))
                arena.done["requests"] += 1
                threading.Event().wait(_CONNECTIONS / _LISTS_A_SECOND)
                if not arena.goes_on:
                    return

    arena.on_sockets(_CONNECTIONS, work)


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "idle_crowd": _idle_crowd,
    "watched_crowd": _watched_crowd,
    "renames": _crowding("rename"),
    "thread_churn": _crowding("threads"),
    "protections": _crowding("protect"),
    "passing_mappers": _crowding("pass", "FOLDER", "1"),
    "passing_many_mappers": _crowding("pass", "FOLDER", "1000"),
    "mapping_bursts": _crowding("burst", "FOLDER", "300", "4000"),
    "long_paths": _crowding("deep", "FOLDER", "50000", "20000"),
    "mapped_often": _crowding("often", "OWN", "30000"),
    "unread_lists": _unread_lists,
}
