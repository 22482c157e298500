"""The captures that signatures make of a selector.

    hotspot:class__loaded                 ──►  hotspot:class__loaded(arg0:str, arg1, arg2:hex, arg3)
    hotspot:class__loaded(class, shared)  ──►  hotspot:class__loaded(arg0:str, arg1, arg3)

A string that comes with its length brings that along, since it is cut there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from stapsdtd.catalog.selector_text import captures_in, head_of, if_of_name
from stapsdtd.catalog.selectors import Selector, normalized, parse
from stapsdtd.cli.render import print_stderr
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.client import Probe
    from stapsdtd.signatures import Declared, Signature

_BY_POSITION = re.compile(r"\s*(arg\d.*)?", re.DOTALL)
_BY_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*(:[^,]*)?")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A selector as it is sent to the server. given: as it was written.

    probe: whose arguments have names, if it is one. has_names: whether those of all probes that it matches have, as far
    as they are known. is_part: another one, of the same given one, matches whatever this one does.
    """

    text: str
    given: str
    probe: tuple[str, str] | None = None
    has_names: bool = False
    is_part: bool = False


def with_captures(given: str, probes: Iterable[Probe], known: Known) -> Resolved:
    """Resolve a selector, in the same way for all files. probes: those that exist, which say whose signature it is
    where versions differ.
    """
    names = names_in(given)
    if captures_in(given) is not None and not names:
        return Resolved(given, given)
    found = meant(given, known)
    if found is None:
        if names:
            why = "names of arguments need one probe whose arguments are known, and no globs"
            raise click.UsageError(f"{given}: {why}; write arg0 instead of {names[0].strip()}{if_of_name(given)}")
        return Resolved(given, given)
    selector, probe = found
    signatures, reason = fitting_everywhere(selector, probe, probes, known)
    lists = {captures_of(given, signature) for signature in signatures}
    if len(lists) > 1:
        reason = "versions differ, and which one it is going to be is not known"
    captures = lists.pop() if len(lists) == 1 else None
    if captures is not None:
        return Resolved(f"{selector.text}({captures})", given, probe, has_names=True)
    if names:
        raise click.UsageError(f"{given}: {reason or 'its arguments have no names'}; write arg0 for the first one")
    if len(signatures) > 1 and reason:
        print_stderr(f"{selector.text}: its signature is not used: {reason}")
    return Resolved(given, given)


def parsed(given: str) -> Selector | None:
    """Return a selector without its captures; None if it is none, which the server says."""
    try:
        return parse(head_of(given))
    except InvalidArgumentError:
        return None


def meant(given: str, known: Known) -> tuple[Selector, tuple[str, str]] | None:
    """Return a selector without its captures, and the one probe that it names, if there are signatures of that."""
    selector = parsed(given)
    if selector is None or selector.is_glob:
        return None
    patterns = [selector.provider, *([selector.provider_of_pid[0]] if selector.provider_of_pid else [])]
    providers, name = [normalized(each.text) for each in patterns], normalized(selector.name.text)
    probes = [(provider, name) for provider in providers if known.of(provider, name)]
    return (selector, probes[0]) if probes else None


def names_in(given: str) -> list[str]:
    """Return the captures that name an argument."""
    captures = (captures_in(given) or "").split(",")
    return [capture for capture in captures if not _BY_POSITION.fullmatch(capture)]


def fitting_everywhere(
    selector: Selector, probe: tuple[str, str], probes: Iterable[Probe], known: Known
) -> tuple[tuple[Signature, ...], str]:
    """Return the signatures that a probe may have, or why there is none: a file contradicts them."""
    signatures, reason = [], ""
    for each in probes:
        if is_meant(selector, each) and named_probe(each) == probe:
            fit = known.fit_in(probe, each)
            if fit.signature is None:
                reason = reason or f"in {each.path}, {fit.contradiction}"
            else:
                signatures.append(fit.signature)
    return ((), reason) if reason else (tuple(signatures) or known.of(*probe), "")


def is_meant(selector: Selector, probe: Probe) -> bool:
    return (
        selector.matches_provider(probe.provider)
        and selector.matches_name(probe.name)
        and selector.matches_module(probe.path)
    )


def captures_of(given: str, signature: Signature) -> str | None:
    """Return the capture list that a signature makes of a selector's, by default of all arguments."""
    if signature.arguments is None:
        return None
    written = captures_in(given)
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
