from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stapsdtd.catalog.registry import Change, MappedObject, Registry, RegistryMetrics
from stapsdtd.model import FileOffset, Mapping, Object, ObjectKey, ProcessKey
from tests.unit.samples import sample_object, site

OBJECTS = [sample_object(site(f"n{inode}"), inode=inode) for inode in range(3)]


def mapped(*objects: Object) -> dict[ObjectKey, tuple[Object, Mapping]]:
    return {
        found.key: (found, Mapping(0x1000, 0x2000, FileOffset(0), 1, found.key.inode, found.path)) for found in objects
    }


def listening(registry: Registry) -> list[Change]:
    changes: list[Change] = []
    registry.listen(changes.append)
    return changes


def test_object_appears_with_its_first_process_and_vanishes_with_the_last() -> None:
    registry = Registry()
    changes = listening(registry)
    (found, *_) = OBJECTS
    registry.update(ProcessKey(1, 100), mapped(found))
    registry.update(ProcessKey(2, 100), mapped(found))
    registry.update(ProcessKey(2, 100), mapped(found))
    assert registry.mappings(found.key).keys() == {1, 2}
    registry.gone(1)
    registry.update(ProcessKey(2, 100), {})
    assert changes == [Change(found, appeared=True), Change(found), Change(found), Change(found, vanished=True)]
    assert registry.objects() == []
    assert registry.mappings(found.key) == {}
    assert registry.pids() == {2}


def test_held_object_stays_without_a_process_and_is_not_listed() -> None:
    registry = Registry()
    changes = listening(registry)
    (found, *_) = OBJECTS
    for _ in range(2):
        registry.hold(found)
    assert (registry.objects(), registry.mapped(), registry.mapped({1})) == ([found], [], [])
    registry.update(ProcessKey(1, 100), mapped(found))
    assert registry.mapped() == [MappedObject(found, (1,))]
    registry.gone(1)
    registry.release(found.key)
    assert registry.metrics().objects == registry.metrics().probes == 1
    registry.release(found.key)
    assert changes == [Change(found, appeared=True), Change(found), Change(found), Change(found, vanished=True)]
    assert (registry.objects(), registry.metrics().probes) == ([], 0)


def test_mapped_object_outlives_who_held_it() -> None:
    registry = Registry()
    (found, *_) = OBJECTS
    registry.update(ProcessKey(1, 100), mapped(found))
    changes = listening(registry)
    registry.hold(found)
    registry.release(found.key)
    assert changes == []
    assert registry.objects() == [found]


def test_reused_pid_is_another_process() -> None:
    registry = Registry()
    registry.update(ProcessKey(1, 100), mapped(OBJECTS[0]))
    changes = listening(registry)
    registry.update(ProcessKey(1, 200), mapped(OBJECTS[0]))
    assert changes == [Change(OBJECTS[0], vanished=True), Change(OBJECTS[0], appeared=True)]
    assert registry.process(1) == ProcessKey(1, 200)
    assert registry.process(2) is None


def test_listener_sees_the_registry_after_the_change() -> None:
    registry = Registry()
    seen: list[list[Object]] = []
    registry.listen(lambda _change: seen.append(registry.objects()))
    registry.update(ProcessKey(1, 100), mapped(*OBJECTS[:2]))
    registry.update(ProcessKey(1, 100), mapped(*OBJECTS[1:]))
    assert seen == [OBJECTS[:2]] * 2 + [OBJECTS[1:]] * 2


def test_listener_that_ended_hears_nothing() -> None:
    registry = Registry()
    changes: list[Change] = []
    stop = registry.listen(changes.append)
    stop()
    registry.update(ProcessKey(1, 100), mapped(OBJECTS[0]))
    assert changes == []


def test_listener_that_fails_leaves_the_registry_right() -> None:
    registry = Registry()

    def fail(_change: Change) -> None:
        raise OSError("no descriptors left")

    stop = registry.listen(fail)
    with pytest.raises(OSError, match="no descriptors left"):
        registry.update(ProcessKey(1, 100), mapped(*OBJECTS))
    stop()
    assert registry.objects() == OBJECTS
    registry.gone(1)
    assert registry.objects() == []


def test_all_listeners_are_told_where_one_fails() -> None:
    registry = Registry()

    def fail(change: Change) -> None:
        raise OSError(change.object.key.inode)

    registry.listen(fail)
    changes = listening(registry)
    with pytest.raises(OSError, match="0"):
        registry.update(ProcessKey(1, 100), mapped(*OBJECTS))
    assert [change.object for change in changes] == OBJECTS


