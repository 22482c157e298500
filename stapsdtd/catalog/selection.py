"""Selects probes of objects in steps, each of which is short however many there are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selector_set import Chosen, SelectorSet
from stapsdtd.model import Object, Probe, Site

_PROVIDERS_PER_STEP = 1024
_PROVIDERS_OF_OBJECT = 4
"""As many take as long as an object itself."""
_SITES_PER_STEP = 2048


def select(
    selectors: SelectorSet, objects: Iterable[MappedObject], pids: frozenset[int] = frozenset()
) -> Generator[list[Probe] | None, None, None]:
    """Select the probes, and of these the sites, that any selector matches.

    Each step yields what it found, None if nothing. pids: at least one of them must map the probe; empty for any
    process.
    """
    for some in portions(objects, _effort, _PROVIDERS_PER_STEP):
        mapped = [each for each in some if not pids or not pids.isdisjoint(each.pids)]
        names = [(each.object.path, each.object.parsed.providers) for each in mapped]
        meant = yield from selectors.meant(names)
        yield None
        for each, by in zip(mapped, meant, strict=True):
            if by:
                chosen = yield from selectors.choose(by, each.object.parsed.sites)
                yield from _probes(each, chosen, selectors)


def portions(
    objects: Iterable[MappedObject], effort: Callable[[Object], int], most: int
) -> Iterator[list[MappedObject]]:
    """Divide objects into lists, each of which is complete once it takes this effort."""
    some: list[MappedObject] = []
    taken = 0
    for each in objects:
        some.append(each)
        taken += effort(each.object)
        if taken >= most:
            yield some
            some, taken = [], 0
    if some:
        yield some


def _effort(obj: Object) -> int:
    return _PROVIDERS_OF_OBJECT + len(obj.parsed.providers)


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
