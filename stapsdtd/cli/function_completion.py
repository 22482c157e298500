"""Completes names of kernel functions."""

from __future__ import annotations

import re

import click

from stapsdtd.cli import options

_COMPLETABLE = re.compile(r"((?:\w+:)?)(\w+)")
"""What shows which functions may be meant: 60,000 names are of no help to anybody."""


def complete_function(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del parameter
    begun = _COMPLETABLE.fullmatch(incomplete)
    if begun is None:
        return []
    names = options.ask(ctx, lambda client: client.kernel_function_names(f"{incomplete}*"))
    return options.safe({f"{begun[1]}{name}" for name in names or ()}, incomplete)
