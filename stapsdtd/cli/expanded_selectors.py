"""Selectors that become several, since a capture list is the same for all probes and files that a selector matches.

    postgresql:*     ──►  postgresql:query__star[t](arg0:str), and so on for each probe with strings, then postgresql:*
    shop:sale        ──►  shop:/opt/old/shop::sale, whose notes contradict the signature, then shop:sale(arg0:str)

The server takes the first selector that matches a site. Probes of globs keep a glob: where a file comes that has fewer
arguments than the signature, they are left out then, and the site is not refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stapsdtd.catalog.selector_text import captures_in, quoted
from stapsdtd.catalog.selectors import MAX_SELECTOR_LENGTH
from stapsdtd.cli.signature_captures import (
    Resolved,
    captures_of,
    is_meant,
    meant,
    named_probe,
    names_in,
    parsed,
    with_captures,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapsdtd.catalog.selectors import Selector
    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.client import Probe

_WORD = re.compile(r"\w+")


def expanded(given: str, probes: Iterable[Probe], known: Known) -> list[Resolved]:
    """Resolve a selector. probes: those that exist. Raises click.UsageError for a name that is not known."""
    selector = parsed(given)
    if selector is None or (captures_in(given) is not None and not names_in(given)):
        return [Resolved(given, given)]
    found = [each for each in probes if is_meant(selector, each)]
    if not selector.is_glob:
        return _of_probe(given, found, known)
    if names_in(given):
        return [with_captures(given, found, known)]
    return [*_of_glob(given, selector, found, known), Resolved(given, given, has_names=True)]


def matched_probes(selector: Selector, probes: Iterable[Probe], known: Known) -> list[tuple[str, str]]:
    """Return the probes that a glob matches: those that exist, then, of a single provider, all that are known."""
    existing = (named_probe(each) for each in probes if is_meant(selector, each))
    later = () if selector.provider.is_glob else known.entries(selector.provider.text)
    return list(dict.fromkeys([*existing, *(each for each in later if selector.matches_name(each[1]))]))


def narrowed(selector: Selector, provider: str, name: str, path: str = "") -> str:
    """Return a selector of one provider and name among those that a selector matches, in any file or in one."""
    by_pid = selector.provider_of_pid
    if selector.name.is_quoted:
        name = str(selector.name)
    if selector.provider.is_quoted:
        provider = str(selector.provider)
    elif by_pid is not None and not selector.provider.matches(provider):
        provider += str(by_pid[1])
    elif provider[-1:].isdecimal():
        # not the number of a process
        provider = f"{provider[:-1]}[{provider[-1]}]"
    module = quoted(path) if path else selector.module
    return f"{provider}:{module}:{selector.function}:{name}"


def _of_probe(given: str, found: Sequence[Probe], known: Known) -> list[Resolved]:
    one = meant(given, known)
    if one is None or not any(known.fit_in(one[1], each).signature for each in found):
        return [with_captures(given, found, known)]
    selector, probe = one
    others, captures = _apart(given, probe, found, known)
    parts = _parts(given, selector, probe, others)
    if captures is None:
        return [*parts, Resolved(selector.text, given)]
    return [*parts, Resolved(f"{selector.text}({captures})", given, probe, has_names=True)]


def _of_glob(given: str, selector: Selector, found: Sequence[Probe], known: Known) -> list[Resolved]:
    resolved = []
    for probe in matched_probes(selector, found, known):
        if not all(map(_WORD.fullmatch, probe)):
            # programs choose names, and this one would be another selector
            continue
        others, captures = _apart(given, probe, [each for each in found if named_probe(each) == probe], known)
        # integers are captured anyway
        if not any(each and ":str" in each for each in (captures, *others.values())):
            continue
        resolved += _parts(given, selector, probe, others)
        if captures is not None:
            provider, name = probe
            text = narrowed(selector, provider, f"{name[:-1]}[{name[-1]}]")
            resolved.append(Resolved(f"{text}({captures})", given, probe, is_part=True))
    return resolved


def _apart(
    given: str, probe: tuple[str, str], found: Iterable[Probe], known: Known
) -> tuple[dict[str, str | None], str | None]:
    """Return by path what to capture in files that differ from others, and what in the others; None if all as it is."""
    by_path: dict[str, str | None] = {}
    for each in found:
        signature = known.fit_in(probe, each).signature
        captures = captures_of(given, signature) if signature else None
        # files of several containers may have one path
        by_path[each.path] = captures if by_path.setdefault(each.path, captures) == captures else None
    lists = {captures for captures in by_path.values() if captures is not None}
    lists = lists or {captures for each in known.of(*probe) if (captures := captures_of(given, each)) is not None}
    others = lists.pop() if len(lists) == 1 else None
    return {path: captures for path, captures in by_path.items() if captures != others}, others


def _parts(
    given: str, selector: Selector, probe: tuple[str, str], captures_by_path: dict[str, str | None]
) -> list[Resolved]:
    resolved = []
    for path, captures in captures_by_path.items():
        text = narrowed(selector, *probe, path) + ("" if captures is None else f"({captures})")
        if len(text) <= MAX_SELECTOR_LENGTH:
            has_names = captures is not None
            resolved.append(Resolved(text, given, probe if has_names else None, has_names=has_names, is_part=True))
    return resolved
