from __future__ import annotations

from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import probes_of
from stapsdtd.catalog.selectors import parse
from stapsdtd.model import Object
from tests.unit.samples import sample_object, site

FOUND = sample_object(site("a", 1), site("b", 2))


def visible(*selectors: str, pids: frozenset[int] = frozenset()) -> ProbeView:
    return ProbeView(tuple(map(parse, selectors)), pids)


def changed(view: ProbeView, *pids: int, found: Object = FOUND) -> list[tuple[bool, str]]:
    return [(added, probe.name) for added, probe in view.changed(found, pids)]


def test_probes_come_and_go_with_their_object() -> None:
    view = visible()
    assert view.begin([]) == []
    assert changed(view, 1) == [(True, "a"), (True, "b")]
    assert changed(view, 1, 2) == []
    assert changed(view) == [(False, "a"), (False, "b")]
    assert changed(view) == []


def test_what_was_shown_at_first_is_not_added_again() -> None:
    view = visible("app:a")
    assert [probe.name for probe in view.begin(list(probes_of(FOUND, [1])))] == ["a"]
    assert changed(view, 1, 2) == []
    assert changed(view) == [(False, "a")]


def test_only_what_the_selectors_mean() -> None:
    assert changed(visible("app:b"), 1) == [(True, "b")]
    assert changed(visible("other:*"), 1) == []


def test_a_probe_is_in_sight_while_a_wanted_process_maps_it() -> None:
    view = visible(pids=frozenset({7}))
    assert changed(view, 1) == []
    assert changed(view, 1, 7) == [(True, "a"), (True, "b")]
    assert changed(view, 1) == [(False, "a"), (False, "b")]


def test_who_counts_may_change() -> None:
    view = visible("app:a")
    view.among = frozenset({7})
    assert changed(view, 1) == []
    view.among = frozenset({1, 7})
    assert changed(view, 1) == [(True, "a")]
    view.among = frozenset()
    assert changed(view, 1) == [(False, "a")]


def test_objects_do_not_mix() -> None:
    other = sample_object(site("a"), inode=2)
    view = visible()
    view.begin(list(probes_of(FOUND, [1])))
    assert changed(view, 1, found=other) == [(True, "a")]
    assert changed(view, found=FOUND) == [(False, "a"), (False, "b")]
    assert changed(view, found=other) == [(False, "a")]
