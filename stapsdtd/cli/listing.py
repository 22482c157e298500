"""`stapsdt list`: shows the probes in running programs, or in files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from stapsdtd.catalog.selector_text import exact_selector, probe_name
from stapsdtd.catalog.selectors import parse
from stapsdtd.cli import options
from stapsdtd.cli.known_signatures import catalog, no_signatures
from stapsdtd.cli.moved_text import moved_lines
from stapsdtd.cli.probe_tables import dtrace_lines, fit_of, object_lines, semaphore, unusable
from stapsdtd.cli.render import format_signature, plural, print_grouped, print_stderr, terminal_width, wants_color
from stapsdtd.cli.unmatched import has_inventory, why_unmatched
from stapsdtd.client import Address, Client, Constant, InventoryState, Memory, Probe, Register, Unavailable
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stapsdtd.client import Argument, ProbeListing, Problem, Process, Site
    from stapsdtd.signatures import Catalog, Fit


_EXAMPLES = """\b
Examples:
  stapsdt list
  stapsdt list 'hotspot:gc__*' --pid 4711
  stapsdt list --file /usr/lib/postgresql/15/bin/postgres
  stapsdt list --installed 'hotspot:class__*'
  stapsdt list -l 'postgresql4711:::query-*'
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
@click.option(
    "--installed", is_flag=True, help="Show the probes in installed files, whether or not a program runs them."
)
@click.option(
    "--details",
    is_flag=True,
    help="Show processes' users, containers and cgroups, what is known of each probe, and where each site is.",
)
@click.option(
    "-l", "--dtrace", "as_dtrace", is_flag=True, help="Print DTrace's columns: ID, PROVIDER, MODULE, FUNCTION, NAME."
)
@click.option("-v", "--types", is_flag=True, help="As -l, with the types of the arguments.")
@no_signatures
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
    installed: bool,
    details: bool,
    as_dtrace: bool,
    types: bool,
    no_signatures: bool,
    as_json: bool,
) -> int:
    """Show the probes in running programs and the libraries they load. Without SELECTOR, all probes.

    With --file or --installed, show the probes in files, whether or not a program runs them. The exit code is 1 if
    nothing matches.
    """
    if files and installed:
        raise click.UsageError("--installed cannot be combined with --file")
    known = catalog() if details and not no_signatures else None
    with Client(server.address, tls=server.tls) as client:
        listing = client.list_probes(
            selectors,
            pids,
            containers=containers,
            cgroups=cgroups,
            files=files,
            installed=installed,
            details=details or not as_json,
            problems=True,
            moved=True,
        )

        if as_json:
            processes = {process.pid: _process_record(process) for process in listing.processes}
            for probe in listing:
                extra: dict[str, object] = {}
                if details:
                    extra["processes"] = [processes[pid] for pid in probe.pids if pid in processes]
                    extra |= _known_record(fit_of(known, probe)) if known else {}
                if moved := [each for each in listing.moved if each.concerns(probe)]:
                    extra["moved"] = [{"pid": each.pid, "comm": each.comm, "memory": each.memory} for each in moved]
                print(json.dumps(probe_record(probe) | extra))
            for problem in listing.problems:
                print(json.dumps(_problem_record(problem)))
        elif listing.probes:
            for line in _lines(listing, details=details, as_dtrace=as_dtrace or types, types=types, known=known):
                print(line)
        # what matches nothing has its reason below
        _print_hints(listing, () if selectors and not listing.probes else listing.problems)
        if listing.probes:
            return 0
        is_restricted = any((selectors, pids, cgroups, containers, files))
        if installed:
            return _say_why_none_installed(client, selectors, listing.problems, is_restricted=is_restricted)
        return _say_why_empty(client, selectors, files, listing.problems, is_restricted=is_restricted)


def _lines(
    listing: ProbeListing, *, details: bool, as_dtrace: bool, types: bool, known: Catalog | None
) -> Iterator[str]:
    if as_dtrace:
        return dtrace_lines(listing, types=types)
    if details or sys.stdout.isatty():
        width, color = terminal_width(sys.stdout), wants_color(sys.stdout)
        return object_lines(listing, width=width, color=color, details=details, known=known)
    return map(probe_line, listing)


def probe_record(probe: Probe) -> dict[str, object]:
    """Return a probe's JSON object. selector: matches this probe of this file alone."""
    return {
        "provider": probe.provider,
        "name": probe.name,
        "selector": exact_selector(probe.provider, probe.path, probe.name),
        "path": probe.path,
        "build_id": probe.build_id,
        "pids": probe.pids,
        "sites": [_site_record(site) for site in probe.sites],
    }


