"""The `stapsdt` command: options that all commands share, and the one place where an error becomes a line of text.

A command is a module with a `command`, imported when it is called: `stapsdt --help` needs neither gRPC nor numpy. It
gets the server's address as its context object and returns its exit code, None for 0.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple

import click

from stapsdtd import __version__
from stapsdtd.cli.render import complain, discard_output, point_at
from stapsdtd.errors import StapsdtdError

COMPLETION_VARIABLE = "_STAPSDT_COMPLETE"
DEFAULT_SERVER = "unix:/run/stapsdtd/stapsdtd.sock"


class _Module(NamedTuple):
    name: str
    summary: str


_COMMANDS = {
    "list": _Module("stapsdtd.cli.listing", "Show the probes that there are now."),
    "watch": _Module("stapsdtd.cli.watch", "Show probes, then how they come and go."),
    "trace": _Module("stapsdtd.cli.trace", "Print what fires."),
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
    if not server.startswith("unix:") or server == "unix:":
        raise click.BadParameter(f"{server!r} is not of the form unix:PATH")
    return server


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
    metavar="unix:PATH",
    callback=_check_server,
    help="Socket that stapsdtd listens on.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str) -> None:
    """Static probes of this host: what there is, and what fires.

    A SELECTOR is provider:name, or provider:module:function:name with a pid if wanted (postgresql1234:::query-start).
    Globs work in each part, an empty part matches all, and - is the same as __ in names.
    """
    ctx.obj = server


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
        from stapsdtd.client import InvalidRequestError  # noqa: PLC0415 (gRPC costs 70 ms; who raises this has it)

        complain(str(error))
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def _misused(error: click.UsageError) -> int:
    message = error.format_message().strip().removesuffix(".")
    path = error.ctx.command_path if error.ctx else "stapsdt"
    complain(f"error: {message[:1].lower()}{message[1:]}; see '{path} --help'")
    return error.exit_code
