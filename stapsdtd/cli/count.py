"""`stapsdt count`: counts hits by key."""

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
  stapsdt count 'postgresql:query__start' --by query --limit 10
  stapsdt count 'libc:*' --by name,execname --duration 10
  stapsdt count 'python:gc__start' --by pid --interval 1
  stapsdt count 'libc:memory_sbrk_more' --by 'arg1 / 65536'
  stapsdt count 'hotspot:class__loaded' -- java -version
"""


@click.command("count", cls=WithCommandLine, epilog=_EXAMPLES)
@options.selectors(required=True)
@aggregates.common_options
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    subscribe_options: SubscribeOptions,
    shown: Shown,
) -> int:
    """Count how often the matching probes fire, by key, until Ctrl-C.

    The server counts, and sends nothing but the counts. --by names the keys: expressions as those of --where, such as
    pid, execname, arg0 / 1000, str(arg1, arg2) or 'arg0 > 100 ? "big" : "small"', and captures, such as arg1:str[32].

    In a terminal, the counts so far are shown live; with --interval, those of each interval one below the other. At the
    end, a summary on standard error says how many events were aggregated, filtered and lost.
    """
    return aggregates.run(server, selectors, subscribe_options, shown, Rows(shown))
