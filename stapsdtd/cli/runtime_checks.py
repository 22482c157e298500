"""`stapsdt doctor RUNTIME`: which probes the runtimes on this host have.

ok       CPython 3.11.2: /usr/bin/python3.11 has 8 probes of python
missing  CPython 3.12.1: /opt/python/bin/python3.12 has no probes: it was configured without --with-dtrace
configure it --with-dtrace, which needs dtrace of systemtap-sdt-dev, or use Debian's own python3
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stapsdtd.cli.check import Check
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.render import abbreviate, plural
from stapsdtd.cli.runtimes import NO_NOTES, RUNTIMES, Installed, Runtime, installed, running
from stapsdtd.cli.silence import conditions
from stapsdtd.client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stapsdtd.cli.options import Server
    from stapsdtd.signatures import Catalog

_TIMEOUT_SECONDS = 10.0
_MAX_PIDS = 5


def check_runtime(name: str, server: Server) -> list[Check]:
    """Return what there is of a runtime: in $PATH first, then what runs without probes."""
    runtime, known = RUNTIMES[name], catalog()
    found = installed(runtime, os.environ.get("PATH", ""))
    with Client(server.address, tls=server.tls, timeout_seconds=_TIMEOUT_SECONDS) as client:
        lacking = list(_running(client, runtime, {file for each in found for file in each.files}))
        checks = [_installed(client, each, runtime, known) for each in found] + lacking
    remedy = "install it, or add its folder to $PATH"
    return checks or [Check(name, False, False, "there is none in $PATH, and none runs", remedy)]


def _installed(client: Client, each: Installed, runtime: Runtime, known: Catalog) -> Check:
    for file in each.files:
        try:
            listing = client.list_probes(files=[file])
        except ClientError as error:
            if str(error).endswith(NO_NOTES):
                continue
            return Check(each.name, False, False, f"cannot be checked: {error}", "")
        if probes := [probe for probe in listing if probe.provider in runtime.providers]:
            providers = " and ".join(sorted({probe.provider for probe in probes}))
            when = conditions(known, ((probe.provider, probe.name) for probe in probes))
            told = f"{file} has {plural(len(probes), 'probe')} of {providers}"
            return Check(each.name, True, False, "; ".join([told, *when]), "")
    return Check(each.name, False, False, f"{each.files[0]} has no probes: {each.cause}", each.remedy)


def _running(client: Client, runtime: Runtime, asked: set[str]) -> Iterator[Check]:
    """Check processes that run it, apart from the files of which all is told. asked: these."""
    processes = running(runtime)
    processes.pop(os.getpid(), None)
    listing = client.list_probes([f"{provider}:*" for provider in runtime.providers])
    probed = {pid for probe in listing for pid in probe.pids}
    lacking: dict[str, list[str]] = {}
    for pid, program in sorted(processes.items()):
        if pid not in probed and program not in asked:
            lacking.setdefault(program, []).append(str(pid))
    for program, pids in lacking.items():
        remedy = f"to be told why, type: stapsdt doctor {pids[0]}"
        yield Check(program, False, False, f"runs without probes ({abbreviate(pids, _MAX_PIDS)})", remedy)
