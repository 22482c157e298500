from __future__ import annotations

import platform

import pytest

from stapsdtd.arch import why_foreign


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
def test_whose_code_runs_here(machine: str, architecture: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    reason = why_foreign(architecture)
    assert (reason is None) == runs
    if reason is not None:
        assert reason == f"the object's code is for {architecture}, and this host is {machine}"
