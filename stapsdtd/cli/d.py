"""`stapsdt d`: runs D programs."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.command import started
from stapsdtd.cli.d_functions import functions_of
from stapsdtd.cli.d_hits import Hits
from stapsdtd.cli.d_prepared import prepare
from stapsdtd.cli.d_run import Output, Runner, tell_fault
from stapsdtd.cli.d_sources import CompileError, Source, WithSources, source
from stapsdtd.cli.following import follow, set_on_signals
from stapsdtd.cli.render import plural, print_stderr
from stapsdtd.client import AsyncClient, ClientError, SubscribeOptions
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.interpret import Program as Running
from stapsdtd.query.d.kernel_functions import with_results
from stapsdtd.query.d.macros import substituted
from stapsdtd.query.d.nodes import NOWHERE, Option, Part, Program
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.probes import Moment
from stapsdtd.query.d.records import Records
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from stapsdtd.cli.command import Run
    from stapsdtd.cli.d_prepared import Prepared
    from stapsdtd.client import AsyncSubscription, Probe

_DEFAULT_ARGUMENTS = 10
BACKLOG_SECONDS = 1.5
"""How long hits are looked at that fired before Ctrl-C, ..."""
_GRACE_SECONDS = 1.0
"""... and what the server has added up is waited for behind a second one."""

_EXAMPLES = """\b
Examples:
  stapsdt d -n 'postgresql*:::query-start { @[copyinstr(arg0)] = count(); }'
  stapsdt d -n 'python$target:::gc* { @[probename] = count(); }' -p 4711
  stapsdt d -s script.d -c './program'
