from __future__ import annotations

from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.model import Probe
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import argument, key, sample_object, site


def probe(inode: int, sites: int, arguments: int = 1) -> Probe:
    all_sites = tuple(site("a", number, [argument()] * arguments) for number in range(sites))
    return Probe(sample_object(*all_sites, of=key(inode)), "app", "a", all_sites, (1,))


def sizes(bounded: ListingLimiter, *probes: Probe) -> list[int]:
    shown = (finish(bounded.trimmed(each)) for each in probes)
    return [len(each.sites) for each in shown if each]


def test_what_is_small_is_told_whole() -> None:
    bounded, probes = ListingLimiter(), [probe(1, 3), probe(2, 500, 0)]
    assert [finish(bounded.trimmed(each)) for each in probes] == probes
    assert bounded.left_out == 0


def test_large_object_costs_its_own_sites() -> None:
    bounded = ListingLimiter(max_per_object=20, max_total=1000)
    assert sizes(bounded, probe(1, 30), probe(2, 3), probe(1, 5), probe(3, 10)) == [10, 3, 10]
    assert bounded.left_out == 25


def test_all_are_bounded_too() -> None:
    bounded = ListingLimiter(max_per_object=20, max_total=35)
    assert sizes(bounded, *(probe(inode, 10) for inode in (1, 2, 3))) == [10, 7]
    assert bounded.left_out == 13


def test_long_argument_lists_count() -> None:
    bounded = ListingLimiter(max_per_object=129 * 3, max_total=100_000)
    assert sizes(bounded, probe(1, 12_000, 128)) == [3]
    assert bounded.left_out == 11_997
