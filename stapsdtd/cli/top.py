"""`stapsdt top`: shows the busiest probes and processes, live."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.command import started
from stapsdtd.cli.command_line import WithCommandLine, in_one_argument
from stapsdtd.cli.following import follow, set_on_signals, summary_of
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.render import discard_output, print_stderr
from stapsdtd.cli.signatures import resolve
from stapsdtd.cli.top_output import output_for
from stapsdtd.cli.top_rates import Rates
from stapsdtd.cli.unmatched import Wanted, subscribed
from stapsdtd.client import (
    AsyncClient,
    AsyncSubscription,
    ColumnBatch,
    Encoding,
    Interruption,
    SiteState,
)

if TYPE_CHECKING:
    from stapsdtd.cli.command import Run
    from stapsdtd.cli.top_output import Output
    from stapsdtd.cli.unmatched import Hints
    from stapsdtd.subscribe_options import SubscribeOptions

_EVERYTHING = "*:*"

_EXAMPLES = """\b
Examples:
  stapsdt top
  stapsdt top 'postgresql:*' 'python:function__*' --interval 5
  stapsdt top 'libc:*' --container 8d0c2f6e5b1a --where 'arg0 > 4096'
  stapsdt top -o rates.txt -- make
  stapsdt top 'postgresql:*' --count 10 --json | jq '.probes[0]'
"""


@click.command("top", cls=WithCommandLine, epilog=_EXAMPLES)
@options.selectors(required=False)
@options.subscribe_options
@click.option(
    "--interval",
    type=options.Seconds(min=0.1),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="How often to refresh.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N intervals.")
@options.duration
@in_one_argument
@options.output
@options.as_json
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    subscribe_options: SubscribeOptions,
    interval: float,
    count: int | None,
    duration: float | None,
    as_json: bool,
    command_line: tuple[str, ...],
) -> int:
    """Show how often probes fire, by probe and by process, until Ctrl-C.

    With a COMMAND, run it and count what it and its children fire, until it ends; see stapsdt trace. Both write to the
    terminal unless -o separates them.

    Without a SELECTOR, all probes are armed. Arguments are fetched only if a selector names them. The busiest probes
    and processes of the last interval come first; PROCESSES is how many fired a probe in that interval.

    At the end, a summary on standard error says how many events were delivered, filtered and lost.
    """
    wanted = [without_values(selector) for selector in selectors or (_EVERYTHING,)]

    async def show() -> int:
        stop = asyncio.Event()
        with set_on_signals(stop), started(command_line, server.address) as run:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
                resolved = await resolve(client, wanted, run.in_scope(subscribe_options), catalog())
                subscription, hints = await stack.enter_async_context(subscribed(client, Wanted(*resolved)))
                top = _Top(subscription, output_for(as_json=as_json), stop, hints, run)
                failure = await top.run(interval, count, duration)
            return await run.exit_code(failure)

    return asyncio.run(show())


def without_values(selector: str) -> str:
    """Return the selector with an empty capture list, unless it has one."""
    return selector if "(" in selector else f"{selector}()"


class _Top:
    def __init__(
        self, subscription: AsyncSubscription, output: Output, stop: asyncio.Event, hints: Hints, run: Run
    ) -> None:
        self._run = run
        self._subscription = subscription
        self._hints = hints
        self._output = output
        self._stop = stop
        self._rates = Rates()
        self._failure: str | None = None
        self._began = self._since = time.monotonic()

    async def run(self, interval: float, count: int | None, duration: float | None) -> str | None:
        """Run until the end and return what failed. The last interval shown includes all events until the end."""
        refreshing = asyncio.create_task(self._refresh(interval, count))
        ended = self._began

        def end() -> None:
            # events that still arrive fired before this; the time that disarming takes is not part of the interval
            nonlocal ended
            ended = time.monotonic()
            refreshing.cancel()

        self._output.begin(self._hints)
        try:
            failure = await follow(
                self._subscription,
                self._read(),
                self._stop,
                duration=duration,
                run=self._run,
                ending=end,
            )
            self._show(ended)
            failure = failure or self._failure
        finally:
            refreshing.cancel()
            self._output.close()
        if failure:
            print_stderr(failure)
        self._output.end(summary_of(self._subscription, self._rates.total, self._run))
        return failure

    async def _read(self) -> None:
        """Returns after the End."""
        async for message in self._subscription.messages(Encoding.COLUMNS):
            match message:
                case ColumnBatch():
                    self._rates.add(message)
                case Interruption(error):
                    seconds = self._subscription.lease_seconds
                    self._output.interrupted(f"stream interrupted, retrying for up to {seconds} s: {error}")

    async def _refresh(self, interval: float, count: int | None) -> None:
        """Show each interval except the last one of count, which is shown when everything has ended."""
        due = self._began
        for elapsed in itertools.count(1):
            due += interval
            await asyncio.sleep(due - time.monotonic())
            if elapsed == count or self._stop.is_set():
                self._stop.set()
                return
            self._show(time.monotonic())

    def _show(self, until: float) -> None:
        since, self._since = self._since, until
        sites = self._subscription.sites
        interval = self._rates.take(
            time.time_ns(),
            until - since,
            sum(site.state is SiteState.ARMED for site in sites),
            sum(site.state is SiteState.REFUSED for site in sites),
            {stage.value: lost for stage, lost in self._subscription.lost.items()},
        )
        try:
            self._output.show(interval)
        except BrokenPipeError:
            # the reader closed the pipe
            discard_output()
            self._stop.set()
        except OSError as error:
            discard_output()
            self._failure = f"cannot write the rates: {error.strerror}"
            self._stop.set()