def _problem_record(problem: Problem) -> dict[str, object]:
    """Return the JSON object of a note that cannot be used: that of a probe without sites."""
    probe = Probe(problem.provider, problem.name, problem.path, None, "", (), ())
    selector = {} if problem.provider and problem.name else {"selector": None}
    return probe_record(probe) | selector | {"unusable": problem.reason}


def _site_record(site: Site) -> dict[str, object]:
    record: dict[str, object] = {
        "offset": site.offset,
        "semaphore_offset": site.semaphore_offset,
        "function": site.function,
        "args": [_argument_record(argument) for argument in site.arguments],
    }
    return record | {"refused": site.refused} if site.refused else record


def _known_record(fit: Fit) -> dict[str, object]:
    if fit.contradiction:
        return {"signature_not_used": fit.contradiction}
    if (signature := fit.signature) is None:
        return {}
    arguments = signature.arguments
    record: dict[str, object] = {
        "text": signature.text,
        "arguments": None if arguments is None else [declared.text for declared in arguments],
        "ends_with": signature.ends_with or None,
        "latest": signature.latest,
        "notes": [note for _, note in signature.notes],
        "source": signature.source,
        "versions": signature.versions,
    }
    return {"signature": record}


def _process_record(process: Process) -> dict[str, object]:
    return {
        "pid": process.pid,
        "namespace_pid": process.namespace_pid,
        "comm": process.comm,
        "user": process.user,
        "container": process.container_id,
        "container_name": process.container_name,
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
        probe_name(probe.provider, probe.name),
        str(len(probe.sites)),
        semaphore(probe),
        ",".join(map(str, probe.pids)),
        probe.path,
        format_signature(probe.sites),
    )
    return "\t".join(map(escape, fields))


def _print_hints(listing: ProbeListing, problems: Iterable[Problem]) -> None:
    """Print on standard error what cannot be used or armed, and what is left out."""
    print_grouped("cannot be used", ((each.reason, f"{unusable(each)} in {each.path}") for each in problems))
    print_grouped(
        "cannot be armed here",
        (
            (site.refused, f"{probe_name(probe.provider, probe.name)} at {probe.path}+{site.offset:#x}")
            for probe in listing
            for site in probe.sites
            if site.refused
        ),
    )
    for line in moved_lines(listing.moved):
        print_stderr(line)
    if listing.sites_left_out:
        print_stderr(f"{plural(listing.sites_left_out, 'site')} of large objects left out: narrow it with a selector")
    if listing.problems_left_out:
        print_stderr(f"cannot be used: {plural(listing.problems_left_out, 'more note')}")
    if listing.files_left_out:
        print_stderr(f"{plural(listing.files_left_out, 'installed file')} left out: narrow it with a selector")


def _say_why_none_installed(
    client: Client, selectors: Sequence[str], problems: Sequence[Problem], *, is_restricted: bool
) -> int:
    """Print on standard error why no installed probe is listed, and return the exit code."""
    inventory = client.info().inventory
    if inventory is not None and inventory.state is InventoryState.SCANNING:
        print_stderr("installed files are still being scanned: try again in some seconds")
        return 1
    if not is_restricted:
        print_stderr("no installed file has static probes")
        return 0
    known = client.list_probes(installed=True) if selectors else ()
    for selector in map(parse, selectors):
        print_stderr(str(why_unmatched(selector, known, problems=problems, where="installed file")))
    if not selectors:
        print_stderr("no probe matches: run 'stapsdt list --installed' to see all probes in installed files")
    return 1


def _say_why_empty(
    client: Client,
    selectors: Sequence[str],
    files: Sequence[str],
    problems: Sequence[Problem],
    *,
    is_restricted: bool,
) -> int:
    """Print on standard error why no probe is listed, and return the exit code."""
    if not is_restricted:
        print_stderr("no running program has static probes; programs that start later are found automatically")
        return 0
    known = client.list_probes(files=files) if selectors else ()
    inventory = client.list_probes(installed=True) if not files and has_inventory(client.info()) else ()
    for selector in map(parse, selectors):
        print_stderr(str(why_unmatched(selector, known, inventory, problems)))
    if not selectors:
        print_stderr("no probe matches: run 'stapsdt list' to see all probes")
    return 1
