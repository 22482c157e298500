"""The `stapsdt` command: its global options, and the reporting of errors.

Each subcommand is a module with a `command`, imported only when called: `stapsdt --help` needs neither gRPC nor numpy.
It receives a Server as its context object and returns its exit code, or None for 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple, ParamSpec, TypeVar

import click

from stapsdtd import __version__
from stapsdtd.addresses import DEFAULT_ADDRESS, WrongAddressError, matched
from stapsdtd.cli.options import Server
from stapsdtd.cli.render import discard_output, point_at, print_stderr
from stapsdtd.errors import StapsdtdError

_OPTIONS = {
    "scope.pids": "--pid",
    "scope.follow": "--follow",
    "scope.exclude_pids": "--exclude-pid",
    "scope.uids": "--uid",
    "scope.execnames": "--execname",
    "scope.cgroups": "--cgroup",
    "scope.containers": "--container",
    "pids": "--pid",
    "cgroups": "--cgroup",
    "containers": "--container",
    "files": "--file",
    "fields": "--fields",
    "where": "--where",
    "queue_bytes": "--queue",
    "kernel_buffer_kib": "--buffer",
    "aggregation.by": "--by",
    "aggregation.value": "VALUE",
    "aggregation.functions": "the functions",
    "aggregation.interval_ms": "--interval",
    "span.start_selectors": "START",
    "span.start_where": "--start-where",
    "span.key": "--key",
}
"""What fields of requests are called here."""

COMPLETION_VARIABLE = "_STAPSDT_COMPLETE"

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Module(NamedTuple):
    name: str
    summary: str


_COMMANDS = {
    "list": _Module("stapsdtd.cli.listing", "List the probes in running programs."),
    "watch": _Module("stapsdtd.cli.watch", "List probes, then show them appear and disappear."),
    "trace": _Module("stapsdtd.cli.trace", "Print events as probes fire."),
    "count": _Module("stapsdtd.cli.count", "Count how often probes fire, by key."),
    "stats": _Module("stapsdtd.cli.stats", "Show average, extremes and sum of an argument, by key."),
    "hist": _Module("stapsdtd.cli.hist", "Show the histogram of an argument, by key."),
    "latency": _Module("stapsdtd.cli.latency", "Show how long it takes from one probe to another, by key."),
    "spans": _Module("stapsdtd.cli.spans", "Print pairs of probes, and the time between them."),
    "d": _Module("stapsdtd.cli.d", "Run programs in D, DTrace's language."),
    "kernel": _Module("stapsdtd.cli.kernel", "Show functions of the kernel, with their types."),
    "top": _Module("stapsdtd.cli.top", "Show the busiest probes and processes, live."),
    "info": _Module("stapsdtd.cli.info", "Show the server's state and your rights."),
    "doctor": _Module("stapsdtd.cli.doctor", "Check this host and suggest fixes."),
    "signatures": _Module("stapsdtd.cli.import_signatures", "Make signatures of a provider's file."),
    "completion": _Module("stapsdtd.cli.completion", "Print a shell's completion script."),
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
    try:
        matched(server)
    except WrongAddressError as error:
        raise click.BadParameter(str(error)) from None
    return server


def _tls_file(name: str, help_text: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    return click.option(
        f"--tls-{name}",
        name,
        envvar=f"STAPSDT_TLS_{name.upper()}",
        default="",
        show_envvar=True,
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help=help_text,
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
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    metavar="unix:PATH|tcp:HOST:PORT",
    callback=_check_server,
    help="The address of stapsdtd.",
)
@_tls_file("certificate", "Your certificate (PEM), for tcp:HOST:PORT.")
@_tls_file("key", "The key of your certificate.")
@_tls_file("authority", "The certificate of the authority that signed the server's.")
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str, certificate: str, key: str, authority: str) -> None:
    """List and trace the static (SDT) probes of all programs on this host.

    A SELECTOR is provider:name, name, module:function:name or provider:module:function:name, the latter optionally with
    a pid after the provider (postgresql1234:::query-start). Each part may contain globs, an empty part matches
    everything, and - is the same as __ in providers and names. A part in double quotes is literal: 'paren:"a(b)"'.
    """
    files = (certificate, key, authority)
    if any(files) and not all(files):
        raise click.UsageError("--tls-certificate, --tls-key and --tls-authority go together")
    ctx.obj = Server(server, *files)


def run(arguments: list[str] | None = None) -> int:
    """Run `stapsdt ARGUMENTS` and return its exit code: 0 for success, 1 for failure, 2 for wrong usage.

    A failure is reported in one line on standard error.
    """
    if COMPLETION_VARIABLE in os.environ:
        import_module(_COMMANDS["completion"].name)
    try:
        status: int | None = cli.main(arguments, "stapsdt", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        return _report_usage_error(error, sys.argv[1:] if arguments is None else arguments)
    except click.ClickException as error:
        print_stderr(error.format_message())
        return error.exit_code
    except StapsdtdError as error:
        from stapsdtd.client import (  # noqa: PLC0415 (gRPC costs 70 ms; whatever raised this has loaded it)
            AccessDeniedError,
            InvalidRequestError,
            InvalidTargetError,
            LimitReachedError,
        )

        is_refused = isinstance(error, AccessDeniedError | LimitReachedError)
        hint = "; run 'stapsdt info' to see your rights" if is_refused else ""
        violations = error.violations if isinstance(error, InvalidRequestError) else ()
        told = "; ".join(f"{_shown(each.field)}: {each.description}" for each in violations)
        print_stderr(f"{told or error}{hint}")
        if isinstance(error, InvalidTargetError):
            return 2
        if not isinstance(error, InvalidRequestError):
            return 1
        for violation in violations:
            if violation.excerpt and sys.stderr.isatty():
                point_at(violation.excerpt, violation.caret)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe, as in `stapsdt list | head`.
        discard_output()
        return 0
    except OSError as error:
        discard_output()
        print_stderr(f"{error.filename or 'I/O error'}: {error.strerror or error}")
        return 1
    except click.Abort:
        return 130
    return status or 0


def _shown(field: str) -> str:
    """Return what a field is called here. Which of its values is wrong, the error says."""
    name = field.partition("[")[0] if field.endswith("]") else field
    return _OPTIONS.get(name, name)


def main() -> None:
    _open_standard_streams()
    # otherwise gRPC writes its own messages when a handshake fails
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def _open_standard_streams() -> None:
    """Have /dev/null in the place of standard streams that were closed, as with `>&-`: what is opened next would get
    their numbers, and what is meant for them.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free is this one
            os.open(os.devnull, os.O_RDWR)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)


def _report_usage_error(error: click.UsageError, arguments: Sequence[str]) -> int:
    message = error.format_message().strip().removesuffix(".")
    path = error.ctx.command_path if error.ctx else "stapsdt"
    advice = _habit(error, arguments) or f"see '{path} --help'"
    print_stderr(f"error: {message[:1].lower()}{message[1:]}; {advice}")
    return error.exit_code


def _habit(error: click.UsageError, arguments: Sequence[str]) -> str | None:
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    from stapsdtd.cli.habits import hint  # noqa: PLC0415 (only who errs pays for it)

    command = "" if error.ctx.command is cli else error.ctx.command_path.partition(" ")[2]
    options = [option for parameter in error.ctx.command.params for option in parameter.opts]
    return hint(arguments, error.option_name, command, options, _COMMANDS)
