"""Both times of events, also where the host's clock is set."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import TICKER, Daemon, Recorder, Ticker, stapsdt_command, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.vm]

MAY_SET_CLOCK = "STAPSDTD_MAY_SET_CLOCK"
SECOND_NS, HOUR_NS = 10**9, 3600 * 10**9


@contextmanager
def clock_set_by(by_ns: int) -> Iterator[None]:
    time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() + by_ns)
    try:
        yield
    finally:
        time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() - by_ns)


def test_events_have_both_times(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick") as recorder:
        before = time.monotonic_ns()
        ticker.do("fire 3")
        after = time.monotonic_ns()
    ahead_ns = time.time_ns() - time.monotonic_ns()
    for event in recorder.events:
        assert event.monotonic_ns is not None
        assert before < event.monotonic_ns < after
        assert abs(event.time_ns - event.monotonic_ns - ahead_ns) < SECOND_NS


@pytest.mark.skipif(MAY_SET_CLOCK not in os.environ, reason="the host's clock stays as it is: virtual machines only")
def test_events_keep_the_time_that_the_clock_showed(daemon: Daemon, ticker: Ticker) -> None:
    command = stapsdt_command(daemon.target, "trace", f"{TICKER}:tick", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace:
        assert trace.stdout is not None
        assert trace.stderr is not None
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        ticker.do("fire 1")
        before = json.loads(trace.stdout.readline())
        with clock_set_by(HOUR_NS):
            told = json.loads(trace.stderr.readline())["clock_set"]
            ticker.do("fire 1")
            after = json.loads(trace.stdout.readline())
        trace.terminate()
        trace.communicate(timeout=60)
    assert abs(told["by_ns"] - HOUR_NS) < SECOND_NS
    assert before["monotonic_ns"] < told["monotonic_ns"] < after["monotonic_ns"]
    offset_ns, offset_after_ns = (each["time_ns"] - each["monotonic_ns"] for each in (before, after))
    assert offset_after_ns - offset_ns == told["by_ns"]
