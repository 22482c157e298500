"""Selectors: how users name probes.

    postgresql:query__start                        provider and name
    postgresql1234:::query-start(arg0:str[256])    DTrace's parts: provider and pid, module, function, name
    python:*                                       globs in each part
    libstdcxx:/usr/lib/*:*:throw                   a module pattern with a slash is held against the whole path

An empty part matches everything, and `-` and `__` are the same in names.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from fnmatch import translate

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import Argument, Capture, Probe, Site, SiteCapture

MAX_SELECTOR_LENGTH = 1024
MAX_STRING_BYTES = 4096
_FIELD = "selectors"
_CAPTURE = re.compile(r"\s*arg(\d{1,3})\s*(?::\s*(int|str)\s*(?:\[\s*(\d{1,9})\s*\])?)?\s*")
_PID_SUFFIX = re.compile(r"(.*?[^\d])(\d{1,9})")


class Pattern:
    """A glob; case counts, and an empty one matches everything."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._expression = re.compile(translate(text)) if text not in {"", "*"} else None

    def matches(self, text: str) -> bool:
        return self._expression is None or self._expression.match(text) is not None


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. captures is None where the client wants integers as the note declares them."""

    text: str
    provider: Pattern
    module: Pattern
    function: Pattern
    name: Pattern
    captures: tuple[Capture, ...] | None
    provider_of_pid: tuple[Pattern, int] | None = None

    def match(self, path: str, site: Site) -> Match | None:
        """Answer whether a site of the object at path is meant, and in which processes."""
        if not self.name.matches(_undashed(site.name)) or not self.function.matches(site.function or ""):
            return None
        if not self.module.matches(path if "/" in self.module.text else os.path.basename(path)):
            return None
        if self.provider.matches(site.provider):
            return Match(self, None)
        if self.provider_of_pid is not None and self.provider_of_pid[0].matches(site.provider):
            return Match(self, self.provider_of_pid[1])
        return None


@dataclass(frozen=True, slots=True)
class Match:
    """pid is None where the selector names no process."""

    selector: Selector
    pid: int | None


@dataclass(frozen=True, slots=True)
class SelectedSite:
    """What is to be armed at a site, and for which processes: None for all."""

    capture: SiteCapture
    pids: frozenset[int] | None


def parse(text: str) -> Selector:
    """Raise InvalidArgumentError, which names the column, for what is not a selector."""
    if len(text) > MAX_SELECTOR_LENGTH:
        raise InvalidArgumentError(
            _FIELD, f"a selector has at most {MAX_SELECTOR_LENGTH} characters, this one {len(text)}"
        )
    names, parenthesis, rest = text.partition("(")
    captures = _parse_captures(text, len(names) + 1, rest) if parenthesis else None
    parts = names.split(":")
    if len(parts) == 2:
        provider, name = parts
        return Selector(text, Pattern(provider), Pattern(""), Pattern(""), Pattern(_undashed(name)), captures)
    if len(parts) != 4:
        raise InvalidArgumentError(
            _FIELD,
            f"{text!r} has {len(parts)} parts; write provider:name or provider:module:function:name",
            len(names),
            text,
        )
    provider, module, function, name = parts
    suffixed = _PID_SUFFIX.fullmatch(provider)
    return Selector(
        text,
        Pattern(provider),
        Pattern(module),
        Pattern(function),
        Pattern(_undashed(name)),
        captures,
        (Pattern(suffixed.group(1)), int(suffixed.group(2))) if suffixed else None,
    )


def _parse_captures(text: str, start: int, rest: str) -> tuple[Capture, ...]:
    inside, parenthesis, behind = rest.partition(")")
    if not parenthesis:
        raise InvalidArgumentError(_FIELD, f"{text!r} lacks its closing parenthesis", len(text), text)
    if behind.strip():
        raise InvalidArgumentError(_FIELD, f"{text!r} goes on behind its capture list", start + len(inside) + 1, text)
    captures = []
    column = start
    for part in inside.split(",") if inside.strip() else []:
        found = _CAPTURE.fullmatch(part)
        if found is None:
            raise InvalidArgumentError(
                _FIELD,
                f"{part.strip()!r} is no capture; write arg0, arg0:int, arg0:str or arg0:str[256]",
                column,
                text,
            )
        index, kind, bound = found.groups()
        if bound and (kind != "str" or not 1 <= int(bound) <= MAX_STRING_BYTES):
            raise InvalidArgumentError(
                _FIELD, f"{part.strip()!r}: only a str has a bound, 1 to {MAX_STRING_BYTES} bytes", column, text
            )
        captures.append(Capture(int(index), kind == "str", int(bound) if bound else None))
        column += len(part) + 1
    return tuple(captures)


def _undashed(name: str) -> str:
    """DTrace writes `query-start` for what the note calls `query__start`."""
    return name.replace("-", "__")


def choose(selectors: tuple[Selector, ...], path: str, sites: tuple[Site, ...]) -> list[SelectedSite]:
    """What selectors want of an object's sites. Where several match a site, the first one's captures count."""
    selected_sites = []
    for site in sites:
        matches = [match for selector in selectors if (match := selector.match(path, site))]
        if matches:
            pids = {match.pid for match in matches}
            everybody = None in pids
            scope = None if everybody else frozenset(pid for pid in pids if pid is not None)
            selected_sites.append(SelectedSite(SiteCapture(site, _captures(matches[0].selector, site)), scope))
    return selected_sites


def _captures(selector: Selector, site: Site) -> tuple[Capture, ...]:
    if selector.captures is None:
        return tuple(Capture(index) for index in range(len(site.arguments)))
    return selector.captures


def missing_argument(selected: SiteCapture) -> str | None:
    """Answer why a capture list does not fit a site; None where it does."""
    arguments: tuple[Argument, ...] = selected.site.arguments
    beyond = [capture.index for capture in selected.captures if capture.index >= len(arguments)]
    return f"it has {len(arguments)} arguments, so there is no arg{beyond[0]}" if beyond else None


def select(
    selectors: tuple[Selector, ...], probes: list[Probe], pids: frozenset[int], among: frozenset[int] | None = None
) -> list[Probe]:
    """Keep the probes, and of each the sites, that any selector means; none means all.

    pids: one of them has to map the probe, empty for any process. among: others are as if they were not there, None for
    nobody.
    """
    return [kept for probe in probes if (kept := select_one(selectors, probe, pids, among))]


def select_one(
    selectors: tuple[Selector, ...], probe: Probe, pids: frozenset[int], among: frozenset[int] | None = None
) -> Probe | None:
    if among is not None:
        probe = replace(probe, pids=tuple(pid for pid in probe.pids if pid in among))
        if not probe.pids:
            return None
    if pids and pids.isdisjoint(probe.pids):
        return None
    if not selectors:
        return probe
    selected_sites = [
        selected
        for selected in choose(selectors, probe.object.path, probe.sites)
        if selected.pids is None or not selected.pids.isdisjoint(probe.pids)
    ]
    if not selected_sites:
        return None
    return Probe(
        probe.object,
        probe.provider,
        probe.name,
        tuple(selected.capture.site for selected in selected_sites),
        probe.pids,
    )
