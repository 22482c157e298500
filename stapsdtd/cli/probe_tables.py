"""Probes as `stapsdt list` prints them for people: by the object that holds them, or in DTrace's columns.

    /usr/lib/postgresql/15/bin/postgres
      mapped by postgres (4711), postgres (4712)
      PROBE                          SITES  SEMAPHORE  ARGUMENTS
      postgresql:transaction__abort      1  yes        uint32

       ID   PROVIDER            MODULE                          FUNCTION NAME
        1 postgresql4711      postgres                  AbortTransaction transaction-abort

A name is never broken. Where the terminal is too narrow, columns are left out. With details, what is known of a probe
follows it, or why its signature is not used.
"""

from __future__ import annotations

import textwrap
from itertools import count, groupby
from typing import TYPE_CHECKING

from stapsdtd.catalog.selector_text import probe_name
from stapsdtd.cli.render import abbreviate, fold, format_signature, format_type, paint
from stapsdtd.cli.signature_captures import named_probe
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stapsdtd.client import Probe, ProbeListing, Problem, Process, Site
    from stapsdtd.signatures import Catalog, Fit

_MAX_SHOWN_PROCESSES = 5
_ID_LENGTH = 64
_SHORT_ID_LENGTH = 12
_FEWEST_FOR_ARGUMENTS = 13
"""Characters: two types, or a column is left out."""
_UNLIMITED = 1 << 16


def semaphore(probe: Probe) -> str:
    return "yes" if any(site.semaphore_offset is not None for site in probe.sites) else "no"


def object_lines(
    listing: ProbeListing, *, width: int | None, color: bool, details: bool, known: Catalog | None = None
) -> Iterator[str]:
    """Format a listing as a table for each object. width: the terminal's. details: with all processes and sites.

    known: the signatures to show with details.
    """
    processes = {process.pid: process for process in listing.processes}
    objects = groupby(sorted(listing, key=_object_key), key=_object_key)
    for number, (_, probes) in enumerate(objects):
        if number:
            yield ""
        group = sorted(probes, key=lambda probe: (probe.provider, probe.name))
        yield paint(escape(group[0].path), "bold", color=color)
        if details:
            yield from _process_table([processes[pid] for pid in group[0].pids if pid in processes])
        else:
            mapped_by = abbreviate([_process(pid, processes) for pid in group[0].pids], _MAX_SHOWN_PROCESSES)
            line = f"  mapped by {escape(mapped_by or 'no process')}"
            for part in fold(line, width or _UNLIMITED):
                yield paint(part, "dim", color=color)
        yield from _probe_table(group, width or _UNLIMITED, color=color, details=details, known=known)
        if details:
            for each in listing.problems:
                if each.path == group[0].path:
                    yield from fold(escape(f"  {unusable(each)}: cannot be used: {each.reason}"), width or _UNLIMITED)


def unusable(problem: Problem) -> str:
    """Return what a note that cannot be used is called."""
    if problem.provider and problem.name:
        return probe_name(problem.provider, problem.name)
    return "a note"


def _object_key(probe: Probe) -> tuple[str, str, tuple[int, ...]]:
    return probe.path, probe.build_id or "", probe.pids


def _probe_table(
    probes: Sequence[Probe], width: int, *, color: bool, details: bool, known: Catalog | None
) -> Iterator[str]:
    names = [escape(probe_name(probe.provider, probe.name)) for probe in probes]
    longest = max(map(len, [*names, "PROBE"]))
    # each with a gap before it; the last ones are left out first
    columns = [f"{'SITES':>7}", "  SEMAPHORE"]
    while columns and 2 + longest + sum(map(len, columns)) + 2 + _FEWEST_FOR_ARGUMENTS > width:
        columns.pop()
    yield paint(f"  {'PROBE':<{longest}}{''.join(columns)}  ARGUMENTS", "dim", color=color)
    for probe, name in zip(probes, names, strict=True):
        cells = [f"{len(probe.sites):>7}", f"  {semaphore(probe):<9}"][: len(columns)]
        begin = f"  {name:<{longest}}{''.join(cells)}  "
        # where not even one type fits behind the name, all go below it
        indent = len(begin) if len(begin) + _FEWEST_FOR_ARGUMENTS <= width else 6
        first, *more = textwrap.wrap(format_signature(probe.sites), width - indent, break_long_words=False) or [""]
        if indent != len(begin):
            first, more = "", [first, *more]
        line = begin.replace(name, paint(name, "cyan", color=color), 1) + paint(first, "green", color=color)
        yield line.rstrip()
        yield from (" " * indent + paint(part, "green", color=color) for part in more if part)
        if details:
            for text in _known_lines(fit_of(known, probe)) if known else ():
                yield from (f"      {part}" for part in fold(text, width - 6))
            yield from map(_site, probe.sites)


