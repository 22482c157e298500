"""`stapsdt signatures`: makes signatures of what others declare."""

from __future__ import annotations

from pathlib import Path

import click

from stapsdtd.signatures.dtrace_file import import_dtrace
from stapsdtd.signatures.files import read_signatures

_EXAMPLES = """\b
Examples:
  stapsdt signatures import probes.d > /etc/stapsdtd/signatures.d/shop.toml
"""


@click.group("signatures", epilog=_EXAMPLES)
def command() -> None:
    """Make signatures, which say what a provider's probes mean.

    'list --details' shows them, and 'trace' uses them. Those of a host are in /etc/stapsdtd/signatures.d.
    """


@command.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def import_file(file: Path) -> None:
    """Print the signatures of a provider that a DTrace FILE (.d) declares, in TOML.

    What the file cannot say is left to you: a line of text for each probe, enums, durations and strings' lengths.
    """
    text = import_dtrace(file)
    read_signatures(str(file), text)
    print(text)
