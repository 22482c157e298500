"""What all tests before this one left in the journal: no traceback, no error, and no system call that was denied."""

from __future__ import annotations

import re

import pytest

from tests.installed import machine

pytestmark = pytest.mark.installed

_SLOW = "the arming thread has been busy or hanging"
"""An emulated processor takes seconds to verify a program."""
_DENIED = re.compile(r"type=1326 .*|SECCOMP .*")
"""Records of the kernel's audit of seccomp (AUDIT_SECCOMP in include/uapi/linux/audit.h)."""


def test_no_traceback() -> None:
    assert not [line for line in machine.journal() if "Traceback" in line]


def test_no_error() -> None:
    assert not [line for line in machine.journal() if " ERROR " in line and _SLOW not in line]


def test_denied_system_calls_are_logged() -> None:
    """Else the next test could not fail."""
    before = machine.cursor()
    denied = ["systemd-run", "--wait", "--quiet", "--property=SystemCallFilter=~@mount"]
    denied += ["--property=SystemCallErrorNumber=EPERM", "/bin/mount", "-t", "tmpfs", "none", "/mnt"]
    machine.run(*denied, check=False)
    assert any('comm="mount"' in line for line in denied_calls(before))


def test_no_system_call_was_denied() -> None:
    ours = [line for line in denied_calls() if "/opt/stapsdtd" in line or 'comm="stapsdt' in line]
    assert not {re.sub(r"pid=\d+|audit\([^)]*\)", "", line).strip() for line in ours}


def denied_calls(cursor: str = "") -> list[str]:
    since = ["--after-cursor", cursor] if cursor else []
    lines = machine.run("journalctl", "--no-pager", "--boot", "--output=cat", *since).stdout.splitlines()
    return [found.group() for line in lines if (found := _DENIED.search(line))]
