from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from stapsdtd.capture.ftrace.executor import Executor
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.model import Register
from stapsdtd.plan.events import EventSpec, group_sites
from stapsdtd.plan.steps import Define, Disable, Enable, EventState, Remove, Step, changes
from tests.unit.fake_tracefs import FakeTracefs
from tests.unit.samples import argument, captured, key, site

GROUP = "stapsdtd_1_2_3"


def spec_of(inode: int, sites: int = 2, instance: str = "a") -> EventSpec:
    captures = [
        captured(site(f"n{number}", 0x10 * number, [argument(Register("rdi"))], semaphore=0x30 if number else None))
        for number in range(sites)
    ]
    (spec,) = group_sites(instance, key(inode), "x86-64", captures)
    return spec


FIRST, SECOND, THIRD = (spec_of(inode) for inode in range(3))


@pytest.fixture
def tracefs(tmp_path: Path) -> FakeTracefs:
    fake = FakeTracefs(tmp_path)
    fake.make_instance("a")
    fake.attempts.clear()
    return fake


@pytest.fixture
def executor(tracefs: FakeTracefs) -> Executor:
    return Executor(tracefs, GROUP)


def test_lines_that_are_written(tracefs: FakeTracefs, executor: Executor) -> None:
    executor.run([Define(FIRST), Enable(FIRST), Disable(FIRST)], "/proc/self/fd/7")
    assert tracefs.attempts == [
        rf"uprobe_events p:{GROUP}/e0_1_2_3 /proc/self/fd/7:0x0 site=\0:u32 comm=$comm q0=%di:u64",
        rf"uprobe_events p:{GROUP}/e0_1_2_3 /proc/self/fd/7:0x10(0x30) site=\1:u32 comm=$comm q0=%di:u64",
        f"instances/a/events/{GROUP}/e0_1_2_3/enable 1",
        f"instances/a/events/{GROUP}/e0_1_2_3/enable 0",
    ]
    assert executor.state() == {FIRST: EventState.DISABLED}
    assert executor.installed[FIRST].format == tracefs.format_of("e0_1_2_3")


def test_event_is_removed_when_its_instance_is_gone(tracefs: FakeTracefs, executor: Executor) -> None:
    executor.run([Define(FIRST), Enable(FIRST)], "f")
    executor.run(changes(set(), executor.state()))
    assert executor.state() == {FIRST: EventState.DISABLED}
    assert tracefs.definitions
    tracefs.remove_instance("a")
    executor.instance_gone("b")
    assert executor.state() == {FIRST: EventState.DISABLED}
    executor.instance_gone("a")
    executor.run(changes(set(), executor.state()))
    assert executor.state() == {}
    assert tracefs.definitions == {}


def test_names_are_not_used_again(tracefs: FakeTracefs, executor: Executor) -> None:
    names = []
    for _ in range(3):
        executor.run([Define(FIRST)], "f")
        names += list(tracefs.definitions)
        executor.run([Remove(FIRST)])
    assert len(set(names)) == 3


ARMING: list[Step] = [Define(FIRST), Define(SECOND), Enable(FIRST), Enable(SECOND), Define(THIRD), Enable(THIRD)]
ATTEMPTS = 9  # three events of two sites are defined and enabled


@pytest.mark.parametrize("failing", range(ATTEMPTS))
def test_all_or_nothing(tracefs: FakeTracefs, executor: Executor, failing: int) -> None:
    counter = itertools.count()
    refused: list[str] = []

    def refuse(_path: str, line: str) -> bool:
        if next(counter) == failing:
            refused.append(line)
            return True
        return False

    tracefs.refuse = refuse
    with pytest.raises(TracefsRejectedError) as raised:
        executor.run(ARMING, "f")
    assert [raised.value.line] == refused
    assert tracefs.enabled == set()
    # what was never enabled is gone; what was stays defined, since its removal would empty the ring
    touched = {name for _, name in tracefs.touched}
    assert set(tracefs.definitions) == touched == {executor.installed[spec].name for spec in executor.state()}
    assert set(executor.state().values()) <= {EventState.DISABLED}
    tracefs.refuse = lambda _path, _line: False
    executor.run(changes({FIRST, SECOND, THIRD}, executor.state()), "f")
    assert set(executor.state().values()) == {EventState.ENABLED}
    assert len(tracefs.enabled) == len(tracefs.definitions) == 3


def test_number_of_attempts(tracefs: FakeTracefs, executor: Executor) -> None:
    executor.run(ARMING, "f")
    assert len(tracefs.attempts) == ATTEMPTS


def test_undo_goes_backwards(tracefs: FakeTracefs, executor: Executor) -> None:
    tracefs.refuse = lambda path, _line: path.endswith("e2_1_2_3/enable")
    with pytest.raises(TracefsRejectedError):
        executor.run(ARMING, "f")
    assert [attempt.rsplit("/", 1)[-1] for attempt in tracefs.attempts[-3:]] == ["e2_1_2_3", "enable 0", "enable 0"]
    assert [attempt.split("/")[-2] for attempt in tracefs.attempts[-2:]] == ["e1_1_2_3", "e0_1_2_3"]


def test_undo_that_fails_too_does_not_hide_the_first_error(tracefs: FakeTracefs, executor: Executor) -> None:
    tracefs.refuse = lambda _path, line: line.startswith("-:") or "/e2_" in line
    with pytest.raises(TracefsRejectedError) as raised:
        executor.run([Define(FIRST), Define(SECOND), Define(THIRD)], "f")
    assert raised.value.line.startswith("p:")
    # what could not be removed is still known, and is removed another time
    tracefs.refuse = lambda _path, _line: False
    executor.run(changes(set(), executor.state()))
    assert tracefs.definitions == {}


def test_error_of_another_kind_is_undone_too(tracefs: FakeTracefs, executor: Executor) -> None:
    executor.run([Define(FIRST)], "f")
    tracefs.refuse_reads = OSError(24, "Too many open files")
    with pytest.raises(OSError, match="Too many open files"):
        executor.run([Enable(FIRST), Define(SECOND)], "f")
    assert tracefs.enabled == set()
    assert list(tracefs.definitions) == ["e0_1_2_3"]


def test_hits_are_those_of_the_instances_own_events(tracefs: FakeTracefs, executor: Executor) -> None:
    other = spec_of(1, instance="b")
    executor.run([Define(FIRST), Define(other), Define(SECOND)], "f")
    tracefs.hits = {"e0_1_2_3": 5, "e1_1_2_3": 100, "e2_1_2_3": 7, "somebody_elses": 1000}
    assert executor.hits("a") == 12
    assert executor.hits("b") == 100
    assert executor.hits("c") == 0