"""


@click.command("d", cls=WithSources, epilog=_EXAMPLES)
@click.option("-n", "names", multiple=True, metavar="PROGRAM", help="Run PROGRAM. Repeatable, as the next four.")
@click.option("-P", "providers", multiple=True, metavar="PROGRAM", help="Likewise, where a description is PROVIDER.")
@click.option("-m", "modules", multiple=True, metavar="PROGRAM", help="... where it is [PROVIDER:]MODULE.")
@click.option("-f", "functions", multiple=True, metavar="PROGRAM", help="... where it is [[PROVIDER:]MODULE:]FUNCTION.")
@click.option(
    "-s", "scripts", multiple=True, metavar="FILE", type=click.Path(dir_okay=False, path_type=str), help="Run FILE."
)
@click.option("-p", "pid", type=click.IntRange(min=1), metavar="PID", help="Make $target PID, and stop when it ends.")
@click.option("-c", "command_text", metavar="COMMAND", help="Run COMMAND as $target, from its start until it ends.")
@click.option("-q", "quiet", is_flag=True, help="Print only what the program prints.")
@click.option("-l", "lists", is_flag=True, help="List the probes that the program means, and do not run it.")
@click.option("-v", "verbose", is_flag=True, help="With -l, list the types of the probes' arguments, too.")
@click.option("-e", "compiles", is_flag=True, help="Check the program, and do not run it.")
@click.option("--explain", "explains", is_flag=True, help="Say what of the program the server does, and do not run it.")
@click.option("-Z", "allow_none", is_flag=True, help="Allow descriptions that match no probes yet.")
@click.option("-x", "settings", multiple=True, metavar="NAME[=VALUE]", help="Set an option of D. Repeatable.")
@click.option("-b", "buffer_bytes", metavar="SIZE", help="Like -x bufsize=SIZE.")
@options.no_retry
@options.output
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...")
@click.pass_obj
def command(
    server: options.Server,
    *,
    sources: tuple[tuple[str, str], ...],
    pid: int | None,
    command_text: str | None,
    quiet: bool,
    lists: bool,
    verbose: bool,
    compiles: bool,
    explains: bool,
    allow_none: bool,
    settings: tuple[str, ...],
    buffer_bytes: str | None,
    arguments: tuple[str, ...],
) -> int:
    """Run programs in D, DTrace's language, over the static probes and kernel functions of this host.

    ARGUMENTs are $1, $2, ... or, as strings, $$1, $$2, .... What D has here and what it has not is in docs/d.md.
    """
    if not sources and not lists:
        raise click.UsageError("give a program, by -n, -P, -m, -f or -s")
    if verbose and not lists:
        raise click.UsageError("-v goes with -l; programs have no stability to report")
    if pid is not None and command_text is not None:
        raise click.UsageError("-p and -c exclude each other")
    # without a program, all probes are listed
    programs = [source(*each) for each in sources] or [Source(":::", Part.NAME, "the list")]
    given = [*(["quiet"] if quiet else []), *(["zdefs"] if allow_none or not sources else []), *settings]
    given += [] if buffer_bytes is None else [f"bufsize={buffer_bytes}"]
    wanted = _Wanted(
        programs,
        [Option(*_setting(each), NOWHERE) for each in given],
        arguments,
        lists=lists,
        is_verbose=verbose,
        compiles=compiles,
        explains=explains,
    )
    return asyncio.run(_run(server, wanted, pid, tuple(shlex.split(command_text or ""))))


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


@dataclass(frozen=True, slots=True)
class _Wanted:
    sources: Sequence[Source]
    settings: Sequence[Option]
    arguments: Sequence[str]
    lists: bool
    is_verbose: bool
    compiles: bool
    explains: bool

    def parsed(self, target: int | None) -> list[Program]:
        """Return the programs without macro variables. Raises CompileError."""
        parts = []
        for each in self.sources:
            try:
                part = each.parsed(self.settings)
                settings = options_of([*part.options, *self.settings])
                values = _macros(self.arguments, target, is_lenient=settings.has_default_arguments)
                parts.append(with_results(substituted(part, values)))
            except DError as error:
                raise each.failed(error) from None
        return parts

    def prepared(self, parts: Sequence[Program], probes: Sequence[Probe]) -> Prepared:
        """Return all programs as one that can run; see `prepare`. Raises CompileError."""
        settings = (*chain.from_iterable(part.options for part in parts), *self.settings)
        whole, prepared = Program((), (), settings), None
        for origin, part in zip(self.sources, parts, strict=True):
            whole = Program(whole.clauses + part.clauses, whole.declarations + part.declarations, settings)
            try:
                # with those before it, since it may use their variables: what is wrong now is wrong here
                prepared = prepare(whole, probes)
            except DError as error:
                raise origin.failed(error) from None
            except InvalidArgumentError as error:
                raise CompileError(escape(f"failed to compile {origin.what}: {error.reason}")) from None
        if prepared is None:
            raise AssertionError("there is a program")
        return prepared


def _macros(arguments: Sequence[str], target: int | None, *, is_lenient: bool) -> Mapping[str, str]:
    values = {str(number): "0" for number in range(_DEFAULT_ARGUMENTS)} if is_lenient else {}
    values |= {str(number): text for number, text in enumerate(arguments, 1)}
    values |= {"pid": str(os.getpid()), "ppid": str(os.getppid()), "uid": str(os.getuid()), "gid": str(os.getgid())}
    values |= {"euid": str(os.geteuid()), "egid": str(os.getegid()), "sid": str(os.getsid(0)), "0": "stapsdt"}
    return values if target is None else values | {"target": str(target)}


async def _run(server: options.Server, wanted: _Wanted, pid: int | None, command_line: tuple[str, ...]) -> int:
    interrupts = _Interrupts(asyncio.Event(), asyncio.Event(), asyncio.Event())
    with set_on_signals(interrupts.first, interrupts.second), started(command_line, server.address) as run:
        scope = run.in_scope(SubscribeOptions(lease_seconds=options.LEASE_SECONDS, exclude_pids=(os.getpid(),)))
        target = next(iter(scope.pids), pid)
        parts = wanted.parsed(target)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(server.address, tls=server.tls))
            functions = await functions_of(client, parts, lambda part, error: wanted.sources[part].failed(error))
            probes = [*await _probes(client, scope), *functions.probes]
            prepared = wanted.prepared(functions.programs, probes)
            if wanted.lists:
                prepared.print_list(is_verbose=wanted.is_verbose)
            if wanted.explains:
                prepared.print_plan()
            if wanted.lists or wanted.explains or wanted.compiles:
                return 0
            # a program's clauses are about whomever they name, not about the command alone
            scope = replace(scope, pids=(), follow=False, functions=functions.texts)
            if pid is not None:
                stack.callback(_stop_with(pid, interrupts.stop))
            failure, status = await _trace(client, prepared, scope, run, interrupts, retries=server.retries)
        if failure:
            print_stderr(failure)
        code = await run.exit_code(failure)
        return status if status is not None and not failure else code


async def _probes(client: AsyncClient, scope: SubscribeOptions) -> list[Probe]:
    """Return the probes that there are: those of programs that run, and of the files of one that is about to."""
    found = list((await client.list_probes()).probes)
    for path in scope.expected_files:
        # a file without probes is no reason not to run
        with suppress(ClientError):
            listed = (await client.list_probes(files=[path])).probes
            # others may map a library that this one is about to
            found += [replace(each, pids=(*each.pids, *scope.pids)) for each in listed]
    return found


@dataclass(frozen=True, slots=True)
class _Interrupts:
    """Ctrl-C, pressed once and twice. stop: set when a program is to end, whatever the reason is."""

    first: asyncio.Event
    second: asyncio.Event
    stop: asyncio.Event

    async def hurry(self, runner: Runner) -> None:
        """Have a program end soon behind the first one."""
        await self.first.wait()
        runner.hurry(BACKLOG_SECONDS)
        self.stop.set()

    async def awaited(self, following: Coroutine[object, object, str | None], runner: Runner) -> str | None:
        """Return what a coroutine returns, or behind the second one why it was given up."""
        tasks = task, impatience = asyncio.create_task(following), asyncio.create_task(self.second.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            runner.hurry(0 if impatience.done() else math.inf)
            await asyncio.wait([task], timeout=_GRACE_SECONDS)
            return await task if task.done() else "interrupted before the server had told all that it added up"
        finally:
            task.cancel()
            impatience.cancel()


async def _trace(
    client: AsyncClient,
    prepared: Prepared,
    scope: SubscribeOptions,
    run: Run,
    interrupts: _Interrupts,
    *,
    retries: bool,
) -> tuple[str | None, int | None]:
    """Return why it failed, and the program's own exit status, None for neither."""
    settings, stop = options_of(prepared.checked.program.options), interrupts.stop
    output = Output()
    records = Records(output.write, is_quiet=settings.is_quiet)
    program = Running(prepared.checked, records, settings.sorting, tell_fault)
    runner = Runner(program, output, prepared.lowered, retries=retries)
    if not settings.is_quiet:
        print_stderr(f"matched {plural(len(prepared.probes()), 'probe')}")
    failure: str | None = None
    async with AsyncExitStack() as stack:
        subscription: AsyncSubscription | None = None
        if clauses := prepared.clauses():
            subscription = await stack.enter_async_context(client.query(clauses, scope))
            subscription.open_stream()
        hits = Hits(
            prepared.interpreted, prepared.meant, prepared.needs, subscription.described if subscription else {}
        )
        runner.own(Moment.BEGIN, hits.own("dtrace", "BEGIN"))
        if runner.done.is_set():
            stop.set()
        tasks = [
            interrupts.hurry(runner),
            runner.until_done(stop),
            *(runner.tick(each, hits) for each in runner.ticks()),
        ]
        running = [asyncio.create_task(each) for each in tasks]
        if subscription is not None:
            following = follow(subscription, runner.read(subscription, hits), stop, duration=None, run=run)
            failure = await interrupts.awaited(following, runner)
        else:
            if not stop.is_set():
                run.release(stop)
            await stop.wait()
        for task in running:
            task.cancel()
        runner.finish(hits.own("dtrace", "END"))
    return failure or output.failure, program.exit_status


def _stop_with(pid: int, stop: asyncio.Event) -> Callable[[], None]:
    """Set stop when a process ends. Return a function that ends that. Raises CompileError if there is none."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise CompileError(f"failed to grab process {pid}: {error.strerror}") from None
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, stop.set)

    def end() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)

    return end
