"""`stapsdt latency`: how long it takes from one probe to another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import aggregates, options, pairs
from stapsdtd.cli.aggregate_tables import Histograms
from stapsdtd.cli.command_line import WithCommandLine

if TYPE_CHECKING:
    from stapsdtd.cli.snapshot_output import Shown
    from stapsdtd.subscribe_options import SubscribeOptions

_EXAMPLES = """\b
Examples:
  stapsdt latency postgresql:query__start
  stapsdt latency postgresql:query__start --by query --where 'elapsed > 10ms'
  stapsdt latency python:gc__start python:gc__done --by start.generation -- python3 program.py
  stapsdt latency app:request__start app:request__done --key arg0
  stapsdt latency fbt::tcp_sendmsg:entry --by execname
"""


@click.command("latency", cls=WithCommandLine, epilog=_EXAMPLES)
@pairs.pair_options
@aggregates.pair_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    pair: pairs.Pair,
    subscribe_options: SubscribeOptions,
    shown: Shown,
) -> int:
    """Show how the time from START to END is distributed, until Ctrl-C.

    An END belongs to the START before it in the same thread, or with the same --key. END can be left out where it is
    known which probe ends a START; 'stapsdt list --details' shows these. The return ends the entry of a kernel
    function.

    --by names keys: arguments of END, those of START as start.arg0 or by name as start.query, and pid, execname and the
    others of stapsdt count. Keys that took the longest in all come first. --where may use elapsed, such as elapsed >
    10ms. The percentiles are exact to 3.1 %.

    At the end, a summary on standard error says what became of starts that had no end.
    """
    shown = replace(shown, order="sum")
    output = Histograms(shown, "ns")
    functions = ("count", "sum", "max", "percentiles")
    return aggregates.run(server, (), subscribe_options, shown, output, functions=functions, value="elapsed", pair=pair)
