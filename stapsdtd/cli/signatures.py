"""The signatures that commands use, and the captures that they make of selectors.

    hotspot:class__loaded                 ──►  hotspot:class__loaded(arg0:str, arg1, arg2:hex, arg3)
    hotspot:class__loaded(class, shared)  ──►  hotspot:class__loaded(arg0:str, arg1, arg3)

A string that comes with its length brings that along, since it is cut there. In a filter, names become positions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stapsdtd.catalog.selectors import Selector, normalized, parse
from stapsdtd.cli.named_filter import by_position, field_by_position, has_names, key_by_position, key_has_names
from stapsdtd.cli.render import print_stderr
from stapsdtd.client import AsyncClient, ClientError, Probe
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.signatures import OWN_FILES, Catalog, Declared, Kind, Signature
from stapsdtd.subscribe_options import Aggregate, SubscribeOptions

_FOLDER_VARIABLE = "STAPSDT_SIGNATURES"
_BY_POSITION = re.compile(r"\s*(arg\d.*)?", re.DOTALL)
_BY_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*(:[^,]*)?")

no_signatures = click.option(
    "--no-signatures",
    is_flag=True,
    help="Do not use what is known of probes' arguments: no names, and all arguments as integers.",
)


def own_folder() -> Path:
    """Return where the host's or the user's own files are."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or OWN_FILES)


def catalog() -> Catalog:
    """Return the known signatures. What is wrong with own files is told on standard error."""
    return Catalog(own_folder(), warn=lambda error: print_stderr(f"{error}; the file is skipped"))


@dataclass(frozen=True, slots=True)
class Resolved:
    """A selector as it is sent to the server. given: as it was written. probe: whose arguments have names, if any."""

    text: str
    given: str
    probe: tuple[str, str] | None = None


def as_given(selectors: Iterable[str]) -> tuple[Resolved, ...]:
    """Leave selectors as they were written."""
    return tuple(Resolved(given, given) for given in selectors)


async def resolve(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, known: Catalog
) -> tuple[tuple[Resolved, ...], SubscribeOptions]:
    """Give selectors the captures that signatures say, where they have none of their own, or name arguments.

    Names in the options' filter and fields become positions, too. Raises click.UsageError for a name that is not known.
    A signature is not used where a file's notes contradict it, which is told on standard error.
    """
    has_named = has_names(options.where) or any(map(has_names, options.fields))
    depending = [given for given in selectors if "(" not in given or _names(given) or has_named]
    probes = await _known_probes(client, depending, options, known)
    resolved = tuple(with_captures(given, probes, known) for given in selectors)
    fit = _all_fitting(selectors, probes, known)
    fields = [field_by_position(field, fit) for field in options.fields]
    return resolved, replace(options, where=by_position(options.where, fit), fields=fields)


async def resolve_aggregate(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, aggregate: Aggregate, known: Catalog
) -> tuple[SubscribeOptions, Aggregate]:
    """Replace names of arguments in the filter, the value and the keys. Raises click.UsageError as resolve does."""
    if not (has_names(options.where) or has_names(aggregate.value) or any(map(key_has_names, aggregate.by))):
        return options, aggregate
    fit = await fitting(client, selectors, options, known)
    by = [key_by_position(key, fit) for key in aggregate.by]
    value = by_position(aggregate.value, fit, "VALUE")
    where = by_position(options.where, fit)
    return replace(options, where=where), replace(aggregate, by=by, value=value)


async def fitting(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, known: Catalog
) -> list[tuple[Signature, ...]]:
    """Return the signatures that the probe of each selector may have."""
    return _all_fitting(selectors, await _known_probes(client, selectors, options, known), known)


def with_captures(given: str, probes: Iterable[Probe], known: Catalog) -> Resolved:
    """Resolve a selector. probes: those that exist, which say whose signature it is where versions differ."""
    names = _names(given)
    if "(" in given and not names:
        return Resolved(given, given)
    found = meant(given, known)
    if found is None:
        if names:
            why = "names of arguments need one probe whose arguments are known, and no globs"
            raise click.UsageError(f"{given}: {why}; write arg0 instead of {names[0].strip()}")
        return Resolved(given, given)
    selector, probe = found
    signatures, reason = _fitting(selector, probe, probes, known)
    lists = {_captures(given, signature) for signature in signatures}
    if len(lists) > 1:
        reason = "versions differ, and which one it is going to be is not known"
    captures = lists.pop() if len(lists) == 1 else None
    if captures is not None:
        return Resolved(f"{selector.text}({captures})", given, probe)
    if names:
        raise click.UsageError(f"{given}: {reason or 'its arguments have no names'}; write arg0 for the first one")
    if reason:
        print_stderr(f"{selector.text}: its signature is not used: {reason}")
    return Resolved(given, given)