def test_what_is_new_is_told_before_what_is_gone() -> None:
    registry = Registry()
    registry.update(ProcessKey(1, 100), mapped(OBJECTS[0]))
    changes = listening(registry)
    registry.update(ProcessKey(1, 100), mapped(OBJECTS[1]))
    assert changes == [Change(OBJECTS[1], appeared=True), Change(OBJECTS[0], vanished=True)]


def test_who_else_maps_an_object_is_told_once_for_many_processes() -> None:
    first, second, third = OBJECTS
    registry = Registry()
    registry.update(ProcessKey(1, 100), mapped(first, second))
    changes = listening(registry)
    with registry.gathering():
        for pid in (2, 3):
            registry.update(ProcessKey(pid, 100), mapped(first, second))
        registry.update(ProcessKey(4, 100), mapped(third))
        registry.gone(2)
        assert changes == [Change(third, appeared=True)]
    assert changes[1:] == [Change(first), Change(second)]
    with registry.gathering():
        for pid in (1, 3):
            registry.gone(pid)
    # that nobody maps them any more says it all
    assert set(changes[3:]) == {Change(first, vanished=True), Change(second, vanished=True)}


def test_unknown_process_may_go() -> None:
    registry = Registry()
    registry.gone(4711)
    assert registry.pids() == frozenset()


def test_what_some_processes_map() -> None:
    first, second, *_ = OBJECTS
    registry = Registry()
    registry.update(ProcessKey(2, 1), mapped(first, second))
    registry.update(ProcessKey(1, 1), mapped(first))
    registry.update(ProcessKey(3, 1), {})
    both = MappedObject(first, (1, 2))
    assert registry.mapped() == [both, MappedObject(second, (2,))]
    assert registry.mapped({1, 3, 4711}) == [MappedObject(first, (1,))]
    assert registry.as_mapped(first) == registry.as_mapped(first, {1, 2, 3}) == both
    assert registry.as_mapped(second, {1}) == MappedObject(second, ())
    assert registry.mapped_metrics({1}).objects == 1
    assert registry.mapped_metrics() == registry.metrics()


def test_path_is_as_the_first_that_counts_has_it() -> None:
    (found, *_) = OBJECTS
    registry = Registry()
    for pid, path in ((1, "/one"), (2, "/two"), (3, "/three")):
        ((key, (obj, mapping)),) = mapped(found).items()
        registry.update(ProcessKey(pid, 1), {key: (obj, structs.replace(mapping, path=path))})
    assert [each.object.path for each in registry.mapped({3, 2})] == ["/two"]
    assert registry.as_mapped(found, {3}).object.path == "/three"
    assert registry.as_mapped(found).object == found


STEPS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.sets(st.integers(0, 2)) | st.none()),
    max_size=30,
)


@given(STEPS)
def test_registry_is_what_the_last_looks_said(steps: list[tuple[int, int, set[int] | None]]) -> None:
    registry = Registry()
    standing: set[ObjectKey] = set()

    def follow(change: Change) -> None:
        if change.appeared:
            assert change.object.key not in standing
            standing.add(change.object.key)
        if change.vanished:
            standing.remove(change.object.key)

    registry.listen(follow)
    expected: dict[int, set[int]] = {}
    for pid, start, inodes in steps:
        if inodes is None:
            registry.gone(pid)
            expected.pop(pid, None)
        else:
            registry.update(ProcessKey(pid, start), mapped(*(OBJECTS[inode] for inode in sorted(inodes))))
            expected[pid] = inodes
        for found in OBJECTS:
            pids = {pid for pid, inodes in expected.items() if found.key.inode in inodes}
            assert registry.mappings(found.key).keys() == pids
        assert {found.key for found in registry.objects()} == standing


def test_who_crowds_an_object() -> None:
    registry = Registry()
    first, second, _ = OBJECTS
    registry.update(ProcessKey(1, 100), mapped(first, second))
    registry.update(ProcessKey(2, 100), mapped(first, second), frozenset({first.key}))
    assert (registry.crowding(first.key), registry.crowding(second.key)) == (2, None)
    registry.update(ProcessKey(2, 100), mapped(first))
    assert registry.crowding(first.key) is None
    registry.update(ProcessKey(2, 100), mapped(first), frozenset({first.key}))
    registry.gone(2)
    assert registry.crowding(first.key) is None


def test_metrics_count_each_object_once() -> None:
    registry = Registry()
    first, second, third = OBJECTS
    registry.update(ProcessKey(1, 100), mapped(first, second))
    registry.update(ProcessKey(2, 100), mapped(first))
    registry.update(ProcessKey(3, 100), mapped(third))
    registry.hold(first)
    assert registry.mapped_metrics({1, 2, 99}) == RegistryMetrics(3, 2, 2)
    assert registry.mapped_metrics() == RegistryMetrics(3, 3, 3)
