"""`stapsdt spans`: prints pairs of hits, and the time between them."""

from __future__ import annotations

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


@click.command("spans", cls=WithCommandLine, epilog=_EXAMPLES)
@pairs.pair_options
@options.subscribe_options
@trace.event_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    pair: pairs.Pair,
    subscribe_options: SubscribeOptions,
    shown: trace.Shown,
) -> int:
    """Print each END with the START that it belongs to and the time between them, until Ctrl-C.

    An END belongs to the START before it in the same thread, or with the same --key. END can be left out where it is
    known which probe ends a START; 'stapsdt list --details' shows these. --where may use elapsed: elapsed > 10ms.

    The arguments of END are printed as stapsdt trace does, then those of START: the ones that it lists in parentheses,
    or whose names are known. At the end, a summary on standard error says what became of starts that had no end.
    """
    return trace.run_trace(server, (), subscribe_options, shown, pair=pair)
