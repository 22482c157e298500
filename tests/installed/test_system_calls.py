"""The unit's filter of system calls, and those that all tests before this one had the daemon and its children make."""

from __future__ import annotations

import pytest

from tests.installed import machine, system_calls

pytestmark = pytest.mark.installed

_ANSWERED = {"clone3", "mmap", "uprobe", "336"}
"""What is denied to who has another way: RestrictNamespaces= leaves only clone() to glibc, MemoryDenyWriteExecute= no
memory that is writable and executable to libffi, and the trial of nops takes a filter's answer to uprobe(), which this
system's headers may not name, for none.
"""


def test_denied_ones_are_logged() -> None:
    """Else the next test could not fail."""
    before = machine.cursor()
    denied = ["systemd-run", "--wait", "--quiet", "--property=SystemCallFilter=~@mount"]
    denied += ["--property=SystemCallErrorNumber=EPERM", "/bin/mount", "-t", "tmpfs", "none", "/mnt"]
    machine.run(*denied, check=False)
    # of util-linux's versions, some begin with fsopen()
    assert {name for program, name in system_calls.denied(before) if program == "/usr/bin/mount"} & {"mount", "fsopen"}


def test_none_was_denied() -> None:
    ours = {name for program, name in system_calls.denied() if not program.startswith("/usr/")}
    assert ours - _ANSWERED == set()


def test_the_filter_allows_all_that_were_made() -> None:
    allowed = set(machine.show("SystemCallFilter").split())
    made = system_calls.made()
    assert len(made) > 50
    assert made - allowed == set()


def test_all_that_the_unit_adds_were_made() -> None:
    """Those of the filter that are in no set of systemd's."""
    added = {word for word in machine.unit_setting("SystemCallFilter") if not word.startswith("@")}
    assert added
    assert added - system_calls.made() == set()
