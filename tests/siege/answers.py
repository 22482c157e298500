"""Little that is asked for, of which much has to be told: sites of streams, long lists of few things, open spans."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena
from tests.siege.catalogue import many_sites
from tests.unit.elf_builder import NOP, TEXT_OFFSET, TEXT_VADDR, Elf

_SITES, _ARGUMENTS, _CAPTURES = 5_000, 10, 32
_ALIKE = 30_000
_CLAUSES, _SUBSCRIPTIONS = 32, 16
_PIDS = 4096
_PROCESSES = 400
_RETURN = b"\xc3"
_Function = pb.AggregateFunction.Function


def _sites_with_arguments() -> bytes:
    elf = Elf(NOP * _SITES + _RETURN)
    arguments = b" ".join([b"8@%rdi"] * _ARGUMENTS)
    elf.notes = b"".join(
        elf.note(TEXT_VADDR + n, provider=b"told", name=b"p%d" % n, arguments=arguments) for n in range(_SITES)
    )
    return elf.build()


def _fire_all(arena: Arena, content: bytes) -> Callable[[], object]:
    """Map a file, and return what fires all of its probes."""
    path = arena.write("told", content)
    with open(path, "rb") as file:
        text = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    address = ctypes.addressof(ctypes.c_char.from_buffer(text)) + TEXT_OFFSET
    text_end = mmap.PROT_READ | mmap.PROT_EXEC
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address - TEXT_OFFSET), ctypes.c_size_t(len(text)), text_end)
    arena.keep(text)
    return ctypes.CFUNCTYPE(None)(address)


def _descriptions(arena: Arena) -> None:
    """Events of as many sites as there may be, whose descriptions each new stream wants."""
    fire = _fire_all(arena, _sites_with_arguments())
    captures = ",".join(f"arg{n % _ARGUMENTS}" for n in range(_CAPTURES))
    with arena.stub() as stub:
        request = pb.SubscribeRequest(selectors=[f"told:*({captures})"], queue_bytes=64 << 20)
        answer = arena.call("subscribed", lambda: stub.Subscribe(request, timeout=arena.timeout))
        if answer is None:
            return
        arena.done["armed"] += len(answer.sites)
        reading = pb.StreamRequest(
            subscription_id=answer.subscription_id, from_seq=1, encoding=pb.StreamRequest.ENCODING_COLUMNS
        )

        def work(of_thread: StapsdtServiceStub) -> None:
            fire()
            stream = of_thread.Stream(reading, timeout=arena.timeout)

            def read() -> None:
                for message in stream:
                    arena.done[message.WhichOneof("payload") or ""] += 1
                    if message.HasField("columns"):
                        stream.cancel()
                        return

            arena.call("streamed", read)

        arena.in_threads(1, work)
        unsubscribe = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
        arena.call("unsubscribed", lambda: stub.Unsubscribe(unsubscribe, timeout=10))


def _sites_alike() -> bytes:
    elf = Elf(NOP * _ALIKE)
    elf.notes = b"".join(
        elf.note(TEXT_VADDR + n, provider=b"alike", name=b"p", arguments=b"8@%rdi") for n in range(_ALIKE)
    )
    return elf.build()


def _list_one_probe(arena: Arena) -> None:
    """A probe of very many sites."""
    arena.map(arena.write("alike", _sites_alike()))
    request = pb.ListProbesRequest(selectors=["alike:p"])
    arena.in_threads(
        2, lambda stub: arena.call("listed", lambda: stub.ListProbes(request, timeout=arena.timeout)) and None
    )


def _watch_one_probe(arena: Arena) -> None:
    """The same, watched."""
    arena.map(arena.write("alike", _sites_alike()))
    request = pb.WatchProbesRequest(selectors=["alike:p"])

    def work(stub: StapsdtServiceStub) -> None:
        watch = stub.WatchProbes(request, timeout=arena.timeout)
        answer = arena.call("watched", lambda: next(iter(watch)))
        arena.done["sites"] += len(answer.probe.sites) if answer else 0
        watch.cancel()

    arena.in_threads(2, work)


def _wide_subscriptions(arena: Arena, request: pb.SubscribeRequest, stub: StapsdtServiceStub) -> list[str]:
    answers = [arena.call("subscribed", partial(stub.Subscribe, request, timeout=10)) for _ in range(_SUBSCRIPTIONS)]
    return [answer.subscription_id for answer in answers if answer]


def _list_wide_subscriptions(arena: Arena) -> None:
    """Subscriptions of as many clauses, selectors and processes as a request may name."""
    clauses = [
        pb.Clause(tag=str(n), selectors=[f"nothing{n}:p{m}" for m in range(8)], where="arg0 == 1")
        for n in range(_CLAUSES)
    ]
    first = os.getpid() + 1
    request = pb.SubscribeRequest(
        clauses=clauses,
        scope=pb.Scope(exclude_pids=range(first, first + _PIDS), execnames=[f"name{n}" for n in range(60)]),
        lease_seconds=60,
    )
    with arena.stub() as stub:
        idents = _wide_subscriptions(arena, request, stub)

        def work(of_thread: StapsdtServiceStub) -> None:
            listed = pb.ListSubscriptionsRequest()
            arena.call("listed", lambda: of_thread.ListSubscriptions(listed, timeout=arena.timeout))

        arena.in_threads(2, work)
        for ident in idents:
            unsubscribe = pb.UnsubscribeRequest(subscription_id=ident)
            arena.call("unsubscribed", partial(stub.Unsubscribe, unsubscribe, timeout=10))


def _read_all(arena: Arena, request: pb.SubscribeRequest) -> None:
    with arena.stub() as stub:
        idents = _wide_subscriptions(arena, request, stub)

        def read(ident: str) -> None:
            stream = stub.Stream(
                pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_COLUMNS),
                timeout=arena.seconds_left + 0.1,
            )

            def drain() -> None:
                for _ in stream:
                    arena.done["messages"] += 1

            arena.call("read", drain)

        arena.together(*[partial(read, ident) for ident in idents])
        for ident in idents:
            unsubscribe = pb.UnsubscribeRequest(subscription_id=ident)
            arena.call("unsubscribed", partial(stub.Unsubscribe, unsubscribe, timeout=10))


def _fast_snapshots(arena: Arena) -> None:
    """As many clauses as there may be, each with a snapshot every 10 ms, of nothing."""
    aggregation = pb.Aggregation(
        functions=[pb.AggregateFunction(function=_Function.FUNCTION_COUNT)], interval_ms=10, cumulative=True
    )
    clauses = [pb.Clause(tag=str(n), selectors=["nothing:number"], aggregation=aggregation) for n in range(_CLAUSES)]
    _read_all(arena, pb.SubscribeRequest(clauses=clauses))


def _open_spans(arena: Arena) -> None:
    """Starts that wait in as many clauses as there may be, each of which tells of them."""
    arena.raid(10)
    span = pb.Span(start_selectors=["raid:number"], key=["arg0"], report_open_ms=1)
    clauses = [pb.Clause(tag=str(n), selectors=["raid:text(arg1)"], span=span) for n in range(_CLAUSES)]
    _read_all(arena, pb.SubscribeRequest(clauses=clauses))


def _late_open_spans(arena: Arena) -> None:
    """The same where the daemon pairs."""
    arena.raid(10, pause_us=50)
    span = pb.Span(start_selectors=["raid:number(arg0)"], key=["arg0"], report_open_ms=1)
    where = 'str(arg0) ~ "*a*b*" || arg1 >= 0'
    clauses = [pb.Clause(tag=str(n), selectors=["raid:text(arg1)"], where=where, span=span) for n in range(_CLAUSES)]
    _read_all(arena, pb.SubscribeRequest(clauses=clauses))


def _waiting_processes(arena: Arena) -> None:
    """Starts of as many processes as there may be wait in as many clauses, where the daemon pairs."""
    span = pb.Span(start_selectors=["raid:number"], nested=True)
    where = f'str(arg0) ~ "*{"?" * 245}b"'
    clauses = [pb.Clause(tag=str(n), selectors=["raid:absent"], where=where, span=span) for n in range(_CLAUSES)]
    with arena.stub() as stub:
        idents = _wide_subscriptions(arena, pb.SubscribeRequest(clauses=clauses, lease_seconds=60), stub)
        for _ in range(_PROCESSES):
            arena.raid(10, hits=1)
        arena.done["processes"] += _PROCESSES
        arena.rest()
        for ident in idents:
            unsubscribe = pb.UnsubscribeRequest(subscription_id=ident)
            answer = arena.call("unsubscribed", partial(stub.Unsubscribe, unsubscribe, timeout=10))
            arena.done["open"] += answer.account.spans.open if answer else 0


def _read_statuses(arena: Arena, stub: StapsdtServiceStub, request: pb.StreamRequest) -> None:
    stream = stub.Stream(request, timeout=1)
    arena.done["statuses"] += len(next(iter(stream)).status.sites)
    stream.cancel()


def _statuses(arena: Arena) -> None:
    """Files of many sites with long paths that are mapped and unmapped, whose statuses a stream gets at once."""
    folder = arena.folder
    for _ in range(15):
        folder /= "d" * 200
    folder.mkdir(parents=True)
    path = folder / "many"
    path.write_bytes(many_sites(_SITES))
    with arena.stub() as stub:
        answer = arena.call(
            "subscribed", lambda: stub.Subscribe(pb.SubscribeRequest(selectors=["many:*"], lease_seconds=60), timeout=5)
        )
        if answer is None:
            return
        while arena.goes_on:
            with open(path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
            time.sleep(1.0)
            mapping.close()
            path.write_bytes(many_sites(_SITES))
            reading = pb.StreamRequest(
                subscription_id=answer.subscription_id, encoding=pb.StreamRequest.ENCODING_COLUMNS
            )
            arena.call("streamed", partial(_read_statuses, arena, stub, reading))


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "descriptions": _descriptions,
    "list_one_probe": _list_one_probe,
    "watch_one_probe": _watch_one_probe,
    "list_wide_subscriptions": _list_wide_subscriptions,
    "fast_snapshots": _fast_snapshots,
    "open_spans": _open_spans,
    "late_open_spans": _late_open_spans,
    "statuses": _statuses,
    "waiting_processes": _waiting_processes,
}