def meant(given: str, known: Catalog) -> tuple[Selector, tuple[str, str]] | None:
    """Return a selector without its captures, and the one probe that it names, if there are signatures of that."""
    try:
        selector = parse(given.partition("(")[0])
    except InvalidArgumentError:
        # the server says what is wrong
        return None
    providers = [selector.provider.text, *([selector.provider_of_pid[0].text] if selector.provider_of_pid else [])]
    name = selector.name.text
    probes = [(provider, name) for provider in providers if known.of(provider, name)]
    return (selector, probes[0]) if probes and not selector.is_glob else None


def _names(given: str) -> list[str]:
    """Return the captures that name an argument."""
    captures = given.partition("(")[2].rpartition(")")[0].split(",")
    return [capture for capture in captures if not _BY_POSITION.fullmatch(capture)]


async def _known_probes(
    client: AsyncClient, selectors: Iterable[str], options: SubscribeOptions, known: Catalog
) -> Sequence[Probe]:
    """Return the probes with signatures that selectors name, in running programs or else in files."""
    heads = [given.partition("(")[0] for given in selectors if meant(given, known)]
    if not heads:
        return ()
    try:
        running = await client.list_probes(
            heads, options.pids, containers=options.containers, cgroups=options.cgroups, files=options.files
        )
        return tuple(running) or tuple(await client.list_probes(heads, installed=True))
    except ClientError:
        # the role may not list, or the server has no inventory; what is known of the probe is all there is
        return ()


def _all_fitting(selectors: Iterable[str], probes: Sequence[Probe], known: Catalog) -> list[tuple[Signature, ...]]:
    return [_fitting(*found, probes, known)[0] if (found := meant(given, known)) else () for given in selectors]


def _fitting(
    selector: Selector, probe: tuple[str, str], probes: Iterable[Probe], known: Catalog
) -> tuple[tuple[Signature, ...], str]:
    """Return the signatures that a probe may have, or why there is none: a file contradicts them."""
    signatures = []
    for each in probes:
        if _is_meant(selector, each):
            fit = known.fit(*probe, each.sites, each.architecture)
            if fit.signature is None:
                return (), f"in {each.path}, {fit.contradiction}"
            signatures.append(fit.signature)
    return tuple(signatures) or known.of(*probe), ""


def _is_meant(selector: Selector, probe: Probe) -> bool:
    return (
        selector.matches_provider(probe.provider)
        and selector.matches_name(probe.name)
        and selector.matches_module(probe.path)
    )


def _captures(given: str, signature: Signature) -> str | None:
    """Return the capture list that a signature makes of a selector's, by default of all arguments."""
    if signature.arguments is None:
        return None
    written = given.partition("(")[2].rpartition(")")[0]
    parts = written.split(",") if written else [declared.name for declared in signature.arguments]
    captures = [capture for part in parts for capture in _capture(given, part, signature.arguments)]
    return ", ".join(dict.fromkeys(captures))


def _capture(given: str, part: str, arguments: Sequence[Declared]) -> list[str]:
    match = _BY_NAME.fullmatch(part)
    if _BY_POSITION.fullmatch(part) or match is None:
        return [part.strip()]
    name, how = match.groups()
    index = next((index for index, declared in enumerate(arguments) if declared.name == name), None)
    if index is None:
        has = ", ".join(declared.name for declared in arguments) or "none"
        raise click.UsageError(f"{given}: it has no argument named {name}; its arguments are: {has}")
    declared = arguments[index]
    default = {Kind.STRING: ":str", Kind.POINTER: ":hex"}.get(declared.kind, "")
    lengths = [f"arg{at}" for at, other in enumerate(arguments) if declared.length and other.name == declared.length]
    return [f"arg{index}{how or default}", *lengths]


def named_probe(probe: Probe) -> tuple[str, str]:
    """Return a probe's provider and name as selectors compare them."""
    return normalized(probe.provider), normalized(probe.name)
