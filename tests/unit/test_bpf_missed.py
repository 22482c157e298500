"""What the kernel could not hit is told once, to whoever wanted it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest

from stapsdtd.capture.bpf.armed import ArmedSite, Event, Group
from stapsdtd.capture.bpf.missed import MissedCalls
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.engine import LossStage, Sink
from stapsdtd.kernel.tracefs import Tracefs


class Profile(Tracefs):
    """kprobe_profile, as a test says. lines: event, hits, missed."""

    def __init__(self) -> None:
        super().__init__("/nonexistent")
        self.lines: list[tuple[str, int, int]] = []

    def read(self, relative: str) -> str:
        assert relative == "kprobe_profile"
        return "".join(f"  {name:<44} {hits:>15} {missed:>15}\n" for name, hits, missed in self.lines)


class Lost:
    def __init__(self) -> None:
        self.told: list[tuple[int, LossStage | None]] = []

    def fired(self, count: int) -> None:
        self.told.append((count, None))

    def lost(self, stage: LossStage, count: int) -> None:
        self.told.append((count, stage))


class Program:
    """In place of OwnProgram. skipped: what is to be told."""

    def __init__(self) -> None:
        self.skipped = 0

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped


class Kprobe:
    def __init__(self, name: str, program: Program | None = None) -> None:
        self._name = name
        self.own_program = program

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int:
        return of_events().get(self._name, 0)


class Link:
    own_program = None

    def __init__(self) -> None:
        self.count = 0

    def missed(self, _of_events: Callable[[], Mapping[str, int]]) -> int:
        return self.count


def site(*sinks: Lost, is_of_kernel: bool = True) -> ArmedSite:
    consumers = {number: SimpleNamespace(channel=channel_of(sink)) for number, sink in enumerate(sinks)}
    return cast("ArmedSite", SimpleNamespace(consumers=consumers, object=SimpleNamespace(is_kernel=is_of_kernel)))


@cache
def channel_of(sink: Lost) -> Channel:
    return Channel(0, cast("Sink", sink))


def too_many_open(*_: object) -> str:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def group(event: Kprobe | Link, *sites: ArmedSite) -> Group:
    return Group(cast("Event", event), 1, lambda: None, None, list(sites))


def at_once(work: Callable[[], None]) -> None:
    work()


def test_what_was_missed_since_the_last_time() -> None:
    profile, one, other = Profile(), Lost(), Lost()
    missed = MissedCalls(profile, at_once)
    groups = [group(Kprobe("g0_1"), site(one, other)), group(Kprobe("g1_1"), site(other)), None]
    profile.lines = [("g0_1", 100, 3), ("g1_1", 5, 0), ("somebody_elses", 1, 7)]
    missed.tell(groups)
    missed.tell(groups)
    expected = [(3, None), (3, LossStage.MISSED)]
    assert (one.told, other.told) == (expected, expected)
    profile.lines = [("g0_1", 200, 3), ("g1_1", 9, 2)]
    missed.tell(groups)
    assert (one.told, other.told[2:]) == (expected, [(2, None), (2, LossStage.MISSED)])
    # an event of another's that is not asked about is not told later as if it were new
    missed.tell(groups[:1])
    missed.tell(groups)
    assert len(other.told) == 4


def test_a_link_to_many_functions_tells_each_subscription_once() -> None:
    profile, link, one, other = Profile(), Link(), Lost(), Lost()
    missed = MissedCalls(profile, at_once)
    groups = [group(link, site(one, other), site(one), site(one))]
    missed.tell(groups)
    link.count = 5
    missed.tell(groups)
    # as one that the kernel has removed
    link.count = 0
    missed.tell(groups)
    assert one.told == other.told == [(5, None), (5, LossStage.MISSED)]


def test_what_a_shared_program_skipped_is_told_to_all_who_want_one_of_its_functions() -> None:
    """Once to each, beside what the kernel missed at each function."""
    profile, program, one, other, third = Profile(), Program(), Lost(), Lost(), Lost()
    missed = MissedCalls(profile, at_once)
    groups = [
        group(Kprobe("f", program), site(one)),
        group(Kprobe("g", program), site(one, other)),
        group(Kprobe("h", Program()), site(third)),
    ]
    profile.lines = [("f", 9, 10), ("g", 9, 20), ("h", 9, 0)]
    missed.tell(groups)
    assert [sum(count for count, stage in each.told if stage) for each in (one, other, third)] == [30, 20, 0]
    program.skipped = 3
    for _ in range(2):
        missed.tell(groups)
        assert [sum(count for count, stage in each.told if stage) for each in (one, other, third)] == [33, 23, 0]


def test_what_cannot_be_read_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    """As where this process has no descriptor left, and has to disarm to have some again."""
    profile, program, link, one, other = Profile(), Program(), Link(), Lost(), Lost()
    missed = MissedCalls(profile, at_once)
    groups = [group(Kprobe("f", program), site(one)), group(link, site(other))]
    link.count = 7
    profile.lines, program.skipped = [("f", 9, 10)], 3
    read, take = profile.read, program.take_skipped
    profile.read = program.take_skipped = too_many_open  # type: ignore[assignment]
    missed.tell(groups)
    assert [count for count, stage in other.told if stage] == [7]
    profile.read = read  # type: ignore[method-assign]
    missed.tell(groups)
    program.take_skipped = take  # type: ignore[method-assign]
    missed.tell(groups)
    assert [count for count, stage in one.told if stage] == [10, 3]
    assert len(caplog.messages) == 2


def test_nothing_is_read_where_no_kprobe_is() -> None:
    profile = Profile()
    profile.read = NotImplemented  # type: ignore[method-assign]
    sink = Lost()
    MissedCalls(profile, at_once).tell(
        [group(Kprobe("g"), site(sink, is_of_kernel=False)), group(Link(), site(sink)), None]
    )
