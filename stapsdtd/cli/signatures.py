"""The signatures that commands use, and the captures that they make of selectors.

    hotspot:class__loaded                 ──►  hotspot:class__loaded(arg0:str, arg1, arg2:hex, arg3)
    hotspot:class__loaded(class, shared)  ──►  hotspot:class__loaded(arg0:str, arg1, arg3)

A string that comes with its length brings that along, since it is cut there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from stapsdtd.catalog.selectors import Selector, normalized, parse
from stapsdtd.cli.render import print_stderr
from stapsdtd.client import AsyncClient, ClientError, Probe
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.signatures import OWN_FILES, Catalog, Declared, Kind, Signature
from stapsdtd.subscribe_options import SubscribeOptions

_FOLDER_VARIABLE = "STAPSDT_SIGNATURES"
_BY_POSITION = re.compile(r"\s*(arg\d.*)?", re.DOTALL)
_BY_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*(:[^,]*)?")

no_signatures = click.option(
    "--no-signatures",
    is_flag=True,
    help="Do not use what is known of probes' arguments: no names, and all arguments as integers.",
)


def catalog() -> Catalog:
    """Return the known signatures. What is wrong with the host's own files is told on standard error."""
    folder = Path(os.environ.get(_FOLDER_VARIABLE) or OWN_FILES)
    return Catalog(folder, warn=lambda error: print_stderr(f"{error}; the file is skipped"))


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
) -> tuple[Resolved, ...]:
    """Give selectors the captures that signatures say, where they have none of their own, or name arguments.

    Raises click.UsageError for a name that is not known. A signature is not used where a file's notes contradict it,
    which is told on standard error.
    """
    wanted = [given for given in selectors if _probe_of(given, known)]
    probes = await _known_probes(client, wanted, options) if wanted else ()
    return tuple(with_captures(given, probes, known) for given in selectors)


def with_captures(given: str, probes: Iterable[Probe], known: Catalog) -> Resolved:
    """Resolve a selector. probes: those that exist, which say whose signature it is where versions differ."""
    found = _probe_of(given, known)
    return _resolved(given, *found, probes, known) if found else Resolved(given, given)


def _probe_of(given: str, known: Catalog) -> tuple[Selector, tuple[str, str]] | None:
    """Return the one probe that a selector names, if its captures depend on the signature."""
    head, parenthesis, captures = given.partition("(")
    names = [part for part in captures.rpartition(")")[0].split(",") if not _BY_POSITION.fullmatch(part)]
    if parenthesis and not names:
        return None
    try:
        selector = parse(head)
    except InvalidArgumentError:
        # the server says what is wrong
        return None
    provider, name = selector.provider.text, selector.name.text
    if selector.provider_of_pid and not known.of(provider, name):
        provider = selector.provider_of_pid[0].text
    if not selector.is_glob and known.of(provider, name):
        return selector, (provider, name)
    if names:
        what = "names of arguments need one probe, without globs" if selector.is_glob else "its arguments are not known"
        raise click.UsageError(f"{given}: {what}; write arg0 instead of {names[0].strip()}")
    return None


async def _known_probes(client: AsyncClient, selectors: Iterable[str], options: SubscribeOptions) -> Sequence[Probe]:
    """Return the probes that selectors name, in running programs and in files."""
    heads = [selector.partition("(")[0] for selector in selectors]
    try:
        running = tuple(await client.list_probes(heads, files=options.files))
        return running or tuple(await client.list_probes(heads, installed=True))
    except ClientError:
        # the role may not list, or the server has no inventory; what is known of the probe is all there is
        return ()


def _resolved(
    given: str, selector: Selector, probe: tuple[str, str], probes: Iterable[Probe], known: Catalog
) -> Resolved:
    names = given.partition("(")[2].rpartition(")")[0]
    matching = [each for each in probes if _is_meant(selector, each)]
    fits = [(each, known.fit(*probe, each.sites, each.architecture)) for each in matching]
    for each, fit in fits:
        if fit.contradiction:
            reason = f"{selector.text}: its signature is not used: in {each.path}, {fit.contradiction}"
            if names:
                raise click.UsageError(f"{reason}; write arg0 for the first argument")
            print_stderr(reason)
            return Resolved(given, given)
    signatures = [fit.signature for _, fit in fits if fit.signature] or known.of(*probe)
    lists = {_captures(given, names, signature) for signature in signatures}
    captures = lists.pop()
    if lists or captures is None:
        if names:
            raise click.UsageError(f"{given}: its arguments differ between versions; write arg0 for the first one")
        return Resolved(given, given)
    return Resolved(f"{selector.text}({captures})", given, probe)


def _is_meant(selector: Selector, probe: Probe) -> bool:
    return (
        selector.matches_provider(probe.provider)
        and selector.matches_name(probe.name)
        and selector.matches_module(probe.path)
    )


def _captures(given: str, names: str, signature: Signature) -> str | None:
    """Return the capture list that a signature makes of names, by default all of its arguments."""
    if signature.arguments is None:
        if names:
            raise click.UsageError(f"{given}: its arguments are not known by name; write arg0 for the first one")
        return None
    parts = names.split(",") if names else [declared.name for declared in signature.arguments]
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
