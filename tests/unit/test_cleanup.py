from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stapsdtd.capture.cleanup import clean_up
from stapsdtd.capture.ftrace.executor import Executor
from stapsdtd.capture.names import Owner
from stapsdtd.kernel import procfs
from stapsdtd.plan.events import EventSpec, group_sites
from stapsdtd.plan.steps import Define, Enable
from tests.unit.fake_tracefs import FakeTracefs
from tests.unit.samples import captured, key, site


@pytest.fixture
def tracefs(tmp_path: Path) -> FakeTracefs:
    return FakeTracefs(tmp_path)


def dead_owner() -> Owner:
    with subprocess.Popen(["true"]) as process:
        return Owner(procfs.pid_namespace(), process.pid, 1)


def install(tracefs: FakeTracefs, owner: Owner, events: int) -> None:
    """What a daemon has at work: one instance with events enabled in it."""
    instance = owner.instance(1)
    tracefs.make_instance(instance)
    executor = Executor(tracefs, owner.group)
    for inode in range(events):
        spec = spec_of(instance, inode)
        executor.run([Define(spec), Enable(spec)], "f")


def spec_of(instance: str, inode: int) -> EventSpec:
    captures = [captured(site("a", 1)), captured(site("b", 2))]
    (spec,) = group_sites(instance, key(inode), "x86-64", captures)
    return spec


def test_only_what_dead_daemons_left_is_removed(tracefs: FakeTracefs) -> None:
    living, dead, elsewhere = Owner.this_process(), dead_owner(), Owner(1, 1, 1)
    for owner in (living, dead, elsewhere):
        install(tracefs, owner, 2)
    tracefs.make_instance("somebody_elses")
    cleaned = clean_up(tracefs)
    assert (cleaned.instances, cleaned.events, cleaned.failures) == (1, 2, ())
    assert set(tracefs.instances()) == {living.instance(1), elsewhere.instance(1), "somebody_elses"}
    assert {group for group, _ in tracefs.uprobe_events()} == {living.group, elsewhere.group}
    assert clean_up(tracefs) == type(cleaned)(0, 0, ())


def test_what_the_kernel_refuses_is_told_and_the_rest_is_done(tracefs: FakeTracefs) -> None:
    first, second = dead_owner(), dead_owner()
    install(tracefs, first, 1)
    install(tracefs, second, 1)
    tracefs.refuse = lambda _path, line: line == f"rmdir {first.instance(1)}"
    cleaned = clean_up(tracefs)
    assert (cleaned.instances, cleaned.events) == (1, 1)
    # the event of an instance that stays is enabled, so it stays too
    assert len(cleaned.failures) == 2
    assert "the test refuses" in cleaned.failures[0]
    assert tracefs.instances() == [first.instance(1)]
    assert [group for group, _ in tracefs.uprobe_events()] == [first.group]
