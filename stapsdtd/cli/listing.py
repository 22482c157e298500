"""`stapsdt list`: shows the probes in running programs."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.render import abbreviate, console, format_signature, plural, print_stderr
from stapsdtd.client import Address, Client, Constant, Memory, Register, Unavailable
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from stapsdtd.client import Argument, Probe, ProbeListing, Process, Site

_MAX_SHOWN_PROCESSES = 5
_ID_LENGTH = 64
_SHORT_ID_LENGTH = 12


_EXAMPLES = """\b
Examples:
  stapsdt list
  stapsdt list 'hotspot:gc__*' --pid 4711
  stapsdt list --file /usr/lib/postgresql/15/bin/postgres
  stapsdt list --json | jq -r 'select(.provider == "libc") | .name'

In a pipe, each probe is one line of six tab-separated fields: provider:name, number of sites, whether there is a
semaphore (yes or no), pids, path, and argument types.
"""


@click.command("list", epilog=_EXAMPLES)
@options.selectors(required=False)
@options.pids
@options.cgroups
@options.containers
@options.files
@click.option("--details", is_flag=True, help="With --json, include the processes' names, users and containers.")
@options.as_json
@click.pass_obj
def command(
    server: options.Server,
    *,
    selectors: tuple[str, ...],
    pids: tuple[int, ...],
    cgroups: tuple[str, ...],
    containers: tuple[str, ...],
    files: tuple[str, ...],
    details: bool,
    as_json: bool,
) -> None:
    """Show the probes in running programs and the libraries they load. Without SELECTOR, all probes.

    With --file, show the probes in files, whether or not a program runs them.
    """
    with Client(server.address, tls=server.tls) as client:
        listing = client.list_probes(
            selectors, pids, containers=containers, cgroups=cgroups, files=files, details=details or not as_json
        )
    if as_json:
        processes = {process.pid: _process_record(process) for process in listing.processes}
        for probe in listing:
            extra = {"processes": [processes[pid] for pid in probe.pids if pid in processes]} if details else {}
            print(json.dumps(probe_record(probe) | extra))
    elif sys.stdout.isatty():
        _print_tables(listing)
    else:
        for probe in listing:
            print(probe_line(probe))
    _print_hints(listing, is_restricted=any((selectors, pids, cgroups, containers, files)))


def probe_record(probe: Probe) -> dict[str, object]:
    """Return a probe's JSON object."""
    return {
        "provider": probe.provider,
        "name": probe.name,
        "path": probe.path,
        "build_id": probe.build_id,
        "pids": probe.pids,
        "sites": [_site_record(site) for site in probe.sites],
    }


def _site_record(site: Site) -> dict[str, object]:
    record: dict[str, object] = {
        "offset": site.offset,
        "semaphore_offset": site.semaphore_offset,
        "function": site.function,
        "args": [_argument_record(argument) for argument in site.arguments],
    }
    return record | {"refused": site.refused} if site.refused else record


def _process_record(process: Process) -> dict[str, object]:
    return {
        "pid": process.pid,
        "namespace_pid": process.namespace_pid,
        "comm": process.comm,
        "user": process.user,
        "container": process.container_id,
        "cgroup": process.cgroup,
    }


def _argument_record(argument: Argument) -> dict[str, object]:
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
    """Return a probe's line of tab-separated fields, for pipes."""
    fields = (
        f"{probe.provider}:{probe.name}",
        str(len(probe.sites)),
        _semaphore(probe),
        ",".join(map(str, probe.pids)),
        probe.path,
        format_signature(probe.sites),
    )
    return "\t".join(map(escape, fields))


def _semaphore(probe: Probe) -> str:
    return "yes" if any(site.semaphore_offset is not None for site in probe.sites) else "no"


def _print_tables(listing: ProbeListing) -> None:
    processes = {process.pid: process for process in listing.processes}
    terminal = console()
    objects = groupby(sorted(listing, key=_object_key), key=_object_key)
    for index, (_, probes) in enumerate(objects):
        if index:
            terminal.print()
        _print_object(terminal, list(probes), processes)


def _object_key(probe: Probe) -> tuple[str, str, tuple[int, ...]]:
    return probe.path, probe.build_id or "", probe.pids


def _print_object(terminal: Console, probes: Sequence[Probe], processes: Mapping[int, Process]) -> None:
    from rich.table import Table  # noqa: PLC0415 (only needed on a terminal)
    from rich.text import Text  # noqa: PLC0415

    first = probes[0]
    terminal.print(Text(escape(first.path), style="bold"))
    mapped_by = abbreviate([_process(pid, processes) for pid in first.pids], _MAX_SHOWN_PROCESSES)
    terminal.print(Text(f"  mapped by {escape(mapped_by or 'no process')}", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  PROBE", overflow="fold")
    table.add_column("SITES", justify="right")
    table.add_column("SEMAPHORE")
    table.add_column("ARGUMENTS", overflow="fold")
    for probe in sorted(probes, key=lambda probe: (probe.provider, probe.name)):
        table.add_row(
            Text.assemble("  ", (f"{escape(probe.provider)}:", "cyan"), (escape(probe.name), "bold cyan")),
            str(len(probe.sites)),
            _semaphore(probe),
            Text(format_signature(probe.sites), style="green"),
        )
    terminal.print(table)


def _process(pid: int, processes: Mapping[int, Process]) -> str:
    """Return `postgres (4711)` or, with its pid inside, `postgres (4711, 7 in container 8d0c2f6e5b1a)`."""
    process = processes.get(pid)
    if process is None:
        return str(pid)
    container = process.container_id
    if container is None and process.namespace_pid == pid:
        return f"{process.comm} ({pid})"
    # ids are shortened, names are not
    shown = container[:_SHORT_ID_LENGTH] if container and len(container) == _ID_LENGTH else container
    return f"{process.comm} ({pid}, {process.namespace_pid} in {f'container {shown}' if shown else 'its namespace'})"


def _print_hints(listing: ProbeListing, *, is_restricted: bool) -> None:
    if listing.problems:
        problem = listing.problems[0]
        print_stderr(
            f"{plural(len(listing.problems), 'note')} cannot be used, for example in {problem.path}: {problem.reason}"
        )
    refused = [(probe, site) for probe in listing for site in probe.sites if site.refused]
    if refused:
        probe, site = refused[0]
        print_stderr(
            f"{plural(len(refused), 'site')} cannot be armed here, for example {probe.provider}:{probe.name} at "
            f"{probe.path}+{site.offset:#x}: {site.refused}"
        )
    if listing.sites_left_out:
        print_stderr(f"{plural(listing.sites_left_out, 'site')} of large objects left out: narrow it with a selector")
    if listing.probes:
        return
    if is_restricted:
        print_stderr("no probe matches: run 'stapsdt list' to see all probes")
    else:
        print_stderr("no running program has static probes; programs that start later are found automatically")
