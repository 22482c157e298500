"""Common code of the commands that show aggregations."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from stapsdtd.cli import options
from stapsdtd.cli.command import started
from stapsdtd.cli.command_line import in_one_argument
from stapsdtd.cli.following import follow, messages, set_on_signals, summary_of
from stapsdtd.cli.joined_rows import without_literals
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.moved_text import MovedTexts
from stapsdtd.cli.named_values import ArgumentNames, with_meanings
from stapsdtd.cli.open_spans import OpenSpanTexts
from stapsdtd.cli.quantity import UNITS
from stapsdtd.cli.render import discard_output, print_stderr
from stapsdtd.cli.signatures import as_given, resolve_aggregate
from stapsdtd.cli.silence import explained
from stapsdtd.cli.snapshot_output import Output, Shown, output_for
from stapsdtd.cli.splitting import split_keys
from stapsdtd.cli.sql_text import DIALECTS
from stapsdtd.cli.unmatched import Wanted, subscribed
from stapsdtd.client import AsyncClient, Snapshot
from stapsdtd.client.encode import to_join
from stapsdtd.subscribe_options import Aggregate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.cli.aggregate_tables import Table
    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.cli.pairs import Pair
    from stapsdtd.client import AsyncSubscription
    from stapsdtd.signatures import Declared
    from stapsdtd.subscribe_options import SubscribeOptions

_LIVE_MS = 1000


def keys(ctx: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    del ctx, parameter
    return tuple(key for text in texts for key in split_keys(text))


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands with selectors. The command receives them as `subscribe_options` and `shown`."""
    return _with_options(command, options.selecting_options)


