"""A process that floods the daemon costs itself events, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import Recorder, Ticker, running_daemon, wait_for

pytestmark = pytest.mark.kernel

FEW = 60
MANY = 3_000_000


@pytest.mark.parametrize(("kernel_buffer_kib", "queue_bytes"), [(64, 0), (16384, 1 << 20)], ids=["kernel", "queue"])
def test_few_events_of_one_process_all_arrive_beside_a_flood(
    tmp_path: Path, ticker_program: Path, kernel_buffer_kib: int, queue_bytes: int
) -> None:
    with (
        running_daemon(tmp_path, "--engine", "bpf") as daemon,
        Ticker(ticker_program) as flooding,
        Ticker(ticker_program) as quiet,
        Recorder(
            daemon.target,
            f"ticker:{ticker_program}::tick",
            pids=[flooding.pid, quiet.pid],
            kernel_buffer_kib=kernel_buffer_kib,
            queue_bytes=queue_bytes,
        ) as recorder,
    ):
        flooding.begin(f"fire {MANY}")
        wait_for(lambda: recorder.losses, "the flood to be more than can be had")
        for _ in range(FEW):
            seen = len(recorder.events)
            quiet.do("fire 1")
            wait_for(lambda seen=seen: len(recorder.events) > seen, "events")  # type: ignore[misc]
        flooding.finish()
    account = recorder.account
    assert account is not None
    assert sum(event.pid == quiet.pid for event in recorder.events) == FEW
    assert account.lost_kernel_buffer + account.lost_queue == account.lost > 0
    assert account.delivered + account.lost == account.fired == MANY + FEW
