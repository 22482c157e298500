"""Selects probes of objects in steps, each of which is short however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selectors import Selector, choose, meant
from stapsdtd.model import Probe, Site

_T = TypeVar("_T")

_STEP_MATCHES = 4000
"""How many sites are matched in a step, counting each selector: some 2 ms."""


def select(
    selectors: tuple[Selector, ...], objects: Iterable[MappedObject], pids: frozenset[int] = frozenset()
) -> Iterator[list[Probe]]:
    """Select the probes, and of these the sites, that any selector matches; no selectors match everything.

    Each step yields what it found, which may be nothing. pids: at least one of them must map the probe; empty for any
    process.
    """
    passed_over = 0
    for mapped in objects:
        obj = mapped.object
        narrowed = meant(selectors, obj.path, obj.parsed.providers)
        if (pids and pids.isdisjoint(mapped.pids)) or (selectors and not narrowed):
            passed_over += 1 + len(selectors)
            if passed_over >= _STEP_MATCHES:
                passed_over = 0
                yield []
            continue
        named: dict[tuple[str, str], list[Site]] = {}
        for part in parts(obj.parsed.sites, len(narrowed)):
            for site in _chosen(narrowed, mapped, part):
                named.setdefault((site.provider, site.name), []).append(site)
            yield []
        for some in parts(tuple(named.items()), len(narrowed)):
            yield [Probe(obj, provider, name, tuple(sites), mapped.pids) for (provider, name), sites in some]


def parts(items: tuple[_T, ...], selectors: int) -> Iterator[tuple[_T, ...]]:
    """Divide sites into as many as are matched in a step. selectors: how many each is matched by."""
    at_a_time = max(1, _STEP_MATCHES // (4 + selectors))
    return (items[first : first + at_a_time] for first in range(0, len(items), at_a_time))


def _chosen(selectors: tuple[Selector, ...], mapped: MappedObject, sites: tuple[Site, ...]) -> Iterable[Site]:
    if not selectors:
        return sites
    return (
        selected.capture.site
        for selected in choose(selectors, mapped.object.path, sites)
        if selected.pids is None or not selected.pids.isdisjoint(mapped.pids)
    )
