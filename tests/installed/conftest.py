"""Every test in this folder is marked, and finds the service as after a boot, with its installed files known."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.installed import machine, system_calls

_LAST = ("test_upgrade.py", "test_journal.py", "test_system_calls.py", "test_capabilities.py", "test_uninstall.py")
"""What replaces the service, looks back at what it said until then, takes rights from it, and takes it away."""
_JOURNAL_LINES = 40
_CURSOR = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LAST.index(item.path.name) if item.path.name in _LAST else -1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if machine.TREE is None:
        pytest.fail(
            "these tests replace and remove what is installed; './dev test --installed' boots a system for them"
        )
    item.stash[_CURSOR] = machine.cursor()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the service said during the test."""
    report = yield
    add_section = getattr(report.longrepr, "addsection", None)
    if report.failed and add_section is not None:
        lines = machine.journal(item.stash.get(_CURSOR, "")) if machine.TREE else []
        add_section(f"journal of {machine.SERVICE}", "\n".join(lines[-_JOURNAL_LINES:]))
        # at once: a guest that goes down later leaves no report
        item.config.get_terminal_writer().line(f"\n{report.longreprtext}")
    return report


@pytest.fixture(scope="session", autouse=True)
def _counted() -> None:
    """Count system calls from before the daemon's start on."""
    machine.systemctl("stop", machine.SERVICE)
    system_calls.count()


@pytest.fixture
def service() -> None:
    """The running service, once it knows the installed files."""
    machine.systemctl("start", machine.SOCKET)
    machine.wait_for_inventory()
