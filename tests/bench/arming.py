"""What arming and disarming costs: 1,000 sites of one object through the API, beside one tracefs event for each."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from stapsdtd.client import Client
from stapsdtd.elf import parse_object
from stapsdtd.kernel.tracefs import Tracefs
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.support import wait_for

SITES = 1000
SINGLE_EVENTS = 50  # one event for each site costs some 50 ms each to disable, so only so many are tried
_SHAPES = ("", ", i", ", i, v", ', i, "x", v', ", i, 5, v, (short)i", ", i, i + 1, i + 2, v, 7, (char)i")


def program(folder: Path) -> Path:
    """A process with SITES sites in six shapes of arguments, which sleeps until it is killed."""
    lines = ["#include <sys/sdt.h>", "#include <unistd.h>", "void probes(volatile int i, volatile long v) {"]
    for number in range(SITES):
        arguments = _SHAPES[number % len(_SHAPES)]
        count = arguments.count(",") or ""
        lines.append(f"STAP_PROBE{count}(bench, site{number}{arguments});")
    lines += ["}", "int main(int c, char **v) { if (c > 1) probes(c, c); pause(); return 0; }"]
    source = folder / "sites.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-O1", "-o", str(folder / "sites"), str(source)], check=True)
    return folder / "sites"


def run(setup: Setup) -> list[Figure]:
    path = program(setup.folder)
    process = subprocess.Popen([path])
    try:
        with setup.daemon() as daemon, Client(daemon.target) as client:
            subscribe, unsubscribe, enable, disable = [], [], [], []
            for _ in range(setup.repeats):
                armed, disarmed = through_the_api(client)
                subscribe.append(armed)
                unsubscribe.append(disarmed)
                enabled, disabled = _one_event_each(path)
                enable.append(enabled / SINGLE_EVENTS)
                disable.append(disabled / SINGLE_EVENTS)
    finally:
        process.kill()
        process.wait()
    return [
        Figure("Subscribe returns, 1,000 sites", median(subscribe), "s", _ratio(subscribe, enable)),
        Figure("Unsubscribe returns, 1,000 sites", median(unsubscribe), "s", _ratio(unsubscribe, disable)),
        Figure("one tracefs event for each site: enable, a site", median(enable), "s"),
        Figure("one tracefs event for each site: disable, a site", median(disable), "s"),
    ]


def _ratio(ours: list[float], each: list[float]) -> float:
    """Ours for all sites to what as many single events would take."""
    return median(mine / (one * SITES) for mine, one in zip(ours, each, strict=True))


def through_the_api(client: Client) -> tuple[float, float]:
    """Return how long Subscribe and Unsubscribe of all sites take, in seconds."""
    wait_for(lambda: len(client.list_probes(["bench:*"]).probes) == SITES, "the program to be seen")
    begin = time.perf_counter()
    subscription = client.subscribe(["bench:*"])
    armed = time.perf_counter()
    assert len(subscription.sites) == SITES
    subscription.unsubscribe()
    return armed - begin, time.perf_counter() - armed


def _one_event_each(path: Path) -> tuple[float, float]:
    tracefs = Tracefs.locate()
    group = f"bench_{os.getpid()}"
    with open(path, "rb") as file:
        sites = parse_object(file).sites[:SINGLE_EVENTS]
    for number, site in enumerate(sites):
        tracefs.append_definition(f"p:{group}/e{number} {path}:{site.site_offset:#x}")

    def switch(value: str) -> None:
        for number in range(len(sites)):
            tracefs.write(f"events/{group}/e{number}/enable", value)

    try:
        return _timed(lambda: switch("1")), _timed(lambda: switch("0"))
    finally:
        for number in range(len(sites)):
            tracefs.append_definition(f"-:{group}/e{number}")


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
