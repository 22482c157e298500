"""What the cache of parsed files keeps, on a host whose paths lead where a test says."""

from __future__ import annotations

from stapsdtd.model import Object, ObjectKey, ParsedObject
from stapsdtd.procs.parsed_files import CacheBounds, ParsedFiles
from tests.unit.samples import key, sample_object, site

NOTHING = ParsedObject("", None, (), ())
OBJECT_BYTES = 1400
"""An object with one site."""


def obj(number: int, *, mtime_ns: int = 0) -> Object:
    found = key(number)
    return sample_object(site(), of=ObjectKey(found.dev, found.inode, found.size, mtime_ns), path=f"/lib/{number}")


class Host:
    """moved: keys of files to which their paths lead no more. checked: numbers of files, in the order of checks."""

    def __init__(self, idle_bytes: int = 4 << 20, unchecked: int = 64) -> None:
        self.files = ParsedFiles(self._may_lead_to, CacheBounds(idle_bytes, unchecked))
        self.moved: set[ObjectKey] = set()
        self.checked: list[int] = []

    def _may_lead_to(self, found: ObjectKey, path: str) -> bool:
        assert path == f"/lib/{found.inode}"
        self.checked.append(found.inode)
        return found not in self.moved

    def add(self, *added: Object) -> None:
        for each in added:
            self.files.add(each.key, each.parsed, each.path)
            self.files.identify(each.key)

    def known(self, among: list[Object]) -> list[int]:
        """Return which of these are cached, and make sure that the table of inodes agrees."""
        numbers = [each.key.inode for each in among if self.files.get(each.key) is not None]
        assert numbers == [each.key.inode for each in among if self.files.object_of(each.key.file)]
        return numbers


def test_what_is_mapped_takes_no_room_from_others() -> None:
    host = Host(idle_bytes=3 * OBJECT_BYTES)
    found = [obj(number) for number in range(1, 11)]
    for number, each in enumerate(found):
        host.add(each)
        if number < 2:
            host.files.mapped(each)
    assert host.known(found) == [1, 2, 8, 9, 10]
    for each in found[:2]:
        host.files.unmapped(each)
    host.add(found[2])
    # these three fill it
    assert host.known(found) == [1, 2, 3]
    host.add(obj(11))
    assert host.known([*found, obj(11)]) == [2, 3, 11]


def test_least_recently_used_goes_first() -> None:
    host = Host(idle_bytes=3 * OBJECT_BYTES)
    found = [obj(number) for number in range(1, 5)]
    host.add(*found[:3])
    assert host.files.get(found[0].key) is not None
    host.add(found[3])
    assert host.known(found) == [1, 3, 4]


def test_file_is_cached_once_however_often_it_is_added() -> None:
    host = Host(idle_bytes=2 * OBJECT_BYTES)
    for _ in range(3):
        host.add(obj(1))
    host.add(obj(2))
    assert host.known([obj(1), obj(2)]) == [1, 2]


def test_one_file_may_be_larger_than_the_bound() -> None:
    host = Host(idle_bytes=1)
    host.add(obj(1))
    assert host.known([obj(1)]) == [1]
    host.add(obj(2))
    assert host.known([obj(1), obj(2)]) == [2]


def test_idle_files_are_checked_in_turn_but_for_the_latest() -> None:
    host = Host(unchecked=4)
    host.add(*(obj(number) for number in range(1, 6)))
    assert host.checked == []
    host.add(obj(6), obj(7))
    assert host.checked == [1, 2, 3, 4]
    host.checked.clear()
    # these two would be next
    host.files.mapped(obj(5))
    host.moved.add(obj(1).key)
    host.add(obj(8))
    assert host.checked == [1, 2]
    assert host.known([obj(number) for number in range(1, 9)]) == [2, 3, 4, 5, 6, 7, 8]
    host.checked.clear()
    host.files.unmapped(obj(5))
    host.add(*(obj(number) for number in range(9, 13)))
    assert host.checked == [6, 3, 4, 7, 2, 8, 5, 6]


def test_each_new_file_has_others_checked_whatever_was_mapped_before() -> None:
    host = Host(unchecked=4)
    host.add(*(obj(number) for number in range(1, 21)))
    for _ in range(10):
        host.files.mapped(obj(20))
        host.files.unmapped(obj(20))
    host.moved.update(obj(number).key for number in range(1, 20))
    for number in range(21, 31):
        host.checked.clear()
        host.add(obj(number))
        assert len(host.checked) == len(set(host.checked)) == 2
    assert host.known([obj(number) for number in range(1, 31)]) == list(range(20, 31))


def test_object_without_a_name_is_forgotten_when_nobody_maps_it() -> None:
    host = Host()
    memfd = obj(1)
    host.add(obj(2))
    host.files.add(memfd.key, memfd.parsed, memfd.path, is_unlinked=True)
    host.files.identify(memfd.key)
    host.files.mapped(memfd)
    assert host.known([memfd, obj(2)]) == [1, 2]
    for _ in range(2):
        host.files.unmapped(memfd)
        assert host.known([memfd, obj(2)]) == [2]


def test_touched_file_is_the_same_object_while_that_is_mapped() -> None:
    host = Host()
    before, after = obj(1), obj(1, mtime_ns=1)
    host.add(before)
    host.files.mapped(before)
    host.files.add(after.key, after.parsed, after.path)
    assert host.files.identify(after.key) == before.key
    host.files.unmapped(before)
    assert host.files.identify(after.key) == after.key
    assert host.files.get(before.key) is None


def test_file_without_probes_is_never_another_ones_object() -> None:
    host = Host()
    before = obj(1)
    host.add(before)
    host.files.mapped(before)
    after = ObjectKey(before.key.dev, before.key.inode, 0, 1)
    host.files.add(after, NOTHING, before.path)
    assert host.files.identify(after) == after
    assert host.files.object_of(before.key.file) == after
