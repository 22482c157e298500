from __future__ import annotations

import itertools

from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import parse
from stapsdtd.model import Probe
from tests.unit.samples import sample_object, site

START = site("start", 0x1000, function="run")
INLINED = site("start", 0x2000, function="main")
FOUND = sample_object(START, INLINED, site("stop", 0x3000), site("start", 0x4000, provider="other"))


def selected(*texts: str, mapped_by: tuple[int, ...] = (10, 11), pids: frozenset[int] = frozenset()) -> list[Probe]:
    steps = select(SelectorSet([*map(parse, texts)]), [MappedObject(FOUND, mapped_by)], pids)
    return list(itertools.chain.from_iterable(filter(None, steps)))


def test_sites_are_gathered_by_provider_and_name() -> None:
    probes = selected()
    assert [(each.provider, each.name, [site.site_offset for site in each.sites]) for each in probes] == [
        ("app", "start", [0x1000, 0x2000]), ("app", "stop", [0x3000]), ("other", "start", [0x4000]),
    ]  # fmt: skip
    assert {(each.object, each.pids) for each in probes} == {(FOUND, (10, 11))}


def test_only_sites_that_are_meant() -> None:
    assert [probe.sites for probe in selected("app::main:")] == [(INLINED,)]
    assert selected("nobody:*") == []
    assert [probe.name for probe in selected("app:stop", "other:*")] == ["stop", "start"]


def test_only_of_processes_that_are_meant() -> None:
    assert selected(pids=frozenset({12})) == []
    assert selected(pids=frozenset({11, 12})) == selected()
    assert selected("app12:::") == []
    assert [probe.name for probe in selected("app11:::")] == ["start", "stop"]
    assert selected("app12:::", mapped_by=()) == []


def test_large_objects_are_selected_in_steps() -> None:
    sites = [site(f"name{number}", number + 1) for number in range(5000)]
    big = MappedObject(sample_object(*sites), (1,))
    for globs in ((), ("app:name*",), tuple(f"app:name{number}*" for number in range(100))):
        steps = list(select(SelectorSet([*map(parse, globs)]), [big]))
        sizes = [len(probes or ()) for probes in steps]
        assert sum(sizes) == 5000
        assert max(sizes) <= 2048
        # what is matched in a step is not to be seen, but how many steps there are
        assert len(steps) >= 5000 // 1024 + 2


def test_many_objects_that_do_not_match_are_passed_over_in_steps() -> None:
    wanted = SelectorSet([parse(f"other{number}:*") for number in range(9)])
    few = MappedObject(sample_object(site("name")), (1,))
    assert len(list(select(wanted, [few] * 2560))) >= 10
