"""Arguments and options that several commands have, and the completion of selectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

_PATIENCE_SECONDS = 0.3


def complete_selector(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names that the server knows, if it tells them at once; whoever presses Tab wants no errors."""
    del parameter
    from stapsdtd.client import Client, ClientError  # noqa: PLC0415 (this module serves `--help` too)

    server = ctx.find_root().params["server"]
    try:
        with Client(server, timeout_seconds=_PATIENCE_SECONDS) as client:
            listing = client.list_probes()
    except ClientError:
        return []
    return sorted({name for each in listing if (name := f"{each.provider}:{each.name}").startswith(incomplete)})


def selectors(*, required: bool) -> Callable[[_F], _F]:
    return click.argument(
        "selectors", metavar="SELECTOR...", nargs=-1, required=required, shell_complete=complete_selector
    )


pids = click.option(
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    help="Only this process; may be repeated.",
)
uids = click.option(
    "--uid",
    "uids",
    type=click.IntRange(0, (1 << 32) - 1),
    multiple=True,
    metavar="UID",
    help="Only threads of this user; may be repeated.",
)
execnames = click.option(
    "--execname",
    "execnames",
    multiple=True,
    metavar="NAME",
    help="Only threads of this command name (comm); may be repeated.",
)
cgroups = click.option(
    "--cgroup",
    "cgroups",
    multiple=True,
    metavar="PATH",
    help="Only what runs in this cgroup or below it, such as /system.slice/cron.service; may be repeated.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
