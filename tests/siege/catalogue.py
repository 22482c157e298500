"""Many probes in the catalogue, and requests that make somebody look through it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle

from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.siege.arena import Arena
from tests.siege.costly import subscribe_once
from tests.unit.elf_builder import NOP, TEXT_VADDR, Elf

_FILES, _PROBES = 4, 20_000
_SITES = 5_000
_SITES_OF_FILE = 30_000
_SELECTORS = 256
_COMPARISONS = 60
_THREADS = 3

_States = pb.SiteStatus.State


def many_probes() -> bytes:
    """A file of so many probes with long names, all at one nop."""
    elf = Elf()
    elf.notes = b"".join(elf.note(provider=b"big", name=b"a" * 200 + b"%d" % number) for number in range(_PROBES))
    return elf.build()


def many_sites(count: int) -> bytes:
    """A file of so many probes, each at a nop of its own."""
    elf = Elf(NOP * count)
    notes = (
        elf.note(TEXT_VADDR + number, provider=b"many", name=b"p%d" % number, arguments=b"8@%rdi")
        for number in range(count)
    )
    elf.notes = b"".join(notes)
    return elf.build()


def _map_many(arena: Arena) -> None:
    content = many_probes()
    for number in range(_FILES):
        arena.map(arena.write(f"big{number}", content))


def _many_probes(arena: Arena) -> None:
    _map_many(arena)
    arena.rest()


def _wide_selectors() -> list[str]:
    """Each has to be tried on every name, and matches none."""
    return [f"big:{'*a' * 60}{number}" for number in range(_SELECTORS)]


def _wide_list(arena: Arena) -> None:
    _map_many(arena)
    request = pb.ListProbesRequest(selectors=_wide_selectors())

    def work(stub: StapsdtServiceStub) -> None:
        arena.call("listed", lambda: stub.ListProbes(request, timeout=arena.timeout))

    arena.in_threads(_THREADS, work)


def _wide_watch(arena: Arena) -> None:
    _map_many(arena)
    request = pb.WatchProbesRequest(selectors=_wide_selectors())

    def work(stub: StapsdtServiceStub) -> None:
        watch = stub.WatchProbes(request, timeout=arena.timeout)
        arena.call("watched", lambda: next(iter(watch)))
        watch.cancel()

    arena.in_threads(_THREADS, work)


def _wide_subscribe(arena: Arena) -> None:
    _map_many(arena)
    request = pb.SubscribeRequest(selectors=_wide_selectors())
    arena.in_threads(_THREADS, lambda stub: subscribe_once(arena, request, stub))


def _list_everything(arena: Arena) -> None:
    """All that A may see, with details and with what is installed, as often as it is allowed."""
    _map_many(arena)
    requests = [
        pb.ListProbesRequest(details=True),
        pb.ListProbesRequest(installed=True),
        pb.ListProbesRequest(selectors=["*:*"] * _SELECTORS),
    ]

    def work(stub: StapsdtServiceStub) -> None:
        for request in requests:
            arena.call("listed", partial(stub.ListProbes, request, timeout=arena.timeout))

    arena.in_threads(_THREADS, work)


def _arm_sites(arena: Arena, *requests: pb.SubscribeRequest) -> None:
    """Take requests in turn."""
    taken = cycle(requests)

    def work(stub: StapsdtServiceStub) -> None:
        request = next(taken)
        answer = arena.call("subscribed", lambda: stub.Subscribe(request, timeout=arena.timeout))
        if answer is None:
            return
        states = Counter(_States.Name(site.state) for site in answer.sites)
        if refused := states.pop("STATE_REFUSED", 0):
            arena.refusals["site refused"] += refused
        arena.done.update(states)
        unsubscribe = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
        arena.call("unsubscribed", lambda: stub.Unsubscribe(unsubscribe, timeout=arena.timeout))

    arena.in_threads(1, work)


def _map_sites(arena: Arena) -> None:
    for number in range(_FILES):
        arena.map(arena.write(f"many{number}", many_sites(_SITES)))


def _many_sites(arena: Arena) -> None:
    """Arm and disarm as many sites as the role allows, and ask for more."""
    _map_sites(arena)
    _arm_sites(arena, pb.SubscribeRequest(selectors=["many:*"], require_match=True))


def _many_sites_of_process(arena: Arena) -> None:
    """The same in one process, where each site takes a perf event or a link."""
    _map_sites(arena)
    selectors = ["many:p" + "?" * digits for digits in range(1, 5)]
    scope = pb.Scope(pids=[os.getpid()])
    _arm_sites(arena, pb.SubscribeRequest(selectors=selectors, scope=scope, require_match=True))


def _many_sites_of_file(arena: Arena) -> None:
    """The same of one file that nobody maps, with more sites than there may be of one."""
    path = arena.write("many", many_sites(_SITES_OF_FILE))
    _arm_sites(arena, pb.SubscribeRequest(selectors=["many:*"], files=[str(path)]))


def _many_sites_filtered(arena: Arena) -> None:
    """The same with the longest of filters, which are tested, evaluated late, and different at each site."""
    _map_sites(arena)
    number = " && ".join(f"arg0 != {each}" for each in range(_COMPARISONS))
    text = " && ".join(f'str(arg0) != "{each}"' for each in range(_COMPARISONS))
    name = " || ".join(f'name == "p{each}"' for each in range(_COMPARISONS))
    _arm_sites(arena, *(pb.SubscribeRequest(selectors=["many:*"], where=where) for where in (number, text, name)))


def _escapes(arena: Arena) -> None:
    """Names of probes, files and requests that would steer a terminal."""
    elf = Elf(NOP * 100)
    hostile = [b"\x1b[2J", b"\x1b]0;title\x07", b"a\r\nb", "\u202ertl \x9b2J".encode(), b"[bold red]x[/]", b"\xff\xfe"]
    elf.notes = b"".join(
        elf.note(TEXT_VADDR + place, provider=b"ev" + text, name=b"na" + text, arguments=b"8@" + text)
        for place, text in enumerate(hostile)
    )
    arena.map(arena.write("evil\x1b[31m\n\u202e", elf.build()))

    def work(stub: StapsdtServiceStub) -> None:
        for text in ("\x1b[2J:*", "\u202e:*(arg0:str)", "a:b:c:d:e\x9b"):
            subscribe_once(arena, pb.SubscribeRequest(selectors=[text], where=f"arg0 == {text}"), stub)
            files = pb.ListProbesRequest(files=[f"/tmp/\x1b[2J{text}"])
            arena.call("listed", partial(stub.ListProbes, files, timeout=arena.timeout))

    arena.in_threads(1, work)


ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "many_probes": _many_probes,
    "wide_list": _wide_list,
    "wide_watch": _wide_watch,
    "wide_subscribe": _wide_subscribe,
    "list_everything": _list_everything,
    "many_sites": _many_sites,
    "many_sites_of_process": _many_sites_of_process,
    "many_sites_of_file": _many_sites_of_file,
    "many_sites_filtered": _many_sites_filtered,
    "escapes": _escapes,
}
