"""`--fields`: what else to print of each event."""

from __future__ import annotations

import click

from stapsdtd.cli.splitting import split_keys
from stapsdtd.subscribe_options import FIELDS


def _fields(ctx: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    del ctx, parameter
    return tuple(field for text in texts for field in split_keys(text))


def _completed(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del ctx, parameter
    *given, last = incomplete.split(",")
    return [",".join([*given, name]) for name in FIELDS if name.startswith(last) and name not in given]


event_fields = click.option(
    "--fields",
    "fields",
    multiple=True,
    metavar="EXPR,...",
    callback=_fields,
    shell_complete=_completed,
    help=f"Print more of each event: {', '.join(FIELDS)}, or what is computed of it, as 'arg1 - arg0'. Repeatable.",
)
