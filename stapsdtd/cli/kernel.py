"""`stapsdt kernel`: shows functions of the kernel, with their types, and traces them."""

from __future__ import annotations

import json
import shlex

import click

from stapsdtd.cli import options
from stapsdtd.cli.function_completion import complete_function
from stapsdtd.cli.function_selectors import ENTRY, PROVIDER
from stapsdtd.cli.function_text import function_lines, function_record, why_no_way, why_unknown
from stapsdtd.cli.kernel_trace import command as trace
from stapsdtd.cli.render import plural, print_stderr
from stapsdtd.client import Client

_VALUES: dict[str, list[str]] = {
    "latency": [], "spans": [], "count": [], "top": [], "stats": ["arg0"], "hist": ["arg0"],
}  # fmt: skip
"""Commands for all probes, and which value of an entry to show."""

_EXAMPLES = """\b
Examples:
  stapsdt kernel info vfs_read
  stapsdt kernel info 'tcp_*' 'nf_conntrack:nf_ct_*'
  stapsdt kernel info 'vfs_read(file->f_path.dentry->d_name.name, count, return)'
  stapsdt kernel info --json 'vfs_*' | jq -r 'select(.attaches_by == []) | .function'
"""


class _Functions(click.Group):
    """Says of commands for all probes how they take functions."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *functions = args
        if name in _VALUES and name not in self.commands:
            function = next((each for each in functions if not each.startswith("-")), "FUNCTION")
            module, _, last = function.partition("(")[0].rpartition(":")
            typed = ["stapsdt", name, f"{PROVIDER}:{module}:{last}:{ENTRY}", *_VALUES[name]]
            raise click.UsageError(f"functions are probes for {name}; type: {shlex.join(typed)}", ctx)
        return super().resolve_command(ctx, args)


@click.group("kernel", cls=_Functions, no_args_is_help=False)
def command() -> None:
    """Show functions of the kernel, with their types, and trace them."""


command.add_command(trace)


@command.command("info", epilog=_EXAMPLES, short_help="Show their types, and where values lie.")
@click.argument("functions", metavar="FUNCTION...", nargs=-1, required=True, shell_complete=complete_function)
@options.as_json
@click.pass_obj
def info(server: options.Server, *, functions: tuple[str, ...], as_json: bool) -> int:
    """Show C prototypes of kernel functions, and what cannot be traced of them.

    A FUNCTION is NAME or MODULE:NAME, both of which may be globs; the kernel itself is the module vmlinux. With values
    in parentheses, NAME(VALUE, ...), it shows the type of each, and where it lies. A VALUE is an argument, or return,
    and any number of ->member, .member and [number].

    The exit code is 1 if the kernel's BTF does not have a FUNCTION.
    """
    with Client(server.address, tls=server.tls) as client:
        listing = client.kernel_functions(functions)
    for function in listing:
        if as_json:
            print(json.dumps(function_record(function)))
        else:
            print("\n".join(function_lines(function)))
    for unknown in listing.unknown:
        print_stderr(why_unknown(unknown))
    if listing.left_out:
        print_stderr(f"{plural(listing.left_out, 'function')} left out: narrow it with a longer name or a module")
    if listing.functions and (reason := why_no_way(listing.ways)):
        print_stderr(reason)
    return 1 if listing.unknown else 0
