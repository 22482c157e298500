"""Choose sites of objects by many selectors at once, in steps.

    module, provider, function, name     a GlobSet of each part of all selectors: which of them a text matches
    a site                               is chosen by those that all four of its texts match

What that costs depends on the texts, and little on how many selectors there are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Sequence

from msgspec import Struct

from stapsdtd.catalog.glob_sets import GlobSet
from stapsdtd.catalog.selectors import Pattern, Selector, captures_at, normalized, parse
from stapsdtd.model import Site, SiteCapture

_EVERYTHING = parse("*:*")
_SITES_PER_STEP = 1024


class Chosen(Struct, frozen=True, gc=False):
    """A site, and the selectors that choose it, of which these do so for all processes."""

    site: Site
    selectors: int
    for_all: int

    def among(self, selectors: int) -> Chosen | None:
        """Return what some selectors choose of it."""
        by = self.selectors & selectors
        return Chosen(self.site, by, self.for_all & selectors) if by else None


class _PatternSet:
    """What one part of all selectors matches: a number with bit i for the i-th. None matches nothing."""

    def __init__(self, patterns: Sequence[Pattern | None], *, joins_hyphens: bool = False) -> None:
        self._compared = normalized if joins_hyphens else str
        self._globs = GlobSet([None if each is None or each.is_quoted else each.text for each in patterns])
        self._quoted: dict[str, int] = {}
        for number, each in enumerate(patterns):
            if each is not None and each.is_quoted:
                self._quoted[each.text] = self._quoted.get(each.text, 0) | 1 << number

    @property
    def effort(self) -> int:
        return self._globs.effort

    def of_all(self, texts: Collection[str]) -> Generator[None, None, dict[str, int]]:
        """Match texts in steps."""
        compared = {text: self._compared(text) for text in texts}
        matched = yield from self._globs.of_all(set(compared.values()))
        return {text: matched[by] | self._quoted.get(text, 0) for text, by in compared.items()}


class SelectorSet:
    """Some of the selectors are given as a number with bit i for the i-th. No selectors match everything."""

    def __init__(self, selectors: Sequence[Selector]) -> None:
        selectors = selectors or [_EVERYTHING]
        self._selectors = selectors
        self._of_paths = sum(1 << number for number, each in enumerate(selectors) if "/" in each.module.text)
        self._modules = _PatternSet([each.module for each in selectors])
        self._providers = _PatternSet([each.provider for each in selectors], joins_hyphens=True)
        with_pid = [each.provider_of_pid for each in selectors]
        self._providers_of_pid = _PatternSet([each[0] if each else None for each in with_pid], joins_hyphens=True)
        self._functions = _PatternSet([each.function for each in selectors])
        self._names = _PatternSet([each.name for each in selectors], joins_hyphens=True)
        self._literal_providers = _literal_providers(selectors)

    def may_mean(self, providers: Collection[str]) -> bool:
        """Report, without matching globs, whether sites of an object with these providers may be chosen."""
        return self._literal_providers is None or any(normalized(each) in self._literal_providers for each in providers)

    @property
    def names_processes(self) -> bool:
        """Whether what is chosen depends on which processes map an object."""
        return any(each.provider_of_pid for each in self._selectors)

    @property
    def effort(self) -> int:
        """How much it takes to match a site, compared with looking it up."""
        return 1 + sum(each.effort for each in (self._providers, self._providers_of_pid, self._functions, self._names))

    def meant(self, objects: Sequence[tuple[str, Collection[str]]]) -> Generator[None, None, list[int]]:
        """Return for each object, by its path and providers, which selectors may choose sites of it."""
        modules = yield from self._matching_modules({path for path, _ in objects})
        providers = yield from self._matching_providers({each for _, some in objects for each in some})
        found = []
        for path, some in objects:
            by_provider = 0
            for each in some:
                for_all, of_process = providers[each]
                by_provider |= for_all | of_process
            found.append(modules[path] & by_provider)
        return found

    def naming(self, objects: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> Generator[None, None, list[int]]:
        """Return for each object, by its path and its probes' providers and names, which selectors may choose sites of
        it, whatever functions these are in.
        """
        modules = yield from self._matching_modules({path for path, _ in objects})
        # many files have the same probes
        probes = {each for _, some in objects for each in some}
        providers = yield from self._matching_providers({provider for provider, _ in probes})
        names = yield from self._names.of_all({name for _, name in probes})
        by_probes: dict[tuple[tuple[str, str], ...], int] = {}
        for _, some in objects:
            if some not in by_probes:
                by_probes[some] = 0
                for provider, name in some:
                    for_all, of_process = providers[provider]
                    by_probes[some] |= (for_all | of_process) & names[name]
                yield
        return [modules[path] & by_probes[some] for path, some in objects]

    def choose(self, meant: int, sites: Sequence[Site]) -> Generator[None, None, list[Chosen]]:
        """Return which sites of an object are chosen. meant: the selectors that may, see `meant`."""
        chosen: list[Chosen] = []
        for first in range(0, len(sites) if meant else 0, _SITES_PER_STEP):
            some = sites[first : first + _SITES_PER_STEP]
            providers = yield from self._matching_providers({site.provider for site in some})
            some = [site for site in some if meant & (providers[site.provider][0] | providers[site.provider][1])]
            functions = yield from self._functions.of_all({site.function or "" for site in some})
            names = yield from self._names.of_all({site.name for site in some})
            for site in some:
                for_all, of_process = providers[site.provider]
                by_names = meant & functions[site.function or ""] & names[site.name]
                if by := by_names & (for_all | of_process):
                    chosen.append(Chosen(site, by, by & for_all))
            yield
        return chosen

    def _matching_modules(self, paths: Collection[str]) -> Generator[None, None, dict[str, int]]:
        """Return which selectors match the module at each path."""
        names = {path: os.path.basename(path) for path in paths}
        matched = yield from self._modules.of_all({*names, *names.values()})
        return {path: matched[path] & self._of_paths | matched[name] & ~self._of_paths for path, name in names.items()}

    def _matching_providers(self, providers: Collection[str]) -> Generator[None, None, dict[str, tuple[int, int]]]:
        """Return which selectors choose each provider for all processes, and which for one."""
        for_all = yield from self._providers.of_all(providers)
        of_process = yield from self._providers_of_pid.of_all(providers)
        return {each: (for_all[each], of_process[each]) for each in for_all}

    def captured(self, chosen: Chosen) -> SiteCapture:
        """Return what to capture at a site. If several selectors choose it, the first one says it."""
        first = self._selectors[next(_numbers(chosen.selectors))]
        return SiteCapture(chosen.site, captures_at(first, chosen.site))

    def pids(self, chosen: Chosen) -> frozenset[int] | None:
        """Return for which processes a site is chosen, None for all."""
        if chosen.for_all:
            return None
        named = (self._selectors[number].provider_of_pid for number in _numbers(chosen.selectors))
        return frozenset(each[1] for each in named if each is not None)


def _literal_providers(selectors: Sequence[Selector]) -> frozenset[str] | None:
    """Return the only providers that selectors mean; None if any is a glob."""
    patterns = [each.provider for each in selectors]
    patterns += [each.provider_of_pid[0] for each in selectors if each.provider_of_pid]
    return None if any(each.is_glob for each in patterns) else frozenset(normalized(each.text) for each in patterns)


def _numbers(selectors: int) -> Iterator[int]:
    """Return the numbers of selectors in a set, the lowest first."""
    while selectors:
        lowest = selectors & -selectors
        yield lowest.bit_length() - 1
        selectors ^= lowest
