"""`stapsdt hist`: the histogram of a value by key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stapsdtd.cli import aggregates, options
from stapsdtd.cli.aggregate_tables import Histograms
from stapsdtd.cli.command_line import WithCommandLine

if TYPE_CHECKING:
    from stapsdtd.cli.snapshot_output import Shown
    from stapsdtd.subscribe_options import SubscribeOptions

_EXAMPLES = """\b
Examples:
  stapsdt hist 'libc:memory_sbrk_more' arg1 --unit bytes
  stapsdt hist 'python:gc__done' arg0 --by pid --linear 0 1000 50 --duration 10
"""


@click.command("hist", cls=WithCommandLine, epilog=_EXAMPLES)
@options.selectors(required=True)
@aggregates.value
@click.option(
    "--linear",
    type=int,
    nargs=3,
    metavar="LOW HIGH STEP",
    help="Buckets of STEP values each, from LOW to HIGH, instead of powers of two.",
)
@aggregates.unit
@aggregates.common_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    value: str,
    linear: tuple[int, int, int] | None,
    unit: str,
    subscribe_options: SubscribeOptions,
    shown: Shown,
) -> int:
    """Show how the values of the expression VALUE, such as arg0 or 'arg1 - arg0', are distributed, until Ctrl-C.

    Buckets are powers of two, and percentiles are exact to 3.1 %; those of --linear are as exact as its buckets. See
    stapsdt count for --by, --interval and the rest.
    """
    histogram = f"lquantize({','.join(map(str, linear))})" if linear else "percentiles"
    functions = ("count", "max", histogram)
    output = Histograms(shown, unit, is_linear=linear is not None)
    return aggregates.run(server, selectors, subscribe_options, shown, output, functions=functions, value=value)
