"""`stapsdt top`: shows the busiest probes and processes, live."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import click

from stapsdtd.catalog.selector_text import head_of
from stapsdtd.cli import options
from stapsdtd.cli.command import started
from stapsdtd.cli.command_line import WithCommandLine, in_one_argument
from stapsdtd.cli.following import follow, messages, set_on_signals, summary_of
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.render import discard_output, print_stderr
from stapsdtd.cli.signatures import as_given, resolve_aggregate
from stapsdtd.cli.top_output import output_for
from stapsdtd.cli.top_rates import KEYS, Interval, Rates
from stapsdtd.cli.unmatched import Wanted, subscribed
from stapsdtd.client import (
    AsyncClient,
    AsyncSubscription,
    SiteState,
    Snapshot,
)
from stapsdtd.subscribe_options import Aggregate

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
@options.selecting_options
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

    Without a SELECTOR, all probes are armed. Hits are counted where they happen, and rates are of the time that the
    server measured. The busiest probes and processes of the last interval come first; PROCESSES is how many fired a
    probe in that interval.

    At the end, a summary on standard error says how many hits were counted, filtered and lost.
    """
    wanted = [without_values(selector) for selector in selectors or (_EVERYTHING,)]
    counted = Aggregate(functions=["count"], by=KEYS, interval_ms=round(interval * 1000))

    async def show() -> int:
        stop = asyncio.Event()
        with set_on_signals(stop), started(command_line, server.address) as run:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
                scope = run.in_scope(subscribe_options)
                scope, aggregate, _ = await resolve_aggregate(client, wanted, scope, counted, catalog())
                wants = Wanted(as_given(wanted), scope, aggregate)
                subscription, hints = await stack.enter_async_context(subscribed(client, wants, stop))
                top = _Top(subscription, output_for(as_json=as_json), stop, hints, run, retries=server.retries)
                failure = await top.run(interval, count, duration)
            return await run.exit_code(failure)

    return asyncio.run(show())


def without_values(selector: str) -> str:
    """Return the selector without a capture list: hits are counted."""
    return head_of(selector) if selector.endswith(")") else selector


class _Top:
    def __init__(
        self,
        subscription: AsyncSubscription,
        output: Output,
        stop: asyncio.Event,
        hints: Hints,
        run: Run,
        *,
        retries: bool,
    ) -> None:
        self._run = run
        self._retries = retries
        self._subscription = subscription
        self._hints = hints
        self._output = output
        self._stop = stop
        self._rates = Rates()
        self._failure: str | None = None

    async def run(self, interval: float, count: int | None, duration: float | None) -> str | None:
        """Run until the end and return what failed."""
        self._output.begin(self._hints)
        try:
            failure = await follow(
                self._subscription, self._read(interval, count), self._stop, duration=duration, run=self._run
            )
            failure = failure or self._failure
        finally:
            self._output.close()
        if failure:
            print_stderr(failure)
        self._output.end(summary_of(self._subscription, self._rates.total, self._run))
        return failure

    async def _read(self, interval: float, count: int | None) -> None:
        """Return after the End, or when nothing can be written any more. Have it come after count intervals."""
        async for message in messages(self._subscription, self._output.notice, retries=self._retries):
            if not isinstance(message, Snapshot):
                continue
            shown = self._taken(message)
            if count is not None and message.number > count:
                # of the moment until the end
                continue
            is_short = message.number > 1 and shown.seconds < interval / 2
            if not self._show(shown, is_short=is_short):
                return
            if message.number == count:
                self._stop.set()

    def _taken(self, snapshot: Snapshot) -> Interval:
        sites = self._subscription.sites
        return self._rates.take(
            snapshot,
            sum(site.state is SiteState.ARMED for site in sites),
            sum(site.state is SiteState.REFUSED for site in sites),
            {stage.value: lost for stage, lost in self._subscription.lost.items()},
        )

    def _show(self, interval: Interval, *, is_short: bool) -> bool:
        """Return whether that was possible. is_short: it is what was left of an interval at the end."""
        try:
            self._output.show(interval, is_short=is_short)
        except BrokenPipeError:
            # the reader closed the pipe
            discard_output()
            return False
        except OSError as error:
            discard_output()
            self._failure = f"cannot write the rates: {error.strerror}"
            return False
        return True
