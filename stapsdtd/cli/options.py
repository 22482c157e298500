"""Arguments and options shared by several commands, and the completion of selectors, pids and containers."""

from __future__ import annotations

import functools
import math
import os
import pwd
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from stapsdtd.subscribe_options import SubscribeOptions

if TYPE_CHECKING:
    from stapsdtd.client import Client, ProbeListing, Tls

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_TIMEOUT_SECONDS = 0.3
MAX_SECONDS = 4_000_000
"""As milliseconds, requests have 32 bits for these."""
LEASE_SECONDS = 30
"""How long probes stay armed after a command was killed, and how long a connection may be down."""
KEPT_MS = 5000
"""Between snapshots that matter only if no later one comes, since the server was killed."""


class Seconds(click.FloatRange):
    """A time in seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        # which no range rules out
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


class Server(NamedTuple):
    """A server's address and, for TLS over TCP, three PEM files: either all or none of them are set.

    retries: whether a command goes on once the server was restarted.
    """

    address: str
    certificate: str = ""
    key: str = ""
    authority: str = ""
    retries: bool = True

    @property
    def tls(self) -> Tls | None:
        from stapsdtd.client import Tls  # noqa: PLC0415 (this module serves `--help` too)

        # on a unix socket, files set in the environment are ignored: they are meant for another server
        uses_tls = self.certificate and self.address.startswith("tcp:")
        return Tls(self.certificate, self.key, self.authority) if uses_tls else None


def complete_selector(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete names of probes, with what is known of each as its help."""
    from stapsdtd.catalog.selector_text import probe_name  # noqa: PLC0415
    from stapsdtd.cli.known_signatures import own_folder  # noqa: PLC0415 (this module serves `--help` too)
    from stapsdtd.signatures import Catalog  # noqa: PLC0415

    del parameter
    listing, known = _listing(ctx, details=False), Catalog(own_folder())
    probes = {probe_name(probe.provider, probe.name): probe for probe in listing.probes} if listing else {}
    items = []
    for name in sorted(name for name in probes if name.startswith(incomplete)):
        signatures = known.of(probes[name].provider, probes[name].name)
        items.append(CompletionItem(name, help=signatures[0].text if signatures else None))
    return items


