from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.names import Owner
from stapsdtd.kernel import procfs


def test_sample() -> None:
    owner = Owner(4026531836, 4711, 57590)
    assert owner.group == "stapsdtd_4026531836_4711_57590"
    assert owner.instance(3) == "stapsdtd_4026531836_4711_57590_3"


@given(st.builds(Owner, *[st.integers(0, 1 << 62)] * 3), st.integers(0))
def test_names_tell_their_owner(owner: Owner, number: int) -> None:
    assert Owner.of(owner.group) == owner
    assert Owner.of(owner.instance(number)) == owner


@pytest.mark.parametrize(
    "name",
    [
        "",
        "uprobes",
        "stapsdtd_1_2",
        "stapsdtd_1_2_3_4_5",
        "stapsdtd_1_2_x",
        "my_stapsdtd_1_2_3",
        "stapsdtd_1_2_3_",
        "stapsdtd_-1_2_3",
    ],
)
def test_other_peoples_names(name: str) -> None:
    assert Owner.of(name) is None


def test_this_process_lives() -> None:
    owner = Owner.this_process()
    assert owner.pid == os.getpid()
    assert not owner.is_dead()


def test_process_that_ended_is_dead() -> None:
    with subprocess.Popen(["true"]) as process:
        pid = process.pid
    assert Owner(procfs.pid_namespace(), pid, 1).is_dead()


def test_reused_pid_is_another_process() -> None:
    own = Owner.this_process()
    assert Owner(own.pid_namespace, own.pid, own.start_ticks + 1).is_dead()


def test_other_pid_namespaces_cannot_be_judged() -> None:
    own = Owner.this_process()
    assert not Owner(own.pid_namespace + 1, own.pid, own.start_ticks + 1).is_dead()
