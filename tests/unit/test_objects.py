"""From mappings to objects, with files of this process's own."""

from __future__ import annotations

import errno
import io
import mmap
import os
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from stapsdtd.elf import parse_object
from stapsdtd.errors import ObjectGoneError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.inodes import InodeReader, MappedInode, ProcessInodes
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.model import FileOffset, Mapping, Object, ObjectKey, ParsedObject
from stapsdtd.procs.file_keys import is_host_file, may_lead_to
from stapsdtd.procs.objects import Copy, ObjectStore, Parse, open_object
from stapsdtd.procs.parsed_files import DEFAULT_BOUNDS, CacheBounds, ParsedFiles
from tests.support import descriptors, without_descriptors
from tests.unit.elf_builder import TEXT_OFFSET, TEXT_VADDR, Elf

PID = os.getpid()
LOCAL = Filesystems()


class NoCopies:
    """Of files on local file systems none is needed."""

    def take(self, pid: int, user: int, mapping: Mapping) -> Copy:  # noqa: ARG002
        pytest.fail(f"{mapping.path} is on a local file system")

    def drop(self, copy: Copy) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def parse_here(descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:  # noqa: ARG001
    with open(descriptor, "rb", closefd=False) as file:
        return parse_object(file)


class CountingParser:
    """inodes: of the files parsed, in order."""

    def __init__(self) -> None:
        self.inodes: list[int] = []

    def __call__(self, descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        self.inodes.append(os.fstat(descriptor).st_ino)
        return parse_here(descriptor, pid, owner)


def made_files(bounds: CacheBounds = DEFAULT_BOUNDS) -> ParsedFiles:
    return ParsedFiles(partial(may_lead_to, filesystems=LOCAL), bounds)


def made_store(parse: Parse = parse_here, files: ParsedFiles | None = None) -> ObjectStore:
    return ObjectStore(parse, LOCAL, NoCopies(), files or made_files())


def image(*names: bytes) -> bytes:
    notes = b"".join(Elf().note(TEXT_VADDR + number, name=name) for number, name in enumerate(names))
    return Elf(notes=notes).build()


def mapping_of(path: Path, start: int = 0x1000) -> Mapping:
    status = path.stat()
    return Mapping(start, start + 0x1000, FileOffset(0), status.st_dev, status.st_ino, str(path))


def resolved(store: ObjectStore, path: Path) -> Object:
    found = store.resolve(PID, mapping_of(path))
    assert found is not None
    return found


def opened(found: Object, path: Path) -> bytes:
    descriptor = open_object(found, [(PID, mapping_of(path))], parse_here, LOCAL)
    try:
        # as the kernel does, which opens the file by this path anew
        return Path(f"/proc/self/fd/{descriptor}").read_bytes()
    finally:
        os.close(descriptor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "app"
    found.write_bytes(image(b"probe"))
    return found


@pytest.fixture
def store() -> ObjectStore:
    return made_store()


def test_object_is_what_its_notes_say(store: ObjectStore, path: Path) -> None:
    found = resolved(store, path)
    assert found.path == str(path)
    assert [(site.name, site.site_offset) for site in found.parsed.sites] == [("probe", TEXT_OFFSET)]
    assert (found.key.inode, found.key.size) == (path.stat().st_ino, path.stat().st_size)
    assert is_host_file(found, LOCAL)
    assert opened(found, path) == path.read_bytes()


def test_kernel_is_not_asked_for_the_inode_of_an_ordinary_file(store: ObjectStore, path: Path) -> None:
    never = ProcessInodes(PID, LockedCalls(), lambda: pytest.fail("stat shows it"))
    assert store.resolve(PID, mapping_of(path), never) is not None


def test_kernel_is_asked_once_for_all_mappings_of_a_process() -> None:
    class Reader:
        asked = 0

        def mapped_by(self, tid: int) -> dict[int, MappedInode]:
            assert tid == PID
            self.asked += 1
            return {0x1000: MappedInode(5, 6, "btrfs", 7)}

    reader = Reader()
    inodes = ProcessInodes(PID, LockedCalls(), lambda: cast("InodeReader", reader))
    assert [inodes.at(start) for start in (0x1000, 0x2000)] == [MappedInode(5, 6, "btrfs", 7), None]
    assert reader.asked == 1


def test_addresses_that_another_file_took_meanwhile_lead_nowhere(store: ObjectStore, path: Path) -> None:
    """Between a look at maps and a look at map_files a process may have executed another program."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        (now,) = [mapping for mapping in procfs.executable_mappings(os.getpid()) if mapping.path == str(path)]
        found = store.resolve(os.getpid(), now)
        assert found is not None
        assert found.path == str(path)
        before = structs.replace(now, inode=now.inode + 1, path="/usr/bin/before")
        with pytest.raises(ObjectGoneError):
            store.resolve(os.getpid(), before)


def test_file_is_parsed_once(path: Path) -> None:
    parser = CountingParser()
    store = made_store(parser)
    found = resolved(store, path)
    assert resolved(store, path) == found
    assert parser.inodes == [path.stat().st_ino]


def test_named_file_and_mapped_file_are_one_object(path: Path) -> None:
    parser = CountingParser()
    store = made_store(parser)
    status = path.stat()
    key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    named = store.object_of(key, str(path), parse_object(io.BytesIO(path.read_bytes())))
    store.mapped(named)
    assert resolved(store, path) == named
    assert parser.inodes == []
    # touched, with the same probes
    os.utime(path, ns=(1, 1))
    assert resolved(store, path) == named


def test_file_that_is_known_is_not_looked_for_in_the_process(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    with pytest.raises(KeyError):
        store.recall(mapping.dev, mapping.inode, mapping.path)
    found = resolved(store, path)
    assert store.recall(mapping.dev, mapping.inode, mapping.path) == found
    assert store.resolve(2**22 + 1, mapping) == found


def test_file_without_probes_is_known_too(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    for content in (b"", b"#!/bin/sh\n"):
        path.write_bytes(content)
        assert store.resolve(PID, mapping) is None
        assert store.recall(mapping.dev, mapping.inode, mapping.path) is None


def test_file_without_probes_is_known_where_the_kernel_tells_no_path(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    with pytest.raises(KeyError):
        store.recall(mapping.dev, mapping.inode, "")
    path.write_bytes(b"#!/bin/sh\n")
    assert store.resolve(PID, mapping) is None
    assert store.recall(mapping.dev, mapping.inode, "") is None
    path.write_bytes(image(b"probe"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(KeyError):
        store.recall(mapping.dev, mapping.inode, "")


def test_file_that_changed_or_moved_is_not_known_any_more(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    resolved(store, path)
    for elsewhere in ("/usr", "/nowhere", "/with\0nul"):
        with pytest.raises(KeyError):
            store.recall(mapping.dev, mapping.inode, elsewhere)
    path.write_bytes(image(b"other"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(KeyError):
        store.recall(mapping.dev, mapping.inode, mapping.path)


def test_file_of_a_process_that_ended_is_reached_by_its_path(store: ObjectStore, path: Path) -> None:
    found = store.resolve(2**22 + 1, mapping_of(path))
    assert found is not None
    assert found.path == str(path)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", Elf().build()])
def test_files_without_probes_are_no_objects(store: ObjectStore, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert store.resolve(PID, mapping_of(path)) is None


def test_what_cannot_be_reached_is_no_object(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    path.unlink()
    with pytest.raises(ObjectGoneError):
        store.resolve(PID, mapping)


def test_another_file_under_the_same_name_is_not_taken_for_it(store: ObjectStore, path: Path) -> None:
    mapping, found = mapping_of(path), resolved(store, path)
    keeping_the_inode = os.open(path, os.O_RDONLY)
    path.unlink()
    path.write_bytes(image(b"probe"))
    # the deleted one is reached through the descriptor
    again = store.resolve(PID, mapping)
    assert again is not None
    assert again.key == found.key
    assert not is_host_file(found, LOCAL)
    os.close(keeping_the_inode)
    with pytest.raises(ObjectGoneError):
        open_object(found, [(PID, mapping)], parse_here, LOCAL)


def test_fifo_in_the_place_of_a_file_holds_nobody_up(store: ObjectStore, path: Path) -> None:
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(ObjectGoneError):
        store.resolve(PID, mapping_of(path))


def test_want_of_descriptors_says_nothing_of_the_object(store: ObjectStore, path: Path) -> None:
    mapping = mapping_of(path)
    with without_descriptors(), pytest.raises(OSError, match="Too many open files") as raised:
        store.resolve(PID, mapping)
    assert raised.value.errno == errno.EMFILE
    assert store.resolve(PID, mapping) is not None


def test_touched_file_stays_the_same_object_while_it_is_mapped(store: ObjectStore, path: Path) -> None:
    """The kernel arms inodes: two objects of one inode would give each event twice."""
    before = resolved(store, path)
    store.mapped(before)
    os.utime(path, ns=(1, 1))
    assert resolved(store, path) == before
    # and it can still be armed
    assert opened(before, path) == path.read_bytes()
    store.unmapped(before)
    after = resolved(store, path)
    assert (after.key.inode, after.parsed) == (before.key.inode, before.parsed)
    assert is_host_file(after, LOCAL)
    assert not is_host_file(before, LOCAL)


def test_same_program_with_the_inode_of_a_deleted_one_is_a_file_of_the_host(store: ObjectStore, path: Path) -> None:
    """Later processes map it, so it stays armed when the last one ends."""
    before = resolved(store, path)
    store.mapped(before)
    store.unmapped(before)
    # as the next file gets the inode of one that was deleted
    other = path.rename(path.with_name("other"))
    os.utime(other, ns=(1, 1))
    after = resolved(store, other)
    assert after.key.inode == before.key.inode
    assert is_host_file(after, LOCAL)


def test_file_that_was_written_to_is_another_object(store: ObjectStore, path: Path) -> None:
    before = resolved(store, path)
    path.write_bytes(image(b"other"))
    os.utime(path, ns=(1, 1))
    after = resolved(store, path)
    assert after.key != before.key
    assert [site.name for site in after.parsed.sites] == ["other"]
    # arming the earlier one's sites might corrupt what is at these places now
    with pytest.raises(ObjectGoneError):
        open_object(before, [(PID, mapping_of(path))], parse_here, LOCAL)
    path.write_bytes(b"no ELF any more")
    with pytest.raises(ObjectGoneError):
        open_object(after, [(PID, mapping_of(path))], parse_here, LOCAL)


def test_descriptors_of_what_does_not_fit_are_closed(store: ObjectStore, path: Path, tmp_path: Path) -> None:
    found = resolved(store, path)
    other = tmp_path / "other"
    other.write_bytes(image(b"probe"))
    gone = structs.replace(mapping_of(path), path=str(tmp_path / "gone"))
    before = descriptors(os.getpid())
    with pytest.raises(ObjectGoneError):
        open_object(found, [(PID, mapping_of(other)), (2**22 + 1, gone)], parse_here, LOCAL)
    assert descriptors(os.getpid()) == before


def test_object_without_a_name_is_forgotten_with_its_last_process(path: Path) -> None:
    parser, files = CountingParser(), made_files()
    store = made_store(parser, files)
    found = resolved(store, path)
    store.unmapped(found)
    assert resolved(store, path) == found
    assert len(parser.inodes) == 1
    memfd = os.memfd_create("app")
    os.write(memfd, path.read_bytes())
    status = os.fstat(memfd)
    mapping = structs.replace(mapping_of(path), dev=status.st_dev, inode=status.st_ino, path="/memfd:app (deleted)")
    nameless = store.resolve(PID, mapping)
    assert nameless is not None
    assert files.get(nameless.key) == nameless.parsed
    for _ in range(2):
        store.unmapped(nameless)
        assert files.get(nameless.key) is None
        assert files.object_of(nameless.key.file) is None
    assert files.get(found.key) == found.parsed
    assert store.resolve(PID, mapping) == nameless
    assert len(parser.inodes) == 3
    os.close(memfd)


def test_objects_of_one_process_that_take_more_room_than_there_is_are_kept_while_it_maps_them(tmp_path: Path) -> None:
    parser = CountingParser()
    store = made_store(parser, made_files(CacheBounds(idle_bytes=1000)))
    paths = [tmp_path / f"app{number}" for number in range(3)]
    for path in paths:
        path.write_bytes(image(b"probe"))
    # the registry is told of them when all are known
    for found in [resolved(store, path) for path in paths]:
        store.mapped(found)
    before = len(parser.inodes)
    for path in paths:
        found = resolved(store, path)
        os.utime(path, ns=(1, 1))
        assert resolved(store, path) == found
    assert before == 3
    # what was touched is looked into once
    assert len(parser.inodes) == 6


def test_replaced_and_deleted_files_are_forgotten_as_others_come(tmp_path: Path) -> None:
    files = made_files(CacheBounds(unchecked=4))
    store = made_store(files=files)
    path = tmp_path / "app"
    found: list[Object] = []
    for number in range(50):
        path.with_name("new").write_bytes(image(b"probe"))
        path.with_name("new").rename(path)
        found.append(resolved(store, path))
        other = tmp_path / f"other{number % 2}"
        other.unlink(missing_ok=True)
        other.write_bytes(image(b"probe"))
        found.append(resolved(store, other))
    assert len({obj.key for obj in found if files.get(obj.key)}) < 10
    again = resolved(store, path)
    for _ in range(10):
        store.mapped(again)
        store.unmapped(again)
        again = resolved(store, path)
    assert files.get(again.key) == again.parsed


def test_memory_is_bounded(tmp_path: Path) -> None:
    # a file counts for 1,000 bytes, and a note for 400
    files = made_files(CacheBounds(idle_bytes=3 * 1400))
    store = made_store(files=files)
    found: list[Object] = []
    for number in range(10):
        path = tmp_path / f"app{number}"
        path.write_bytes(image(b"probe"))
        found.append(resolved(store, path))
    assert [obj.path for obj in found if files.get(obj.key)] == [obj.path for obj in found[7:]]
    assert [obj.path for obj in found if files.object_of(obj.key.file)] == [obj.path for obj in found[7:]]
