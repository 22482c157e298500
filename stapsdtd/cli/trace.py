"""`stapsdt trace`: print what fires, until somebody has seen enough, and then account for every event.

Unsubscribe is called while the stream is open. It returns when the probes are disarmed; the stream goes on with what
had fired until then, and its End carries the account. With --count the rest is not read: Unsubscribe's own account
tells how much it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.render import complain, discard_output
from stapsdtd.cli.trace_output import HumanOutput, JsonOutput, Output, Summary
from stapsdtd.client import (
    AsyncClient,
    AsyncSubscription,
    ClientError,
    End,
    EndReason,
    EventBatch,
    Interruption,
    Loss,
    NotFoundError,
    SiteState,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


_LEASE_SECONDS = 5
"""How long probes stay armed when this command is killed; also how long a connection may be broken."""

_EXAMPLES = """\b
Examples:
  stapsdt trace 'postgresql:query__start(arg0:str)'
  stapsdt trace 'python*:function__entry(arg0:str,arg1:str)' --pid 4711 --count 100
  stapsdt trace 'ticker:tick' --where 'arg0 >= 1000 && (arg1 & 0xff) == 3'
  stapsdt trace 'libc:*' --duration 10 --json > events.jsonl
"""


@click.command("trace", epilog=_EXAMPLES)
@options.selectors(required=True)
@options.pids
@options.uids
@options.execnames
@options.cgroups
@options.containers
@click.option(
    "--where",
    metavar="EXPR",
    default="",
    help="Only events that satisfy EXPR, such as 'arg0 > 100 && execname != \"psql\"'.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option(
    "--duration",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End SECONDS after all is armed.",
)
@click.option(
    "--buffer",
    "kernel_buffer_kib",
    type=click.IntRange(min=1),
    metavar="KIB",
    help="Kernel buffer per CPU, for bursts.",
)
@click.option(
    "--queue",
    "queue_bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="How much the server keeps when this end is slow.",
)
@options.as_json
@click.pass_obj
def command(
    server: str,
    *,
    selectors: tuple[str, ...],
    pids: tuple[int, ...],
    uids: tuple[int, ...],
    execnames: tuple[str, ...],
    cgroups: tuple[str, ...],
    containers: tuple[str, ...],
    where: str,
    count: int | None,
    duration: float | None,
    kernel_buffer_kib: int | None,
    queue_bytes: int | None,
    as_json: bool,
) -> int:
    """Print each event of the probes that match, now or when they appear, until Ctrl-C.

    Arguments are integers as the probe declares them unless the selector names those it wants in parentheses:
    (arg0:str) is the string that argument 0 points to, (arg0:str[256]) no more than 256 bytes of it.

    EXPR compares arg0, arg1, ..., pid, tid, uid, gid, execname and cgroup with constants (== != < <= > >=), takes bits
    (arg1 & 0x40), and combines with && || ! and parentheses. Where several of --pid, --uid, --execname, --cgroup,
    --container and --where are given, all of them have to be met.

    It ends with a summary on standard error: how many events were delivered, were filtered out, or got lost.
    """

    async def subscribe(client: AsyncClient) -> AsyncSubscription:
        return await client.subscribe(
            selectors,
            pids=pids,
            # Its own probes (CPython has some) would fire at every line that it prints.
            exclude_pids=[os.getpid()],
            uids=uids,
            execnames=execnames,
            cgroups=cgroups,
            containers=containers,
            where=where,
            lease_seconds=_LEASE_SECONDS,
            queue_bytes=queue_bytes or 0,
            kernel_buffer_kib=kernel_buffer_kib or 0,
        )

    async def trace() -> int:
        stop = asyncio.Event()
        output: Output = JsonOutput() if as_json else HumanOutput()
        with _set_by_signals(stop):
            async with AsyncClient(server) as client, await subscribe(client) as subscription:
                output.begin(subscription.sites)
                return await _follow(subscription, output, stop, count=count, duration=duration)

    return asyncio.run(trace())


async def _follow(
    subscription: AsyncSubscription,
    output: Output,
    stop: asyncio.Event,
    *,
    count: int | None,
    duration: float | None,
) -> int:
    """The exit code, when the events have been printed to the end that was asked for, or came by itself."""
    printer = _Printer(output, count)
    printing = asyncio.create_task(printer.run(subscription))
    stopping = asyncio.create_task(stop.wait())
    failure: str | None = None
    try:
        await asyncio.wait({printing, stopping}, timeout=duration, return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            await printing
            await subscription.unsubscribe()
        else:
            await subscription.unsubscribe()
            # A stream that broke just now finds no subscription any more; the account tells what it missed.
            with suppress(NotFoundError):
                await printing
    except ClientError as error:
        failure = str(error)
    finally:
        printing.cancel()
        stopping.cancel()
    if subscription.end and subscription.end.reason is not EndReason.UNSUBSCRIBED:
        failure = _UNWANTED_ENDS[subscription.end.reason]
    if failure:
        complain(failure)
    output.end(_summary(subscription, printer.printed))
    return 1 if failure else 0


_UNWANTED_ENDS = {
    EndReason.SERVER_STOPPING: "the server stopped: start the trace again when it is back",
    EndReason.LEASE_EXPIRED: "the server heard nothing for too long and ended the subscription: start it again",
    EndReason.ACCESS_REVOKED: "the server's policy changed and does not allow it any more",
}


class _Printer:
    def __init__(self, output: Output, count: int | None) -> None:
        self._output = output
        self._count = count
        self.printed = 0

    async def run(self, subscription: AsyncSubscription) -> None:
        """Returns after the End, after count events, or when nobody reads any more."""
        async for message in subscription.messages():
            try:
                match message:
                    case EventBatch(events):
                        shown = events if self._count is None else events[: self._count - self.printed]
                        self._output.events(shown)
                        self.printed += len(shown)
                    case Loss():
                        self._output.loss(message)
                    case Status(sites):
                        self._output.changed(sites)
                    case Interruption(error):
                        self._output.interrupted(error, subscription.lease_seconds)
                    case End():
                        return
            except BrokenPipeError:
                discard_output()
                return
            if self.printed == self._count:
                return


def _summary(subscription: AsyncSubscription, printed: int) -> Summary:
    """From the final account, or where the connection was lost before it came, from what the stream had told."""
    sites = subscription.sites_armed
    refused = sum(each.state is SiteState.REFUSED for each in subscription.sites)
    account = subscription.account
    if account is None:
        by_stage = {stage.value: count for stage, count in subscription.lost.items()}
        return Summary(printed, 0, by_stage, sites, refused, unread=0)
    return Summary(
        delivered=printed,
        filtered=account.filtered,
        lost_by_stage={
            "kernel_buffer": account.lost_kernel_buffer,
            "queue": account.lost_queue,
            "decode": account.lost_decode,
            "quota": account.lost_quota,
        },
        sites=sites,
        refused=refused,
        unread=account.fired - account.filtered - account.lost - printed,
    )


@contextmanager
def _set_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Sets stop at the first SIGINT or SIGTERM; a second one kills, whatever goes on."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
