"""Subscriptions, connections, watches and streams that come and go."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena
from tests.siege.costly import subscribe_once
from tests.unit.elf_builder import NOP, TEXT_VADDR, Elf

_WATCHES = 16
_THREADS = 4
_FILES = 8


def _subscription_churn(arena: Arena) -> None:
    """Arm and disarm a site that fires, and one that the bystander traces."""
    arena.raid(100, pause_us=1000)
    arena.start(arena.shared)
    request = pb.SubscribeRequest(selectors=["raid:*", f"{arena.provider}:*"])
    arena.in_threads(_THREADS, lambda stub: subscribe_once(arena, request, stub))


def _abandoned_subscriptions(arena: Arena) -> None:
    """Subscribe and go; what is left lives as long as its lease."""
    arena.raid(100, pause_us=1000)
    request = pb.SubscribeRequest(selectors=["raid:*"], lease_seconds=1)

    def work() -> None:
        while arena.goes_on:
            with arena.stub() as stub:
                arena.call("subscribed", lambda: stub.Subscribe(request, timeout=arena.timeout))

    arena.together(*[work] * _THREADS)


def _connection_churn(arena: Arena) -> None:
    """A connection for each request."""

    def work() -> None:
        while arena.goes_on:
            with arena.stub() as stub:
                arena.call("info", lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=arena.timeout))

    arena.together(*[work] * _THREADS)


def _take_overs(arena: Arena) -> None:
    """Two streams of one subscription, each of which ends the other."""
    arena.raid(100, pause_us=100)
    with arena.stub() as stub:
        request = pb.SubscribeRequest(selectors=["raid:*"])
        answer = arena.call("subscribed", lambda: stub.Subscribe(request, timeout=10))
        if answer is None:
            return

        def work(of_thread: StapsdtServiceStub) -> None:
            reading = pb.StreamRequest(subscription_id=answer.subscription_id, encoding=pb.StreamRequest.ENCODING_ROWS)
            stream = of_thread.Stream(reading, timeout=arena.timeout)
            arena.call("streamed", lambda: next(iter(stream)))

        arena.in_threads(2, work)
        unsubscribe = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
        arena.call("unsubscribed", lambda: stub.Unsubscribe(unsubscribe, timeout=10))


def _watches_with_changes(arena: Arena) -> None:
    """As many watches as there may be, of files that are mapped and unmapped."""
    elf = Elf(NOP * 1000)
    elf.notes = b"".join(elf.note(TEXT_VADDR + n, provider=b"watched", name=b"p%d" % n) for n in range(1000))
    paths = [arena.write(f"watched{number}", elf.build()) for number in range(_FILES)]

    def watch() -> None:
        with arena.stub() as stub:
            request = pb.WatchProbesRequest(selectors=["watched:*"])
            stream = stub.WatchProbes(request, timeout=arena.seconds_left + 0.1)

            def read() -> None:
                for _ in stream:
                    arena.done["changes"] += 1

            arena.call("watched", read)

    def change() -> None:
        while arena.goes_on:
            with ExitStack() as stack:
                for path in paths:
                    with open(path, "rb") as file:
                        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
                    stack.callback(mapping.close)
                time.sleep(0.02)

    arena.together(change, *[watch] * _WATCHES)


def _files_churn(arena: Arena) -> None:
    """Lists and subscriptions of files by directory, of which each request has the daemon open and parse many."""
    elf = Elf(NOP * 100)
    elf.notes = b"".join(elf.note(TEXT_VADDR + n, provider=b"filed", name=b"p%d" % n) for n in range(100))
    for number in range(500):
        arena.write(f"file{number}", elf.build())
    listed = pb.ListProbesRequest(files=[str(arena.folder)])
    subscribed = pb.SubscribeRequest(selectors=["filed:p1"], files=[str(arena.folder)])

    def work(stub: StapsdtServiceStub) -> None:
        arena.call("listed", lambda: stub.ListProbes(listed, timeout=arena.timeout))
        subscribe_once(arena, subscribed, stub)

    arena.in_threads(2, work)


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "subscription_churn": _subscription_churn,
    "abandoned_subscriptions": _abandoned_subscriptions,
    "connection_churn": _connection_churn,
    "take_overs": _take_overs,
    "watches_with_changes": _watches_with_changes,
    "files_churn": _files_churn,
}