def fit_of(known: Catalog, probe: Probe) -> Fit:
    """Return the signature that fits a probe's sites, or why there is none."""
    return known.fit(*named_probe(probe), probe.sites, probe.architecture)


def _known_lines(fit: Fit) -> Iterator[str]:
    if fit.contradiction:
        yield escape(f"its signature is not used: {fit.contradiction}")
    if (signature := fit.signature) is None:
        return
    if signature.text:
        yield escape(signature.text)
    if signature.arguments:
        yield escape(f"arguments: {', '.join(declared.text for declared in signature.arguments)}")
    if signature.ends_with:
        latest = ", which belongs to the latest start in the thread" if signature.latest else ""
        yield escape(f"ends with {signature.ends_with}{latest}")
    yield from (escape(f"note: {note}") for _, note in signature.notes)


def _site(site: Site) -> str:
    """Return `      0x1234  exec_simple_query  8@%rdi -4@-20(%rbp)`."""
    arguments = " ".join(argument.text for argument in site.arguments)
    refused = f"cannot be armed: {site.refused}" if site.refused else ""
    return "      " + escape("  ".join(filter(None, (f"{site.offset:#x}", site.function, arguments, refused))))


def _process_table(processes: Iterable[Process]) -> Iterator[str]:
    rows = [("PID", "USER", "COMMAND", "CONTAINER", "CGROUP")]
    rows += [
        (
            _pids(process),
            escape(process.user),
            escape(process.comm),
            escape(_container(process) or "-"),
            escape(process.cgroup or "-"),
        )
        for process in processes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield ("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()


def _pids(process: Process) -> str:
    """Return the pid and, if the process is in a pid namespace, its pid there: `4711 (7)`."""
    inside = "" if process.namespace_pid == process.pid else f" ({process.namespace_pid})"
    return f"{process.pid}{inside}"


def _process(pid: int, processes: Mapping[int, Process]) -> str:
    """Return `postgres (4711)` or, with its pid inside, `postgres (4711, 7 in container 8d0c2f6e5b1a)`."""
    process = processes.get(pid)
    if process is None:
        return str(pid)
    container = _container(process)
    if container is None and process.namespace_pid == pid:
        return f"{process.comm} ({pid})"
    place = "its namespace" if container is None else f"container {process.container_name or container}"
    return f"{process.comm} ({pid}, {process.namespace_pid} in {place})"


def _container(process: Process) -> str | None:
    """Return the container's name if it is known, with its id as that is usually shortened: `web (8d0c2f6e5b1a)`."""
    container = process.container_id
    short = container[:_SHORT_ID_LENGTH] if container and len(container) == _ID_LENGTH else container
    return f"{process.container_name} ({short})" if process.container_name else short


def dtrace_lines(listing: ProbeListing, *, types: bool) -> Iterator[str]:
    """Format a listing as `dtrace -l` does: a line for each process and function. types: as `dtrace -lv`."""
    yield f"{'ID':>5} {'PROVIDER':>10} {'MODULE':>17} {'FUNCTION':>33} NAME"
    numbers = count(1)
    for probe in listing:
        functions = {site.function: site for site in reversed(probe.sites)}
        for pid in probe.pids or ("",):
            for function, site in sorted(functions.items(), key=lambda item: item[1].offset):
                provider, name = f"{probe.provider}{pid}", probe.name.replace("__", "-")
                columns = f"{provider:>10} {probe.module:>17} {function or '':>33} {name}"
                yield f"{next(numbers):>5} {escape(columns)}"
                if types:
                    yield from _types(site)


def _types(site: Site) -> Iterator[str]:
    yield ""
    yield "\tArgument Types"
    if not site.arguments:
        yield "\t\tNone"
    for index, argument in enumerate(site.arguments):
        yield f"\t\targs[{index}]: {format_type(argument)}"
    yield ""
