from __future__ import annotations

import platform

import pytest

from stapsdtd.arch import ARCHITECTURES, why_foreign


@pytest.mark.parametrize(
    ("machine", "architecture", "runs"),
    [
        ("x86_64", "x86-64", True),
        ("x86_64", "i386", True),
        ("x86_64", "aarch64", False),
        ("aarch64", "arm", True),
        ("aarch64", "x86-64", False),
        ("sparc64", "x86-64", False),
    ],
)
def test_whose_code_runs_here(machine: str, architecture: str, runs: bool) -> None:
    reason = why_foreign(architecture, machine)
    assert (reason is None) == runs
    if reason is not None:
        assert reason == f"the object's code is for {architecture}, and this host is {machine}"


def test_code_of_this_host_runs_here() -> None:
    own = [name for name, architecture in ARCHITECTURES.items() if architecture.machine == platform.machine()]
    assert own
    assert {why_foreign(name) for name in own} == {None}
    assert why_foreign("sparc64") == f"the object's code is for sparc64, and this host is {platform.machine()}"
