"""`stapsdt stats`: average, extremes and sum of a value by key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stapsdtd.cli import aggregates, options
from stapsdtd.cli.aggregate_tables import Rows
from stapsdtd.cli.command_line import WithCommandLine

if TYPE_CHECKING:
    from stapsdtd.cli.snapshot_output import Shown
    from stapsdtd.subscribe_options import SubscribeOptions

_EXAMPLES = """\b
Examples:
  stapsdt stats 'python:gc__done' arg0 --by pid
  stapsdt stats 'libc:memory_sbrk_more' arg1 --unit bytes --by execname --duration 10
"""


@click.command("stats", cls=WithCommandLine, epilog=_EXAMPLES)
@options.selectors(required=True)
@aggregates.value
@aggregates.unit
@aggregates.common_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    value: str,
    unit: str,
    subscribe_options: SubscribeOptions,
    shown: Shown,
) -> int:
    """Show average, extremes and sum of the expression VALUE, such as arg0 or 'arg1 - arg0', until Ctrl-C.

    COUNT counts all hits, also those whose value could not be read. See stapsdt count for --by, --interval
    and the rest.
    """
    functions = ("count", "avg", "min", "max", "sum")
    return aggregates.run(
        server, selectors, subscribe_options, shown, Rows(shown, unit), functions=functions, value=value
    )
