"""The `stapsdt` command: options that all commands share, and the one place where an error becomes a line of text.

A command is a module with a `command`, imported when it is called: `stapsdt --help` needs neither gRPC nor numpy. It
gets the server's address as its context object and returns its exit code, None for 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NamedTuple, TypeVar

import click

from stapsdtd import __version__
from stapsdtd.cli.options import Server
from stapsdtd.cli.render import complain, discard_output, point_at
from stapsdtd.errors import StapsdtdError

COMPLETION_VARIABLE = "_STAPSDT_COMPLETE"
DEFAULT_SERVER = "unix:/run/stapsdtd/stapsdtd.sock"

_F = TypeVar("_F", bound=Callable[..., Any])


class _Module(NamedTuple):
    name: str
    summary: str


_COMMANDS = {
    "list": _Module("stapsdtd.cli.listing", "Show the probes that there are now."),
    "watch": _Module("stapsdtd.cli.watch", "Show probes, then how they come and go."),
    "trace": _Module("stapsdtd.cli.trace", "Print what fires."),
    "top": _Module("stapsdtd.cli.top", "Show what fires how often, live."),
    "info": _Module("stapsdtd.cli.info", "Show what the server is and offers."),
    "doctor": _Module("stapsdtd.cli.doctor", "Find what this host lacks, and what mends it."),
    "completion": _Module("stapsdtd.cli.completion", "Print the script that completes commands in a shell."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name].name).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, module.summary) for name, module in _COMMANDS.items()])


def _check_server(ctx: click.Context, option: click.Parameter, server: str) -> str:
    del ctx, option
    if not server.startswith(("unix:", "tcp:")) or server == "unix:":
        raise click.BadParameter(f"{server!r} is not of the form unix:PATH or tcp:HOST:PORT")
    return server


def _tls_file(name: str, about: str) -> Callable[[_F], _F]:
    return click.option(
        f"--tls-{name}",
        name,
        envvar=f"STAPSDT_TLS_{name.upper()}",
        default="",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help=about,
    )


_EXAMPLES = """\b
Examples:
  stapsdt list
  stapsdt trace 'postgresql:query__start(arg0:str)'
  stapsdt trace 'python*:function__*' --pid 4711 --json | jq .args
  stapsdt doctor
"""


@click.group(
    cls=_Commands, no_args_is_help=False, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--server",
    envvar="STAPSDT_SERVER",
    default=DEFAULT_SERVER,
    show_default=True,
    show_envvar=True,
    metavar="unix:PATH|tcp:HOST:PORT",
    callback=_check_server,
    help="Where stapsdtd listens.",
)
@_tls_file("certificate", "Your certificate, in PEM; for tcp:HOST:PORT, with the other two.")
@_tls_file("key", "Its key.")
@_tls_file("authority", "Certificate of the authority that signed the server's.")
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str, certificate: str, key: str, authority: str) -> None:
    """Static probes of this host: what there is, and what fires.

    A SELECTOR is provider:name, or provider:module:function:name with a pid if wanted (postgresql1234:::query-start).
    Globs work in each part, an empty part matches all, and - is the same as __ in names.
    """
    given = (certificate, key, authority)
    if any(given) and not all(given):
        raise click.UsageError("--tls-certificate, --tls-key and --tls-authority go together")
    ctx.obj = Server(server, *given)


def run(arguments: list[str] | None = None) -> int:
    """The exit code of `stapsdt ARGUMENTS`: 0 fine, 1 failed, 2 not understood. Each failure is told in one line."""
    if COMPLETION_VARIABLE in os.environ:
        import_module(_COMMANDS["completion"].name)
    try:
        status: int | None = cli.main(arguments, "stapsdt", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        return _misused(error)
    except click.ClickException as error:
        complain(error.format_message())
        return error.exit_code
    except StapsdtdError as error:
        from stapsdtd.client import (  # noqa: PLC0415 (gRPC costs 70 ms; who raises this has it)
            AccessDeniedError,
            InvalidRequestError,
            InvalidTargetError,
            LimitReachedError,
        )

        is_refused = isinstance(error, AccessDeniedError | LimitReachedError)
        hint = "; 'stapsdt info' shows what you may" if is_refused else ""
        complain(f"{error}{hint}")
        if isinstance(error, InvalidTargetError):
            return 2
        if not isinstance(error, InvalidRequestError):
            return 1
        for violation in error.violations:
            if violation.excerpt and sys.stderr.isatty():
                point_at(violation.excerpt, violation.caret)
        return 2
    except BrokenPipeError:
        # The reader has seen enough: `stapsdt list | head`.
        discard_output()
        return 0
    except OSError as error:
        discard_output()
        complain(f"cannot go on: {error.strerror or error}")
        return 1
    except click.Abort:
        return 130
    return status or 0


def main() -> None:
    # gRPC would write lines of its own when a handshake fails
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def _misused(error: click.UsageError) -> int:
    message = error.format_message().strip().removesuffix(".")
    path = error.ctx.command_path if error.ctx else "stapsdt"
    complain(f"error: {message[:1].lower()}{message[1:]}; see '{path} --help'")
    return error.exit_code
