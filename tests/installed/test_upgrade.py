"""`./dev install` where an older stapsdtd runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.installed import machine, system_calls
from tests.installed.machine import ALICE, FIRE

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

HITS = 500
_SETTINGS = Path("/etc/stapsdtd/stapsdtd.toml")


@pytest.mark.timeout(1800)
def test_upgrade_with_a_subscription_open() -> None:
    before = machine.main_pid()
    inode = os.stat("/opt/stapsdtd/bin/python3").st_ino
    _SETTINGS.write_text(_SETTINGS.read_text() + "# kept\n")
    with machine.tracing("count", "heldout:hit", "--json", "--no-retry", user=ALICE) as counting:
        machine.run(FIRE, str(HITS), user=ALICE)
        with system_calls.paused():
            said = machine.dev("install")
        done = counting.wait()
    assert "the first client" in said or "installed" in said
    # what was counted until then is shown, and why it is over
    assert machine.counted(done) == HITS, done.stderr
    assert "the server stopped" in done.stderr
    assert done.returncode == 1
    assert _SETTINGS.read_text().endswith("# kept\n")
    assert os.stat("/opt/stapsdtd/bin/python3").st_ino != inode
    machine.wait_for_another(before)
    assert not machine.left_by(before)
    assert machine.count("--", FIRE, str(HITS), user=ALICE) == HITS
