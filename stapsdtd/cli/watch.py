"""`stapsdt watch`: shows the probes in running programs, then changes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.following import set_on_signals
from stapsdtd.cli.listing import probe_line, probe_record
from stapsdtd.cli.render import paint, plural, print_stderr, wants_color, write_lines
from stapsdtd.client import AsyncClient, Probe, ProbeAdded, ProbeRemoved, SnapshotComplete

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stapsdtd.client import WatchMessage

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

    async def watch() -> None:
        stop = asyncio.Event()
        with set_on_signals(stop):
            async with AsyncClient(server.address, tls=server.tls) as client:
                messages = client.watch_probes(selectors, containers=containers, cgroups=cgroups)
                await _show_until(stop, messages, as_json=as_json)

    asyncio.run(watch())


async def _show_until(stop: asyncio.Event, messages: AsyncIterator[WatchMessage], *, as_json: bool) -> None:
    showing, stopping = asyncio.create_task(_show_all(messages, as_json=as_json)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({showing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if showing.done():
            await showing
    finally:
        showing.cancel()
        stopping.cancel()


async def _show_all(messages: AsyncIterator[WatchMessage], *, as_json: bool) -> None:
    count = 0
    async for message in messages:
        match message:
            case ProbeAdded(probe):
                count += 1
                _show("added", probe, as_json=as_json)
            case ProbeRemoved(probe):
                _show("removed", probe, as_json=as_json)
            case SnapshotComplete():
                if not as_json:
                    print_stderr(f"{plural(count, 'probe')} now; waiting for changes, Ctrl-C stops")


def _show(change: str, probe: Probe, *, as_json: bool) -> None:
    if as_json:
        write_lines([json.dumps(probe_record(probe) | {"change": change})])
        return
    line = f"+\t{probe_line(probe)}" if change == "added" else f"-\t{probe_line(probe)}"
    style = "green" if change == "added" else "red"
    write_lines([paint(line, style, color=wants_color(sys.stdout))])
