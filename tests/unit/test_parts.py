from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from stapsdtd.api import convert
from stapsdtd.api.parts import one_of_many, serialized
from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import parse
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Probe
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.runtime.slices import TURN_SECONDS
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.unit.samples import argument, sample_object, site

T = TypeVar("T")

SITES = pb.Probe.SITES_FIELD_NUMBER
_LONGEST_STEP_SECONDS = 5 * TURN_SECONDS


def costly(offset: int) -> pb.Site:
    until = time.thread_time() + TURN_SECONDS
    while time.thread_time() < until:
        pass
    return pb.Site(offset=offset)


def steps_of(steps: Generator[None, None, T]) -> tuple[int, T]:
    """Return how many steps there were, and what they returned."""
    taken = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return taken, result
        taken += 1


def longest_step(begin: Callable[[], Generator[object, None, object]], *, attempts: int = 3) -> float:
    """Return the least of several attempts, without collections of garbage, which the daemon makes rarely."""
    found = []
    gc.collect()
    gc.disable()
    for _ in range(attempts):
        steps, longest, is_over = begin(), 0.0, False
        while not is_over:
            since = time.thread_time()
            is_over = next(steps, steps) is steps
            longest = max(longest, time.thread_time() - since)
        found.append(longest)
    gc.enable()
    return min(found)


def test_items_that_take_long_are_taken_one_at_a_step() -> None:
    steps, message = steps_of(serialized(SITES, range(5), costly))
    assert steps >= 5
    assert [each.offset for each in pb.Probe.FromString(message).sites] == list(range(5))


def test_what_is_little_takes_one_step() -> None:
    assert steps_of(serialized(SITES, range(3), lambda offset: pb.Site(offset=offset)))[0] == 1


def test_messages_have_a_moderate_size() -> None:
    def of_64_kib(offset: int) -> pb.Site:
        return pb.Site(offset=offset, function="f" * (64 << 10))

    left, messages = iter(range(10)), []
    while message := finish(one_of_many(SITES, left, of_64_kib)):
        messages.append(pb.Probe.FromString(message))
    assert [len(each.sites) for each in messages] == [4, 4, 2]
    assert [each.offset for message in messages for each in message.sites] == list(range(10))


def test_probe_of_many_sites_is_told_in_steps() -> None:
    sites = tuple(site(offset=0x1000 + number, arguments=[argument()]) for number in range(30_000))
    probe = Probe(sample_object(*sites), "app", "tick", sites, (1, 2))
    assert longest_step(lambda: convert.probe(probe, NopRewriting())) < _LONGEST_STEP_SECONDS
    assert longest_step(lambda: ListingLimiter().trimmed(probe)) < _LONGEST_STEP_SECONDS
    told = pb.Probe.FromString(finish(convert.probe(probe, NopRewriting())))
    assert (told.name, list(told.pids), len(told.sites)) == ("tick", [1, 2], 30_000)
    assert told.sites[-1] == pb.Site(
        offset=sites[-1].site_offset,
        arguments=[pb.Argument(text="8@%rdi", size=8, register=pb.RegisterOperand(name="rdi"))],
    )


def test_sites_of_one_object_are_selected_in_steps() -> None:
    sites = tuple(site(f"p{number}", 0x1000 + number) for number in range(100_000))
    mapped = MappedObject(sample_object(*sites), (1,))
    mapped.object.parsed.prepare()
    selectors = SelectorSet([parse("app1:::*"), parse("app:p?")])
    assert longest_step(lambda: select(selectors, [mapped])) < _LONGEST_STEP_SECONDS
