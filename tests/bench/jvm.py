"""How long a client waits for the hundreds of sites of OpenJDK's libjvm.so, in a JVM that runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from stapsdtd.client import Client, SiteState
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.support import notes_in, wait_for

_SUBSCRIBE_SECONDS = 0.1
_UNSUBSCRIBE_SECONDS = 0.5


def run(setup: Setup) -> list[Figure]:
    libraries = sorted(Path("/usr/lib/jvm").glob("java-*-openjdk-*/lib/server/libjvm.so"))
    if not libraries:
        print("bench: no OpenJDK (default-jre-headless), so its libjvm.so is left out", file=sys.stderr)
        return []
    library = libraries[-1].resolve()
    sites = notes_in(str(library))
    subscribe: list[float] = []
    unsubscribe: list[float] = []
    with setup.daemon() as daemon, _idle_jvm(library), Client(daemon.target) as client:
        selector = ":libjvm.so::"
        wait_for(lambda: sum(len(probe.sites) for probe in client.list_probes(selector)) == sites, "the JVM to be seen")
        for _ in range(setup.repeats):
            begin = time.perf_counter()
            subscription = client.subscribe(selector)
            armed = time.perf_counter()
            subscription.unsubscribe()
            subscribe.append(armed - begin)
            unsubscribe.append(time.perf_counter() - armed)
            assert [site.state for site in subscription.sites] == [SiteState.ARMED] * sites
    return [
        Figure(
            f"Subscribe returns, {sites} sites of libjvm.so",
            median(subscribe),
            "s",
            None,
            "<= 100 ms",
            median(subscribe) <= _SUBSCRIBE_SECONDS,
        ),
        Figure(
            f"Unsubscribe returns, {sites} sites of libjvm.so",
            median(unsubscribe),
            "s",
            None,
            "<= 500 ms",
            median(unsubscribe) <= _UNSUBSCRIBE_SECONDS,
        ),
    ]


@contextmanager
def _idle_jvm(library: Path) -> Iterator[None]:
    """keytool, which waits for a certificate on standard input."""
    java = library.parents[2] / "bin/java"
    process = subprocess.Popen(
        [java, "-m", "java.base/sun.security.tools.keytool.Main", "-printcert"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()
