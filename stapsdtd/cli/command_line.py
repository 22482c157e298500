"""The command that a trace is to run: `-- COMMAND ARG...`, or `-c 'COMMAND ARG...'`."""

from __future__ import annotations

import shlex

import click


def _split(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Split a command as a shell does, without its expansions."""
    try:
        words = tuple(shlex.split(text)) if text is not None else ()
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}".lower(), ctx, parameter) from None
    if text is not None and not words:
        raise click.BadParameter("names no command", ctx, parameter)
    return words


in_one_argument = click.option(
    "-c",
    "--command",
    metavar="COMMAND",
    callback=_split,
    help="Run COMMAND and trace it and its children; as '-- COMMAND', in one argument.",
)


class WithCommandLine(click.Command):
    """A command behind whose arguments another may stand, `-- COMMAND ARG...`, which it receives as command_line.

    `in_one_argument` has to be among its options.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        command_line = tuple(args[at + 1 :])
        if at == len(args) - 1:
            raise click.UsageError("a command has to follow '--'", ctx)
        rest = super().parse_args(ctx, args[:at])
        alternative = ctx.params.pop("command")
        if command_line and alternative:
            raise click.UsageError("give one command, either with -c or after '--'", ctx)
        command_line = command_line or alternative
        if command_line and ctx.params["pids"]:
            raise click.UsageError("give either --pid or a command, whose processes are traced", ctx)
        if command_line and ctx.params["follow"]:
            raise click.UsageError("a command is followed anyway; leave --follow out", ctx)
        ctx.params["command_line"] = command_line
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARG]...]"]
