"""`stapsdt trace`: prints events until told to stop, then accounts for all of them.

With --count, the remaining events are not read; the account from Unsubscribe says how many there were.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from stapsdtd.cli import options, signatures
from stapsdtd.cli.command import started
from stapsdtd.cli.command_line import WithCommandLine, in_one_argument
from stapsdtd.cli.event_fields import event_fields
from stapsdtd.cli.following import follow, messages, set_on_signals, summary_of
from stapsdtd.cli.known_signatures import catalog, no_signatures
from stapsdtd.cli.moved_text import MovedTexts
from stapsdtd.cli.named_values import ArgumentNames
from stapsdtd.cli.render import discard_output, print_stderr
from stapsdtd.cli.silence import explained
from stapsdtd.cli.trace_output import HumanOutput, JsonOutput, Output
from stapsdtd.cli.unmatched import Wanted, subscribed
from stapsdtd.client import (
    AsyncClient,
    AsyncSubscription,
    End,
    EventBatch,
    Loss,
    OpenSpans,
    Resubscribed,
    Status,
)
from stapsdtd.subscribe_options import SubscribeOptions

if TYPE_CHECKING:
    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.cli.pairs import Pair

_EXAMPLES = """\b
Examples:
  stapsdt trace postgresql:query__start
  stapsdt trace 'hotspot:class__loaded(class, shared)' --where 'shared == 0'
  stapsdt trace 'python*:function__entry(arg0:str,arg1:str)' --pid 4711 --count 100
  stapsdt trace 'ticker:tick' --where 'arg0 >= 1000 && (arg1 & 0xff) == 3'
  stapsdt trace 'python:*' -o events.txt -- python3 -c 'import json'
  stapsdt trace 'libc:*' --uid www-data --duration 10 --json -o events.jsonl
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """How much to print, and how. None stands for no end."""

    count: int | None
    duration: float | None
    no_signatures: bool
    as_json: bool
    wide: bool
    command_line: tuple[str, ...]


def event_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that print events. The command receives them as `shown`."""

    @functools.wraps(command)
    def with_shown(*args: Any, **parameters: Any) -> Any:
        shown = Shown(**{field.name: parameters.pop(field.name) for field in fields(Shown)})
        return command(*args, shown=shown, **parameters)

    wrapped: Callable[..., Any] = with_shown
    for option in (
        options.as_json,
        options.output,
        click.option("--wide", is_flag=True, help="Cut no values, and leave out no columns, on a narrow terminal."),
        in_one_argument,
        no_signatures,
        event_fields,
        click.option(
            "--queue",
            "queue_bytes",
            type=click.IntRange(min=1),
            metavar="BYTES",
            help="How much the server buffers if this end is slow. The server has a default.",
        ),
        options.buffer,
        options.duration,
        click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N events."),
    ):
        wrapped = option(wrapped)
    return wrapped


@click.command("trace", cls=WithCommandLine, epilog=_EXAMPLES)
@options.selectors(required=True)
@options.selecting_options
@event_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    subscribe_options: SubscribeOptions,
    shown: Shown,
) -> int:
    """Print each event of the matching probes, including probes that appear later, until Ctrl-C.

    With a COMMAND, run it and trace it and its children, from its first instruction until it ends. The command has the
    terminal, also Ctrl-C, and the exit code is the command's, or 1 if tracing failed. Events share standard output with
    it unless -o separates them.

    By default, all arguments are printed: of one probe whose arguments are known, by name and as what they are, else as
    the integers that the probe declares. A selector can list arguments in parentheses instead: (query) by name,
    (arg0:str) is the string that argument 0 points to, (arg0:str[256]) at most 256 bytes of it, and (arg0:hex) the
    integer in hexadecimal. 'stapsdt list --details' shows names.

    EXPR compares arguments (arg0, arg1, ..., or by name), strings that they point to (str(arg0)), pid, tid, uid, gid,
    execname, cgroup and more with each other and with constants (== != < <= > >=, and ~ for globs), calculates (+ - * /
    % & | ^ ~ << >>), and combines conditions with && || ! ? : and parentheses. Repeating --pid, --uid, --execname,
    --cgroup or --container means OR; different options and --where are combined with AND.

    At the end, a summary on standard error says how many events were delivered, filtered and lost.
    """
    return run_trace(server, selectors, subscribe_options, shown)


def run_trace(
    server: options.Server,
    selectors: Sequence[str],
    subscribe_options: SubscribeOptions,
    shown: Shown,
    *,
    pair: Pair | None = None,
) -> int:
    """Run a command: subscribe, print events until the end, and return the exit code.

    pair: what to pair, instead of selectors.
    """

    async def trace() -> int:
        stop = asyncio.Event()
        with set_on_signals(stop), started(shown.command_line, server.address) as run:
            known = catalog()
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
                scope = run.in_scope(subscribe_options)
                if pair is None:
                    wanted = await _resolved(client, selectors, scope, known, shown)
                else:
                    wanted = await pair.wanted(client, scope, known, is_named=not shown.no_signatures)
                start = wanted.start.probe if wanted.start else None
                names = ArgumentNames(known, [each.text for each in wanted.selectors if each.has_names], start)
                output: Output = JsonOutput(names) if shown.as_json else HumanOutput(run, names, is_wide=shown.wide)
                subscription, hints = await stack.enter_async_context(subscribed(client, wanted, stop))
                output.begin(subscription.sites, hints)
                printer = Printer(output, shown.count, retries=server.retries)
                moved = MovedTexts(client, wanted.texts, scope)
                async with moved.watched(output.moved, hints.moved):
                    failure = await follow(
                        subscription,
                        printer.run(subscription),
                        stop,
                        duration=shown.duration,
                        run=run,
                    )
                failure = failure or printer.failure
                summary = await moved.in_summary(summary_of(subscription, printer.printed, run))
                summary = await explained(summary, client, wanted, subscription.armed_so_far, known, run)
            if failure:
                print_stderr(failure)
            output.end(summary)
            return await run.exit_code(failure)

    return asyncio.run(trace())


async def _resolved(
    client: AsyncClient, selectors: Sequence[str], scope: SubscribeOptions, known: Known, shown: Shown
) -> Wanted:
    if shown.no_signatures:
        return Wanted(signatures.as_given(selectors), scope)
    return Wanted(*await signatures.resolve(client, selectors, scope, known))


class Printer:
    """Prints the events of a subscription. printed: how many so far. failure: why it could not go on, if so."""

    def __init__(self, output: Output, count: int | None, *, retries: bool) -> None:
        self._output = output
        self._retries = retries
        self._count = count
        self.printed = 0
        self.failure: str | None = None

    async def run(self, subscription: AsyncSubscription) -> None:
        """Return after the End, after count events, when the reader closes the pipe, or after an error of writing."""
        async for message in messages(subscription, self._output.notice, retries=self._retries):
            try:
                match message:
                    case EventBatch():
                        remaining = None if self._count is None else self._count - self.printed
                        self.printed += self._output.events(message, remaining)
                    case OpenSpans():
                        self._output.open(message)
                    case Loss():
                        self._output.loss(message)
                    case Status(sites):
                        self._output.changed(sites)
                    case Resubscribed():
                        self._output.resubscribed(subscription.sites)
                    case End():
                        return
            except BrokenPipeError:
                discard_output()
                return
            except OSError as error:
                discard_output()
                self.failure = f"cannot write the events: {error.strerror}"
                return
            if self.printed == self._count:
                return
