"""What arming single processes costs, by perf events and by links to uprobes, which take their place where perf is
refused: Subscribe and Unsubscribe of one site in 1, 10 and 100 processes.
"""

from __future__ import annotations

import subprocess
import time
from statistics import median

from stapsdtd.client import Client, SubscribeOptions
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.refusing import refusing
from tests.support import compile_target, wait_for

_PROCESSES = 1, 10, 100
_SELECTOR = "ticker:tick"


def run(setup: Setup) -> list[Figure]:
    program = compile_target("ticker.c", setup.folder / "ticker")
    running = [
        subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(max(_PROCESSES))
    ]
    try:
        pids = [process.pid for process in running]
        with setup.daemon() as daemon:
            by_events = _measured(daemon.target, pids, setup.repeats)
        with setup.daemon(prefix=refusing("perf_event_open")) as daemon:
            by_links = _measured(daemon.target, pids, setup.repeats)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    figures = []
    for (count, call), seconds in by_links.items():
        beside = by_events[count, call]
        of = f"{call} of {count} processes"
        figures += [
            Figure(f"{of}, links", seconds, "s", seconds / beside),
            Figure(f"{of}, perf events", beside, "s"),
        ]
    return figures


def _measured(target: str, pids: list[int], repeats: int) -> dict[tuple[int, str], float]:
    """Return medians in seconds, by the number of processes and the call."""
    medians = {}
    with Client(target) as client:
        wait_for(lambda: client.list_probes([_SELECTOR], pids=pids[-1:]).probes, "the programs to be seen")
        for count in _PROCESSES:
            subscribing, unsubscribing = [], []
            for _ in range(repeats):
                begin = time.perf_counter()
                subscription = client.subscribe(_SELECTOR, SubscribeOptions(pids=pids[:count]))
                armed = time.perf_counter()
                subscription.unsubscribe()
                subscribing.append(armed - begin)
                unsubscribing.append(time.perf_counter() - armed)
            medians[count, "Subscribe"] = median(subscribing)
            medians[count, "Unsubscribe"] = median(unsubscribing)
    return medians
