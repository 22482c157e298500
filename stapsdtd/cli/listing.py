"""`stapsdt list`: the probes that there are now."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from stapsdtd.cli import options
from stapsdtd.cli.render import complain, console, plural, show_signature, show_some
from stapsdtd.client import Address, Client, Constant, Memory, Register, Unavailable
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from stapsdtd.client import Argument, Probe, ProbeListing, Process, Site

_SHOWN_PROCESSES = 5
_ID_LENGTH = 64
_SHOWN_ID = 12


_EXAMPLES = """\b
Examples:
  stapsdt list
  stapsdt list 'hotspot:gc__*' --pid 4711
  stapsdt list --json | jq -r 'select(.provider == "libc") | .name'

In a pipe each probe is one line of six fields with tabs between: provider:name, how many sites, whether there is a
semaphore (yes or no), pids, path, and the types of the arguments.
"""


@click.command("list", epilog=_EXAMPLES)
@options.selectors(required=False)
@options.pids
@options.cgroups
@options.containers
@click.option("--details", is_flag=True, help="With --json, tell who the processes are and where they run.")
@options.as_json
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    pids: tuple[int, ...],
    cgroups: tuple[str, ...],
    containers: tuple[str, ...],
    details: bool,
    as_json: bool,
) -> None:
    """Show the probes in objects that running programs map; without SELECTOR, all."""
    with Client(server.address, tls=server.tls) as client:
        listing = client.list_probes(
            selectors, pids, containers=containers, cgroups=cgroups, details=details or not as_json
        )
    if as_json:
        processes = {process.pid: _process_record(process) for process in listing.processes}
        for probe in listing:
            told = {"processes": [processes[pid] for pid in probe.pids if pid in processes]} if details else {}
            print(json.dumps(probe_record(probe) | told))
    elif sys.stdout.isatty():
        _print_tables(listing)
    else:
        for probe in listing:
            print(probe_line(probe))
    _hint(listing, is_chosen=any((selectors, pids, cgroups, containers)))


def probe_record(probe: Probe) -> dict[str, Any]:
    """A probe as JSON has it."""
    return {
        "provider": probe.provider,
        "name": probe.name,
        "path": probe.path,
        "build_id": probe.build_id,
        "pids": probe.pids,
        "sites": [_site_record(site) for site in probe.sites],
    }


def _site_record(site: Site) -> dict[str, Any]:
    return {
        "offset": site.offset,
        "semaphore_offset": site.semaphore_offset,
        "function": site.function,
        "args": [_argument_record(argument) for argument in site.arguments],
    } | ({"refused": site.refused} if site.refused else {})


def _process_record(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "namespace_pid": process.namespace_pid,
        "comm": process.comm,
        "user": process.user,
        "container": process.container_id,
        "cgroup": process.cgroup,
    }


def _argument_record(argument: Argument) -> dict[str, Any]:
    common = {
        "text": argument.text,
        "size": argument.size,
        "signed": argument.signed,
        "float": argument.is_float,
    }
    match argument.operand:
        case Constant(value):
            return common | {"kind": "constant", "value": value}
        case Register(name, first_bit):
            return common | {"kind": "register", "name": name, "first_bit": first_bit}
        case Memory(base, displacement, index, scale, symbol):
            indexed = {"index": index, "scale": scale} if index else {}
            named = {"symbol": symbol} if symbol else {}
            return common | {"kind": "memory", "base": base, "displacement": displacement} | indexed | named
        case Address(base, displacement, symbol):
            return common | {"kind": "address", "base": base, "displacement": displacement, "symbol": symbol}
        case Unavailable(reason):
            return common | {"kind": "unavailable", "reason": reason}


def probe_line(probe: Probe) -> str:
    """A probe as a pipe gets it."""
    fields = (
        f"{probe.provider}:{probe.name}",
        str(len(probe.sites)),
        _semaphore(probe),
        ",".join(map(str, probe.pids)),
        probe.path,
        show_signature(probe.sites),
    )
    return "\t".join(map(escape, fields))


def _semaphore(probe: Probe) -> str:
    return "yes" if any(site.semaphore_offset is not None for site in probe.sites) else "no"


def _print_tables(listing: ProbeListing) -> None:
    known = {process.pid: process for process in listing.processes}
    terminal = console()
    objects = groupby(sorted(listing, key=_object), key=_object)
    for index, (_, probes) in enumerate(objects):
        if index:
            terminal.print()
        _print_object(terminal, list(probes), known)


def _object(probe: Probe) -> tuple[str, str, tuple[int, ...]]:
    return probe.path, probe.build_id or "", probe.pids


def _print_object(terminal: Console, probes: Sequence[Probe], known: Mapping[int, Process]) -> None:
    from rich.table import Table  # noqa: PLC0415 (only a terminal needs it)
    from rich.text import Text  # noqa: PLC0415

    first = probes[0]
    terminal.print(Text(escape(first.path), style="bold"))
    processes = show_some([_process(pid, known) for pid in first.pids], _SHOWN_PROCESSES)
    terminal.print(Text(f"  mapped by {escape(processes)}", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  PROBE", overflow="fold")
    table.add_column("SITES", justify="right")
    table.add_column("SEMAPHORE")
    table.add_column("ARGUMENTS", overflow="fold")
    for probe in sorted(probes, key=lambda each: (each.provider, each.name)):
        table.add_row(
            Text.assemble("  ", (f"{escape(probe.provider)}:", "cyan"), (escape(probe.name), "bold cyan")),
            str(len(probe.sites)),
            _semaphore(probe),
            Text(show_signature(probe.sites), style="green"),
        )
    terminal.print(table)


def _process(pid: int, known: Mapping[int, Process]) -> str:
    """`postgres (4711)`, or with its pid there, `postgres (4711, 7 in container 8d0c2f6e5b1a)`."""
    process = known.get(pid)
    if process is None:
        return str(pid)
    container = process.container_id
    if container is None and process.namespace_pid == pid:
        return f"{process.comm} ({pid})"
    # an id, which is long, and not a name
    shown = container[:_SHOWN_ID] if container and len(container) == _ID_LENGTH else container
    return f"{process.comm} ({pid}, {process.namespace_pid} in {f'container {shown}' if shown else 'its namespace'})"


def _hint(listing: ProbeListing, *, is_chosen: bool) -> None:
    if listing.problems:
        problem = listing.problems[0]
        complain(
            f"{plural(len(listing.problems), 'note')} cannot be used, for example in {problem.path}: {problem.reason}"
        )
    refused = [(probe, site) for probe in listing for site in probe.sites if site.refused]
    if refused:
        probe, site = refused[0]
        complain(
            f"{plural(len(refused), 'site')} cannot be armed here, for example {probe.provider}:{probe.name} at "
            f"{probe.path}+{site.offset:#x}: {site.refused}"
        )
    if listing.sites_left_out:
        complain(f"{plural(listing.sites_left_out, 'site')} of large objects left out: choose with a selector")
    if listing.probes:
        return
    if is_chosen:
        complain("no probe matches: 'stapsdt list' shows all there are")
    else:
        complain("no running program has static probes; those of programs started later appear by themselves")
