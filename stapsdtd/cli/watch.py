"""`stapsdt watch`: the probes that there are, then how they come and go."""

from __future__ import annotations

import json
import sys

import click

from stapsdtd.cli import options
from stapsdtd.cli.listing import probe_line, probe_record
from stapsdtd.cli.render import complain, is_colourful, paint, plural
from stapsdtd.client import Client, Probe, ProbeAdded, ProbeRemoved, SnapshotComplete

_EXAMPLES = """\b
Examples:
  stapsdt watch 'python*:*'
  stapsdt watch --json | jq -c 'select(.change == "added") | [.provider, .name, .pids]'
"""


@click.command("watch", epilog=_EXAMPLES)
@options.selectors(required=False)
@options.cgroups
@options.containers
@options.as_json
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    cgroups: tuple[str, ...],
    containers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show probes as `list` does, then each that appears (+) or disappears (-), until Ctrl-C."""
    known = 0
    try:
        with Client(server.address, tls=server.tls) as client:
            for message in client.watch_probes(selectors, containers=containers, cgroups=cgroups):
                match message:
                    case ProbeAdded(probe):
                        known += 1
                        _show("added", probe, as_json=as_json)
                    case ProbeRemoved(probe):
                        _show("removed", probe, as_json=as_json)
                    case SnapshotComplete():
                        if not as_json:
                            complain(f"{plural(known, 'probe')} now; waiting for changes, Ctrl-C ends")
    except KeyboardInterrupt:
        return


def _show(change: str, probe: Probe, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(probe_record(probe) | {"change": change}), flush=True)
        return
    line = f"+\t{probe_line(probe)}" if change == "added" else f"-\t{probe_line(probe)}"
    colour = "green" if change == "added" else "red"
    print(paint(line, colour, colourful=is_colourful(sys.stdout)), flush=True)
