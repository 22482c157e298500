"""What one user's objects leave to be removed is that user's alone to wait for."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from stapsdtd.client import SiteState
from stapsdtd.kernel import uprobe_links
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import definitions
from tests.passing import SELECTOR, Passing
from tests.support import Recorder, running_daemon, wait_for
from tests.users import ANNE, BERT, public_folder

pytestmark = [pytest.mark.kernel, pytest.mark.apart, pytest.mark.timeout(240)]

MANY = 300
SAMPLES = 12
SLOWER_AT_MOST = 5
"""./dev bench --only removals has the ratio that is aimed at; this is what a busy host leaves of it."""


def shared_library(folder: Path, library: Path) -> Path:
    shared = folder / "library.so"
    shared.write_bytes(library.read_bytes())
    shared.chmod(0o644)
    return shared


@pytest.mark.skipif(not uprobe_links.are_supported(), reason="as for processes, where the kernel has no links")
def test_links_of_one_users_many_memfds_are_removed_at_once(tracefs: Tracefs, library: Path) -> None:
    with public_folder() as folder:
        shared = shared_library(folder, library)
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Recorder(daemon.target, SELECTOR) as recorder,
            Passing(ANNE, folder, shared) as anne,
            Passing(BERT, folder, shared) as bert,
        ):
            alone = bert.do(f"time {SAMPLES}")
            anne.do(f"hold {MANY}")
            wait_for(lambda: len(recorder.armed()) >= SAMPLES + MANY, "all to be armed", 60)
            anne.do("drop")
            beside = bert.do(f"time {SAMPLES}")
            anne.do(f"hold {MANY}")
            # of those that Bert timed, some may be gone before they are told as armed
            wait_for(lambda: len(recorder.armed()) >= SAMPLES + 2 * MANY, "all to be armed again", 60)
            assert not [status for status in recorder.statuses if status.state is SiteState.REFUSED]
            assert median(beside) <= SLOWER_AT_MOST * median(alone), (alone, beside)
            assert not definitions(tracefs, daemon.pid)


def test_one_users_many_memfds_keep_no_other_from_being_armed(tracefs: Tracefs, library: Path) -> None:
    def events() -> int:
        return sum(group.startswith("stapsdtd_") for group, _ in tracefs.uprobe_events())

    with public_folder() as folder:
        shared = shared_library(folder, library)
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Passing(ANNE, folder, shared) as anne,
            Passing(BERT, folder, shared) as bert,
            Recorder(daemon.target, SELECTOR, pids=[anne.pid, bert.pid]) as recorder,
        ):
            alone = bert.do(f"time {SAMPLES}")
            anne.do(f"hold {MANY}")
            wait_for(lambda: len(recorder.armed()) >= SAMPLES + MANY, "all to be armed", 60)
            anne.do("drop")
            disarmed = SiteState.DISARMED
            wait_for(
                lambda: sum(status.state is disarmed for status in recorder.statuses) >= SAMPLES + MANY,
                "all to be disarmed",
                60,
            )
            # Anne's new ones are refused, as too many of hers are to be removed
            anne.do("hold 1")
            refused = wait_for(
                lambda: [status.reason for status in recorder.statuses if status.state is SiteState.REFUSED],
                "a refusal",
            )
            assert f"objects of uid {ANNE.uid} come and go faster than the kernel removes events" in refused[0]
            beside = bert.do(f"time {SAMPLES}")
            assert all(str(ANNE.uid) in reason for reason in refused)
            assert median(beside) <= SLOWER_AT_MOST * median(alone), (alone, beside)
            assert events() > MANY // 2, "Anne's were to be removed still"
            # so that the daemon's end need not wait for the rest
            wait_for(lambda: events() < 20, "the rest to be removed", 90)
