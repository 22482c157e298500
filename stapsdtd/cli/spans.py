"""`stapsdt spans`: prints pairs of hits, and the time between them."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from stapsdtd.cli import options, pairs, trace
from stapsdtd.cli.command_line import WithCommandLine
from stapsdtd.subscribe_options import SubscribeOptions

_EXAMPLES = """\b
Examples:
  stapsdt spans postgresql:query__start --where 'elapsed > 10ms'
  stapsdt spans 'python:gc__start(generation)' 'python:gc__done(collected)'
  stapsdt spans 'app:request__start(arg0, arg1:str)' 'app:request__done(arg1)' --key arg0 --json
"""

_MIN_OPEN_SECONDS = 1.0
"""On a terminal: whoever looks sees what hangs."""


@click.command("spans", cls=WithCommandLine, epilog=_EXAMPLES)
@pairs.pair_options
@options.subscribe_options
@trace.event_options
@click.option(
    "--min-open",
    type=options.Seconds(min=0, max=options.MAX_SECONDS),
    metavar="SECONDS",
    help="Print STARTs that have had no END for so long, too; 0 for none. Default: 1 on a terminal.",
)
@click.pass_obj
def command(
    server: options.Server,
    *,
    pair: pairs.Pair,
    subscribe_options: SubscribeOptions,
    shown: trace.Shown,
    min_open: float | None,
) -> int:
    """Print each END with the START that it belongs to and the time between them, until Ctrl-C.

    An END belongs to the START before it in the same thread, or with the same --key. END can be left out where it is
    known which probe ends a START; 'stapsdt list --details' shows these. The return ends the entry of a kernel
    function. --where may use elapsed: elapsed > 10ms.

    The arguments of END are printed as stapsdt trace does, then those of START: the ones that it lists in parentheses,
    or whose names are known. At the end, standard error shows the spans that are still open, and a summary says what
    became of all starts.
    """
    if min_open is None:
        min_open = _MIN_OPEN_SECONDS if sys.stdout.isatty() and not shown.as_json else 0.0
    return trace.run_trace(server, (), subscribe_options, shown, pair=replace(pair, min_open=min_open))
