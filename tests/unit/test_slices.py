"""How long shared threads work at a stretch is told."""

from __future__ import annotations

import time

from stapsdtd.runtime.control_thread import ControlThread
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.latency import BOUNDS, Latency

WORK_SECONDS = 0.03


def work() -> None:
    until = time.thread_time() + WORK_SECONDS
    while time.thread_time() < until:
        pass


def longer(slices: Latency, seconds: float) -> int:
    counts = slices.distribution().counts
    return sum(count for bound, count in zip([0.0, *BOUNDS], counts, strict=True) if bound >= seconds)


def test_each_turn_of_a_loop_is_a_slice() -> None:
    control = ControlThread()
    control.call(work)
    # measured when the loop waits again
    control.call(lambda: None)
    assert longer(control.slices, 0.025) == 1
    control.call(lambda: time.sleep(WORK_SECONDS))
    control.call(lambda: None)
    assert longer(control.slices, 0.025) == 1
    control.stop()


def test_each_piece_of_work_is_a_slice() -> None:
    thread = FairThread("fair")
    for _ in range(3):
        thread.submit(Queue("a"), work)
    thread.stop()
    assert longer(thread.slices, 0.025) == 3