def pair_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands with pairs, as `common_options`."""
    return _with_options(command, options.subscribe_options)


def _with_options(command: Callable[..., Any], choosing: Callable[..., Any]) -> Callable[..., Any]:
    """choosing: adds the options that choose events."""

    @functools.wraps(command)
    def with_shown(
        *args: Any,
        by: tuple[str, ...],
        interval: float | None,
        count: int | None,
        limit: int | None,
        duration: float | None,
        as_json: bool,
        normalize: str | None,
        command_line: tuple[str, ...],
        **parameters: Any,
    ) -> Any:
        if count is not None and interval is None:
            raise click.UsageError("--count is of intervals: give --interval, too")
        shown = Shown(by, interval, count, limit, duration, as_json, command_line, normalize or "")
        return command(*args, shown=shown, **parameters)

    wrapped: Callable[..., Any] = with_shown
    for option in (
        options.as_json,
        options.output,
        in_one_argument,
        options.buffer,
        options.duration,
        click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --interval: stop after N of them."),
        click.option(
            "--limit",
            type=click.IntRange(min=1),
            metavar="N",
            help="Show only the first N keys: those with the most hits or, of latency, that took the longest in all.",
        ),
        click.option(
            "--normalize",
            type=click.Choice(DIALECTS),
            help="Join keys that differ in literals of SQL alone. Done here, with the keys that the server kept.",
        ),
        click.option(
            "--interval",
            type=options.Seconds(min=0.01, max=options.MAX_SECONDS),
            metavar="SECONDS",
            help="Show each interval on its own, rather than all hits so far.",
        ),
        click.option(
            "--by",
            multiple=True,
            metavar="KEY,...",
            callback=keys,
            help="For each combination of these: arguments (arg0:str, or by name), pid, arg0 / 1000, ... Repeatable.",
        ),
        choosing,
    ):
        wrapped = option(wrapped)
    return wrapped


value = click.argument("value", metavar="VALUE")
unit = click.option(
    "--unit",
    type=click.Choice(UNITS),
    callback=lambda ctx, parameter, name: name or "",  # noqa: ARG005
    help="What the values are, to show them with a fitting unit.",
)


def run(
    server: options.Server,
    selectors: Sequence[str],
    subscribe_options: SubscribeOptions,
    shown: Shown,
    table: Table,
    *,
    functions: Sequence[str] = ("count",),
    value: str = "",
    pair: Pair | None = None,
) -> int:
    """Run a command: subscribe, show snapshots until the end, and return the exit code.

    pair: what to pair, instead of selectors.
    """
    known = catalog()
    names = ArgumentNames(known, (), pair.start_probe(known)) if pair else None
    output = output_for(table, shown, OpenSpanTexts(names))
    interval_ms = _LIVE_MS if output.is_live else options.KEPT_MS
    aggregate = Aggregate(
        functions=to_join(functions) if shown.dialect else functions,
        value=value,
        by=shown.by,
        interval_ms=round(shown.interval * 1000) if shown.interval else interval_ms,
        cumulative=shown.interval is None,
    )

    async def show() -> int:
        stop = asyncio.Event()
        with set_on_signals(stop), started(shown.command_line, server.address) as run:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
                scope = run.in_scope(subscribe_options)
                wanted = await _resolved(client, selectors, pair, scope, aggregate, known)
                subscription, hints = await stack.enter_async_context(subscribed(client, wanted, stop))
                output.begin(hints, subscription.sites)
                reader = _Reader(
                    output,
                    shown,
                    wanted.meanings,
                    functions,
                    retries=server.retries,
                    shows_all=bool(output.is_live or shown.interval),
                )
                moved = MovedTexts(client, wanted.texts, scope)
                try:
                    async with moved.watched(output.moved, hints.moved):
                        failure = await follow(
                            subscription, reader.run(subscription), stop, duration=shown.duration, run=run
                        )
                    reader.show_last()
                finally:
                    output.close()
                failure = failure or reader.failure
                account = subscription.total
                summary = summary_of(subscription, account.aggregated if account else reader.aggregated, run)
                summary = await moved.in_summary(summary)
                summary = await explained(summary, client, wanted, subscription.armed_so_far, known, run)
            if failure:
                print_stderr(failure)
            output.end(replace(summary, is_aggregated=True))
            return await run.exit_code(failure)

    return asyncio.run(show())


async def _resolved(  # noqa: PLR0917 - what a command was told
    client: AsyncClient,
    selectors: Sequence[str],
    pair: Pair | None,
    subscribe_options: SubscribeOptions,
    aggregate: Aggregate,
    known: Known,
) -> Wanted:
    """Replace names of arguments by their positions."""
    if pair is None:
        scope, named, meanings = await resolve_aggregate(client, selectors, subscribe_options, aggregate, known)
        return Wanted(as_given(selectors), scope, named, meanings=meanings)
    return await pair.wanted(client, subscribe_options, known, aggregate)


class _Reader:
    """Shows snapshots. failure: why that was not possible any more."""

    def __init__(
        self,
        output: Output,
        shown: Shown,
        meanings: Sequence[Declared | None],
        functions: Sequence[str],
        *,
        retries: bool,
        shows_all: bool,
    ) -> None:
        """meanings: of keys, as far as they are known. shows_all: rather than the last one alone.

        aggregated: how many hits are in those that came.
        """
        self._output = output
        self._shows_all = shows_all
        self._last: Snapshot | None = None
        self.aggregated = 0
        self._meanings = meanings
        self._functions = functions
        self._retries = retries
        self._count = shown.count
        self._dialect = shown.dialect
        self.failure: str | None = None

    def _readable(self, snapshot: Snapshot) -> Snapshot:
        named = with_meanings(snapshot, self._meanings) if any(self._meanings) else snapshot
        return without_literals(named, self._dialect, self._functions) if self._dialect else named

    async def run(self, subscription: AsyncSubscription) -> None:
        """Return after the End, after so many snapshots, or when nothing can be written any more."""
        async for message in messages(subscription, self._output.notice, retries=self._retries):
            if isinstance(message, Snapshot):
                self.aggregated = message.account.aggregated
                self._last = message
                if self._shows_all and (not self._show(message) or message.number == self._count):
                    return

    def show_last(self) -> None:
        """Show the last snapshot that came, unless all were shown: the final one, if the server gave that."""
        if not self._shows_all and self._last is not None:
            self._show(self._last)

    def _show(self, snapshot: Snapshot) -> bool:
        """Return whether that was possible."""
        try:
            self._output.show(self._readable(snapshot))
        except BrokenPipeError:
            discard_output()
            return False
        except OSError as error:
            discard_output()
            self.failure = f"cannot write the snapshot: {error.strerror}"
            return False
        return True