def complete_container(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del parameter
    listing = _listing(ctx, details=True)
    processes = listing.processes if listing else ()
    called = {name for process in processes if (name := process.container_name or process.container_id)}
    return safe(called, incomplete)


def complete_pid(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    del parameter
    listing = _listing(ctx, details=True)
    commands = {str(process.pid): process.comm for process in listing.processes} if listing else {}
    return [CompletionItem(pid, help=" ".join(safe({commands[pid]}, ""))) for pid in safe(set(commands), incomplete)]


def complete_user(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del ctx, parameter
    return safe({user.pw_name for user in pwd.getpwall()}, incomplete)


def safe(words: set[str], incomplete: str) -> list[str]:
    """Return the words that need no quoting in a shell. Others could run commands that whoever named them chose."""
    return sorted(word for word in words if word.startswith(incomplete) and shlex.quote(word) == word)


def _listing(ctx: click.Context, *, details: bool) -> ProbeListing | None:
    return ask(ctx, lambda client: client.list_probes(details=details))


def ask(ctx: click.Context, question: Callable[[Client], _T]) -> _T | None:
    """Ask the server, with a short timeout and ignoring errors, which must not disturb the command line."""
    from stapsdtd.client import Client, ClientError  # noqa: PLC0415 (this module serves `--help` too)

    params = ctx.find_root().params
    server = Server(*(params[name] for name in ("server", "certificate", "key", "authority")))
    try:
        with Client(server.address, tls=server.tls, timeout_seconds=_TIMEOUT_SECONDS) as client:
            return question(client)
    except ClientError:
        return None


def selectors(*, required: bool) -> Callable[[_F], _F]:
    metavar = "SELECTOR..." if required else "[SELECTOR]..."
    return click.argument("selectors", metavar=metavar, nargs=-1, required=required, shell_complete=complete_selector)


def _user_ids(ctx: click.Context, parameter: click.Parameter, users: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ids of users, which are given as such or by the names that they have on this host."""
    ids = []
    for user in users:
        try:
            uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
        except KeyError:
            raise click.BadParameter(f"this host has no user {user!r}; give the user's id", ctx, parameter) from None
        if uid > _MAX_USER_ID:
            raise click.BadParameter(f"{user} is not the id of a user; the largest is {_MAX_USER_ID}", ctx, parameter)
        ids.append(uid)
    return tuple(ids)


_MAX_USER_ID = (1 << 32) - 1

pids = click.option(
    "-p",
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    shell_complete=complete_pid,
    help="Only this process. Repeatable.",
)
follow = click.option(
    "--follow",
    is_flag=True,
    help="With --pid: also the processes that it has forked and forks from now on, and so on.",
)
exclude_pids = click.option(
    "--exclude-pid",
    "exclude_pids",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    shell_complete=complete_pid,
    help="Not this process. Repeatable.",
)
uids = click.option(
    "--uid",
    "uids",
    multiple=True,
    metavar="USER",
    callback=_user_ids,
    shell_complete=complete_user,
    help="Only threads of this user: an id, or a name on this host. Repeatable.",
)
execnames = click.option(
    "--execname",
    "execnames",
    multiple=True,
    metavar="NAME",
    help="Only threads with this command name (comm). Repeatable.",
)


def _on_host(ctx: click.Context, parameter: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Make paths absolute, and leave it to the server to follow them."""
    del ctx, parameter
    return tuple(os.path.join(os.getcwd(), path) for path in paths)


files = click.option(
    "--file",
    "files",
    type=click.Path(),
    multiple=True,
    metavar="PATH",
    callback=_on_host,
    help="Only probes in this file, even if no program runs it yet; a glob, or a directory for its files. Repeatable.",
)
cgroups = click.option(
    "--cgroup",
    "cgroups",
    multiple=True,
    metavar="PATH",
    help="Only processes in this cgroup or below, such as /system.slice/cron.service. Repeatable.",
)
containers = click.option(
    "--container",
    "containers",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_container,
    help="Only processes in this container: its name, its id, or at least the id's first 12 digits. Repeatable.",
)
include_clients = click.option(
    "--clients",
    "include_clients",
    is_flag=True,
    help="Include events of the server's other clients, such as another stapsdt. By default they count as filtered.",
)
no_wait = click.option(
    "--no-wait",
    "require_match",
    is_flag=True,
    help="Fail at once if no probe matches, rather than wait for one.",
)
all_probes = click.option(
    "--all",
    "all_probes",
    is_flag=True,
    help="Also probes that fire at each line or call of a program, where a SELECTOR means them by a glob.",
)
where = click.option(
    "--where",
    metavar="EXPR",
    default="",
    help="Only events that satisfy EXPR, such as 'arg0 > 100 && execname != \"psql\"'.",
)


buffer = click.option(
    "--buffer",
    "kernel_buffer_kib",
    type=click.IntRange(min=1),
    metavar="KIB",
    help="Size of the kernel buffer per CPU, for bursts. The server has a default.",
)
duration = click.option(
    "--duration",
    type=Seconds(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop SECONDS after the probes are armed.",
)


def output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -o, which has the command write to a file what it would write to standard output."""

    @functools.wraps(command)
    def with_output(*args: Any, output_path: str | None, **parameters: Any) -> Any:
        if output_path is None:
            return command(*args, **parameters)
        with open(output_path, "w", encoding="utf-8") as file, redirect_stdout(file):
            return command(*args, **parameters)

    return click.option(
        "-o",
        "--output",
        "output_path",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write to FILE instead of standard output.",
    )(with_output)


def _without_retry(ctx: click.Context, parameter: click.Parameter, no_retry: bool) -> None:
    del parameter
    if no_retry and ctx.obj is not None:
        ctx.obj = ctx.obj._replace(retries=False)


no_retry = click.option(
    "--no-retry",
    is_flag=True,
    expose_value=False,
    callback=_without_retry,
    help="End when the server stops. By default, wait up to 2 minutes until it is back, and go on.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def _choosing(*more: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options above that choose processes, and more. The command receives every option
    of a subscription in one argument.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(*args: Any, **parameters: Any) -> Any:
            if parameters["follow"] and not parameters["pids"]:
                raise click.UsageError("--follow needs the process to follow: give --pid, too")
            wants_all = parameters.pop("all_probes", True)
            names = {field.name for field in fields(SubscribeOptions)} & parameters.keys()
            given = {name: value for name in names if (value := parameters.pop(name)) is not None}
            # the command's own probes, such as CPython's, would fire with every line that it prints
            given["exclude_pids"] = (os.getpid(), *given["exclude_pids"])
            if not wants_all:
                given["exclude"] = _left_out(parameters["selectors"])
            options = SubscribeOptions(lease_seconds=LEASE_SECONDS, **given)
            return command(*args, subscribe_options=options, **parameters)

        wrapped: Callable[..., Any] = with_options
        for option in (no_retry, *more, containers, cgroups, execnames, uids, exclude_pids, follow, pids):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _left_out(selectors: Sequence[str]) -> Sequence[str]:
    from stapsdtd.cli.frequent import left_out  # noqa: PLC0415 (signatures and selectors cost 40 ms)

    return left_out(selectors)


process_options = _choosing()
subscribe_options = _choosing(where, no_wait, include_clients, files)
selecting_options = _choosing(all_probes, where, no_wait, include_clients, files)
"""Of commands whose selectors may be globs."""
