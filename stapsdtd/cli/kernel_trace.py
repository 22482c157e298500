"""`stapsdt kernel trace`: prints calls of kernel functions, with values of their arguments and results."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import kernel_selectors, options
from stapsdtd.cli.command import started
from stapsdtd.cli.command_line import WithCommandLine, in_one_argument
from stapsdtd.cli.following import follow, set_on_signals, summary_of
from stapsdtd.cli.function_completion import complete_function
from stapsdtd.cli.kernel_lines import HEADER, FunctionLines
from stapsdtd.cli.kernel_plan import planned
from stapsdtd.cli.kernel_stacks import MAX_HELD, MAX_THREADS
from stapsdtd.cli.render import plural, print_stderr, write_lines
from stapsdtd.cli.trace import Printer
from stapsdtd.cli.trace_output import HumanOutput, JsonOutput
from stapsdtd.cli.unmatched import Hints
from stapsdtd.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.cli.command import Run
    from stapsdtd.cli.trace_output import Output
    from stapsdtd.client import EventBatch, Loss, SiteStatus
    from stapsdtd.subscribe_options import SubscribeOptions

_EXAMPLES = """\b
Examples:
  stapsdt kernel trace vfs_unlink
  stapsdt kernel trace 'vfs_read(str(file->f_path.dentry->d_name.name), count, return)' --pid 4711
  stapsdt kernel trace 'do_sys_openat2(str(filename), return < 0)'
  stapsdt kernel trace 'tcp_sendmsg(size > 1448, sk->__sk_common.skc_dport)' --json -- nc localhost 80
"""


class _Human(HumanOutput):
    def __init__(self, run: Run, lines: FunctionLines) -> None:
        super().__init__(run)
        self._functions = lines
        self._has_header = False

    def events(self, batch: EventBatch, limit: int | None) -> int:
        lines = self._functions.text(batch)[:limit]
        if lines and not self._has_header:
            self._has_header = True
            write_lines([HEADER])
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        self._functions.lost()
        super().loss(loss)

    def resubscribed(self, sites: Sequence[SiteStatus]) -> None:
        self._functions.lost()
        super().resubscribed(sites)


class _Json(JsonOutput):
    def __init__(self, lines: FunctionLines) -> None:
        super().__init__()
        self._functions = lines

    def events(self, batch: EventBatch, limit: int | None) -> int:
        lines = self._functions.json(batch)[:limit]
        write_lines(lines)
        return len(lines)

    def loss(self, loss: Loss) -> None:
        self._functions.lost()
        super().loss(loss)

    def resubscribed(self, sites: Sequence[SiteStatus]) -> None:
        self._functions.lost()
        super().resubscribed(sites)


@click.command("trace", cls=WithCommandLine, epilog=_EXAMPLES, short_help="Print their calls, with typed values.")
@click.argument("traced", metavar="FUNCTION...", nargs=-1, required=True, shell_complete=complete_function)
@options.process_options
@options.buffer
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N lines.")
@options.duration
@click.option("--zeros", "shows_zeros", is_flag=True, help="Print members of structs that are zero, too.")
@click.option("--stack", "is_stack", is_flag=True, help="Only calls of each FUNCTION that led to the next one.")
@in_one_argument
@options.output
@options.as_json
@click.pass_obj
def command(
    server: options.Server,
    *,
    traced: tuple[str, ...],
    count: int | None,
    duration: float | None,
    shows_zeros: bool,
    is_stack: bool,
    as_json: bool,
    command_line: tuple[str, ...],
    subscribe_options: SubscribeOptions,
) -> int:
    """Print calls of kernel functions: arguments at the entry, and the result at the return, as their types say.

    A FUNCTION is NAME or MODULE:NAME, of which all arguments are printed, what those point to that are pointers to
    structs, and the result; or a glob, without what is pointed to. NAME(VALUE, ...) prints these alone. A VALUE is an
    argument, or return, and any number of ->member, .member and [number]; str(VALUE) is the string that it points to,
    and ntohs(VALUE), ntohl(VALUE) and ntohll(VALUE) a number in network byte order.

    A VALUE may be compared to a constant: (count > 4096), (return < 0), (str(name) ~ "/etc/*"), (mode == READ). Calls
    for which that does not hold are not printed. With a condition on return, what there is at the entry is printed with
    the return.

    With --stack, calls are printed once the last FUNCTION is entered, and then as they return: of those that led to it
    through all the others, directly or not. A call for which a condition does not hold leads to nothing; with one on
    return, what it led to is printed once it has returned.

    That takes root, or a role with functions = true, and a kernel with fentry or kprobes; 'stapsdt doctor' tells.
    """
    wanted = [kernel_selectors.parse(each) for each in traced]

    async def trace() -> int:
        stop = asyncio.Event()
        with set_on_signals(stop), started(command_line, server.address) as run:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
                plan = await planned(client, wanted, is_stack=is_stack)
                scope = replace(run.in_scope(subscribe_options), expected_files=(), functions=plan.functions)
                clauses = plan.clauses()
                subscription = await stack.enter_async_context(client.query(clauses, scope))
                lines = FunctionLines(plan, shows_zeros=shows_zeros)
                output: Output = _Json(lines) if as_json else _Human(run, lines)
                output.begin(subscription.sites, Hints(evaluated_late=subscription.evaluated_late))
                printer = Printer(output, count, retries=server.retries)
                failure = await follow(subscription, printer.run(subscription), stop, duration=duration, run=run)
                failure = failure or printer.failure
                summary = summary_of(subscription, lines.seen if is_stack else printer.printed, run)
                if any(clause.span is None for clause in clauses):
                    # not all lines are pairs, and a call that has not returned is shown as it was entered
                    summary = replace(summary, spans=None, open=None)
            if failure:
                print_stderr(failure)
            if lines.forgotten:
                print_stderr(
                    f"calls of {plural(lines.forgotten, 'thread')} were forgotten before they returned: "
                    f"more than {MAX_THREADS} threads were in them at once or exited there, or more than {MAX_HELD} "
                    "entries and returns waited for them"
                )
            output.end(summary)
            return await run.exit_code(failure)

    return asyncio.run(trace())
