"""Arguments and options that several commands have, and the completion of selectors."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import click

if TYPE_CHECKING:
    from stapsdtd.client import ProbeListing, Tls

_F = TypeVar("_F", bound=Callable[..., Any])

_PATIENCE_SECONDS = 0.3


class Server(NamedTuple):
    """Where it is and files that prove who each of the two is, for TCP: none or all three of them."""

    address: str
    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def tls(self) -> Tls | None:
        from stapsdtd.client import Tls  # noqa: PLC0415 (this module serves `--help` too)

        # the environment may name them for another server
        is_tls = self.certificate and self.address.startswith("tcp:")
        return Tls(self.certificate, self.key, self.authority) if is_tls else None


def complete_selector(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del parameter
    listing = _listing(ctx, details=False)
    names = {f"{each.provider}:{each.name}" for each in listing.probes} if listing else set()
    return _safe(names, incomplete)


def complete_container(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del parameter
    listing = _listing(ctx, details=True)
    ids = {each.container_id for each in listing.processes if each.container_id} if listing else set()
    return _safe(ids, incomplete)


def _safe(words: set[str], incomplete: str) -> list[str]:
    """What a shell takes as it stands: who names probes could have Tab and Enter run his commands."""
    return sorted(word for word in words if word.startswith(incomplete) and shlex.quote(word) == word)


def _listing(ctx: click.Context, *, details: bool) -> ProbeListing | None:
    """What the server knows, if it tells it at once; whoever presses Tab wants no errors."""
    from stapsdtd.client import Client, ClientError  # noqa: PLC0415 (this module serves `--help` too)

    given = ctx.find_root().params
    server = Server(*(given[name] for name in ("server", "certificate", "key", "authority")))
    try:
        with Client(server.address, tls=server.tls, timeout_seconds=_PATIENCE_SECONDS) as client:
            return client.list_probes(details=details)
    except ClientError:
        return None


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
containers = click.option(
    "--container",
    "containers",
    multiple=True,
    metavar="ID",
    shell_complete=complete_container,
    help="Only what runs in this container: its name, its id, or the id's first 12 digits or more; may be repeated.",
)
include_clients = click.option(
    "--clients",
    "include_clients",
    is_flag=True,
    help="Also events of other clients of the server, such as another stapsdt, which else count as filtered.",
)
where = click.option(
    "--where",
    metavar="EXPR",
    default="",
    help="Only events that satisfy EXPR, such as 'arg0 > 100 && execname != \"psql\"'.",
)
duration = click.option(
    "--duration",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End SECONDS after all is armed.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


class Scope(TypedDict):
    """Whose events are wanted, and which of them, as `Client.subscribe` takes it."""

    pids: tuple[int, ...]
    exclude_pids: tuple[int, ...]
    uids: tuple[int, ...]
    execnames: tuple[str, ...]
    cgroups: tuple[str, ...]
    containers: tuple[str, ...]
    include_clients: bool
    where: str


def scope(command: Callable[..., Any]) -> Callable[..., Any]:
    """Have all the options above that choose events, which the command gets as one argument, `scope`."""

    @functools.wraps(command)
    def with_scope(*given: Any, **options: Any) -> Any:
        chosen = {name: options.pop(name) for name in Scope.__annotations__ if name in options}
        # the command's own probes (CPython has some) would fire at every line that it prints
        return command(*given, scope={"exclude_pids": (os.getpid(),), **chosen}, **options)

    wrapped: Callable[..., Any] = with_scope
    for option in (where, include_clients, containers, cgroups, execnames, uids, pids):
        wrapped = option(wrapped)
    return wrapped
