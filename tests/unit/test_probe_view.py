from __future__ import annotations

import tracemalloc
from dataclasses import replace

from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selectors import parse
from stapsdtd.model import Object
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import sample_object, site

FOUND = sample_object(site("a", 1), site("b", 2))


def visible(*selectors: str, pids: frozenset[int] = frozenset()) -> ProbeView:
    return ProbeView(tuple(map(parse, selectors)), pids)


def changed(view: ProbeView, *pids: int, found: Object = FOUND) -> list[tuple[bool, str]]:
    return [(added, probe.name) for added, probe in finish(view.update([MappedObject(found, pids)]))]


def test_probes_come_and_go_with_their_object() -> None:
    view = visible()
    assert finish(view.update([])) == []
    assert changed(view, 1) == [(True, "a"), (True, "b")]
    assert changed(view, 1, 2) == []
    assert changed(view) == [(False, "a"), (False, "b")]
    assert changed(view) == []


def test_only_what_the_selectors_mean() -> None:
    assert changed(visible("app:b"), 1) == [(True, "b")]
    assert changed(visible("other:*"), 1) == []


def test_a_probe_is_in_sight_while_a_wanted_process_maps_it() -> None:
    view = visible(pids=frozenset({7}))
    assert changed(view, 1) == []
    assert changed(view, 1, 7) == [(True, "a"), (True, "b")]
    assert changed(view, 1) == [(False, "a"), (False, "b")]


def test_what_came_and_went_is_told() -> None:
    changes = finish(visible("app:a").update([MappedObject(FOUND, (1,)), MappedObject(FOUND, ())]))
    assert [(added, probe.name) for added, probe in changes] == [(True, "a"), (False, "a")]


def test_objects_do_not_mix() -> None:
    other = sample_object(site("a"), inode=2)
    view = visible()
    assert changed(view, 1) == [(True, "a"), (True, "b")]
    assert changed(view, 1, found=other) == [(True, "a")]
    assert changed(view, found=FOUND) == [(False, "a"), (False, "b")]
    assert changed(view, found=other) == [(False, "a")]


def test_pids_of_selectors_count() -> None:
    view = visible("app7:::a")
    assert changed(view, 1) == []
    assert changed(view, 1, 7) == [(True, "a")]
    assert changed(view, 1) == [(False, "a")]


def test_path_of_an_object_may_change() -> None:
    view = visible("app:/usr/bin/app::a")
    moved = replace(FOUND, path="/usr/bin/other")
    assert changed(view, 1) == [(True, "a")]
    assert changed(view, 1, found=moved) == [(False, "a")]
    assert changed(view, 1) == [(True, "a")]


def test_a_view_takes_little_memory() -> None:
    many = sample_object(*(site(f"p{number}", 1 + number) for number in range(20_000)))
    view = visible()
    tracemalloc.start()
    try:
        assert len(changed(view, 1, found=many)) == 20_000
        assert tracemalloc.get_traced_memory()[0] < 20_000 * 50
    finally:
        tracemalloc.stop()
    assert len(changed(view, found=many)) == 20_000
