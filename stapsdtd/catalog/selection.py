"""Selects probes of objects in steps, each of which is short however many there are."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selector_set import Chosen, SelectorSet
from stapsdtd.model import Probe, Site

_OBJECTS_PER_STEP = 256
_PROVIDERS_PER_STEP = 1024
_SITES_PER_STEP = 2048


def select(
    selectors: SelectorSet, objects: Iterable[MappedObject], pids: frozenset[int] = frozenset()
) -> Generator[list[Probe] | None, None, None]:
    """Select the probes, and of these the sites, that any selector matches.

    Each step yields what it found, None if nothing. pids: at least one of them must map the probe; empty for any
    process.
    """
    for some in _few(objects):
        mapped = [each for each in some if not pids or not pids.isdisjoint(each.pids)]
        names = [(each.object.path, each.object.parsed.providers) for each in mapped]
        meant = yield from selectors.meant(names)
        yield None
        for each, by in zip(mapped, meant, strict=True):
            if by:
                chosen = yield from selectors.choose(by, each.object.parsed.sites)
                yield from _probes(each, chosen, selectors)


def _few(objects: Iterable[MappedObject]) -> Iterator[list[MappedObject]]:
    some: list[MappedObject] = []
    providers = 0
    for each in objects:
        some.append(each)
        providers += len(each.object.parsed.providers)
        if len(some) >= _OBJECTS_PER_STEP or providers >= _PROVIDERS_PER_STEP:
            yield some
            some, providers = [], 0
    yield some


def _is_of(named: frozenset[int] | None, pids: Iterable[int]) -> bool:
    return named is None or not named.isdisjoint(pids)


def _probes(mapped: MappedObject, chosen: list[Chosen], selectors: SelectorSet) -> Iterator[list[Probe] | None]:
    named: dict[tuple[str, str], list[Site]] = {}
    for number, each in enumerate(chosen, 1):
        if _is_of(selectors.pids(each), mapped.pids):
            named.setdefault((each.site.provider, each.site.name), []).append(each.site)
        if number % _SITES_PER_STEP == 0:
            yield None
    probes: list[Probe] = []
    for (provider, name), sites in named.items():
        probes.append(Probe(mapped.object, provider, name, tuple(sites), mapped.pids))
        if len(probes) >= _SITES_PER_STEP:
            yield probes
            probes = []
    yield probes
