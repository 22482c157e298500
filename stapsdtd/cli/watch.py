"""`stapsdt watch`: shows the probes in running programs, then changes. On a terminal:

TIME         OBJECT                            PROBES  PROCESSES
14:03:07  +  libjvm.so                            517  java (1234)
14:05:12  -  libjvm.so                            517  java (1234)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import click

from stapsdtd.cli import options
from stapsdtd.cli.following import set_on_signals
from stapsdtd.cli.listing import probe_line, probe_record
from stapsdtd.cli.render import abbreviate, paint, plural, print_stderr, terminal_width, wants_color, write_lines
from stapsdtd.cli.trace_output import Notice, notice_of, print_notice
from stapsdtd.client import (
    AsyncClient,
    ClientError,
    Interruption,
    ProbeAdded,
    ProbeRemoved,
    Resubscribed,
    SnapshotComplete,
)
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping

    from stapsdtd.client import WatchMessage

_T = TypeVar("_T")
_Shown = ProbeAdded | ProbeRemoved | SnapshotComplete

_PAUSE_SECONDS = 0.05
_MAX_SHOWN_PROCESSES = 3
_SIGNS = {ProbeAdded: "+", ProbeRemoved: "-"}

_EXAMPLES = """\b
Examples:
  stapsdt watch 'python*:*'
  stapsdt watch --json | jq -c 'select(.change == "added") | [.provider, .name, .pids]'
"""


@click.command("watch", epilog=_EXAMPLES)
@options.selectors(required=False)
@options.cgroups
@options.containers
@options.no_retry
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
    """Show probes as `list` does, then each that appears (+) or disappears (-), until Ctrl-C.

    On a terminal, all probes of an object are one line.
    """

    async def watch() -> None:
        stop = asyncio.Event()
        with set_on_signals(stop):
            async with AsyncClient(server.address, tls=server.tls) as client:
                probes = client.watch_probes(
                    selectors, containers=containers, cgroups=cgroups, resubscribe=server.retries
                )
                messages = _told(probes, as_json=as_json)
                is_table = sys.stdout.isatty() and not as_json
                showing = _show_objects(messages, client) if is_table else _show_probes(messages, as_json=as_json)
                await _run_until(stop, showing)

    asyncio.run(watch())


async def _run_until(stop: asyncio.Event, showing: Coroutine[object, object, None]) -> None:
    task, stopping = asyncio.create_task(showing), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        task.cancel()
        stopping.cancel()


async def _told(messages: AsyncIterator[WatchMessage], *, as_json: bool) -> AsyncIterator[_Shown]:
    """Yield messages about probes, and tell of interruptions."""
    async for message in messages:
        match message:
            case Interruption():
                print_notice(notice_of(message), as_json=as_json)
            case Resubscribed(seconds=seconds):
                text = f"watching again after {seconds:.1f} s, what came and went in between is not shown"
                print_notice(Notice(text, {"watching_again_after_seconds": seconds}), as_json=as_json)
            case _:
                yield message


async def _show_probes(messages: AsyncIterator[_Shown], *, as_json: bool) -> None:
    count = 0
    async for message in messages:
        match message:
            case ProbeAdded(probe) | ProbeRemoved(probe):
                count += 1
                write_lines([_json_line(message) if as_json else f"{_SIGNS[type(message)]}\t{probe_line(probe)}"])
            case SnapshotComplete() if not as_json:
                _say_complete(count)


def _json_line(change: ProbeAdded | ProbeRemoved) -> str:
    kind = "added" if isinstance(change, ProbeAdded) else "removed"
    return json.dumps(probe_record(change.probe) | {"change": kind})


def _say_complete(count: int) -> None:
    print_stderr(f"{plural(count, 'probe')} now; waiting for changes, Ctrl-C stops")


async def _show_objects(messages: AsyncIterator[_Shown], client: AsyncClient) -> None:
    commands: dict[int, str] = {}
    count = 0
    color = wants_color(sys.stdout)
    print(paint(HEADING, "dim", color=color), flush=True)
    async for batch in batches(messages, _PAUSE_SECONDS):
        changes = [message for message in batch if not isinstance(message, SnapshotComplete)]
        await _add_commands(commands, {pid for change in changes for pid in change.probe.pids}, client)
        clock = time.strftime("%H:%M:%S")
        width = terminal_width(sys.stdout)
        for line in object_lines(changes, clock, commands, width=width):
            print(paint(line, "green" if line.startswith("+", len(clock) + 2) else "red", color=color), flush=True)
        if len(changes) < len(batch):
            _say_complete(count + len(changes))
        count += len(changes)


async def _add_commands(commands: dict[int, str], pids: set[int], client: AsyncClient) -> None:
    """Ask for the commands of processes that are not known yet. Some may have ended meanwhile."""
    unknown = pids - commands.keys()
    if not unknown:
        return
    commands.update(dict.fromkeys(unknown, ""))
    # the change is shown without them
    with suppress(ClientError):
        listing = await client.list_probes((), unknown, details=True)
        commands.update((process.pid, process.comm) for process in listing.processes)


async def batches(messages: AsyncIterator[_T], pause: float) -> AsyncIterator[list[_T]]:
    """Yield messages in lists, each of those that came within pause seconds of one another."""
    batch: list[_T] = []
    following = asyncio.ensure_future(anext(messages, None))
    try:
        while True:
            await asyncio.wait({following}, timeout=pause if batch else None)
            if not following.done():
                yield batch
                batch = []
                continue
            message = following.result()
            if message is None:
                break
            batch.append(message)
            following = asyncio.ensure_future(anext(messages, None))
    finally:
        following.cancel()
    if batch:
        yield batch


HEADING = f"{'TIME':<8}     {'OBJECT':<32}  {'PROBES':>6}  PROCESSES"


def object_lines(
    changes: Iterable[ProbeAdded | ProbeRemoved], clock: str, commands: Mapping[int, str], *, width: int | None
) -> Iterator[str]:
    """Format changes, a line for consecutive ones of an object. commands: of processes, where known."""
    for _, group in groupby(changes, _object_key):
        first, *others = group
        names = [f"{commands[pid]} ({pid})" if commands.get(pid) else str(pid) for pid in first.probe.pids]
        processes = abbreviate(names, _MAX_SHOWN_PROCESSES)
        module = f"{escape(first.probe.module):<32}"
        yield f"{clock}  {_SIGNS[type(first)]}  {module}  {1 + len(others):>6}  {escape(processes)}"[:width]


def _object_key(change: ProbeAdded | ProbeRemoved) -> tuple[object, ...]:
    probe = change.probe
    return type(change), probe.path, probe.build_id, probe.pids
