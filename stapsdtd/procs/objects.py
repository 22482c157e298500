"""From a mapping to the object behind it: reached through /proc, and parsed once as long as the file stays the same."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stapsdtd.errors import ObjectForeignError, ObjectGoneError, ObjectPendingError, ObjectUnreadableError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.overlays import real_file
from stapsdtd.kernel.reach import FileStatus, status_of
from stapsdtd.model import Mapping, Object, ObjectKey, ParsedObject
from stapsdtd.procs.budgets import user_of

_log = logging.getLogger(__name__)

_IDLE_BYTES = 4 << 20
"""Of files that have no probes, or that no process maps: some 4,000."""
_FILE_BYTES = 1000
_NOTE_BYTES = 400
"""Rough estimates."""
_CHECKS = 2
"""How many idle files are checked for each new one, ..."""
_UNMAPPED_YET = 64
"""... except that many of the latest, which may not have been mapped yet."""

_FIRST_PROCESS = 1
_NOTHING = ParsedObject("", None, (), ())
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Parse(Protocol):
    """Parses the ELF file open at a descriptor.

    Raises ObjectUnreadableError, OSError if trying again may help, and ObjectPendingError if it takes a while, after
    which the same call returns.
    """

    def __call__(self, descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        """pid: a process that maps it. owner: the uid that it counts for, by default the file's."""


class Copies(Protocol):
    """Copies of files whose file systems may not reply; see `procs.copies`."""

    def take(self, pid: int, user: int, mapping: Mapping) -> Copy:
        """Return a file's copy. Raises ObjectPendingError until there is one, ObjectGoneError if there will be none."""

    def drop(self, copy: Copy) -> None:
        """Close a copy that is not needed any more."""


@dataclass(frozen=True, slots=True)
class Copy:
    """descriptor: the copy's, owned by Copies. key: the copied file's."""

    descriptor: int
    key: ObjectKey


class ObjectStore:
    """Caches parsed files: objects while they are mapped; other files, those without probes too, within a bound of
    memory and while their paths lead to them.
    """

    def __init__(
        self,
        parse: Parse,
        filesystems: Filesystems,
        copies: Copies,
    ) -> None:
        self._parse_file = parse
        self._filesystems = filesystems
        self._copies = copies
        self._parsed: dict[ObjectKey, ParsedObject] = {}
        self._identities: dict[tuple[int, int], ObjectKey] = {}
        self._unlinked: set[ObjectKey] = set()
        # by path, the least recently used first
        self._idle: OrderedDict[ObjectKey, str] = OrderedDict()
        self._idle_bytes = 0
        self._to_check: OrderedDict[ObjectKey, None] = OrderedDict()

    def recall(self, dev: int, inode: int, path: str) -> Object | None:
        """Return what `resolve` would for a cached file that has this path here too and has not changed.

        Raises KeyError if the file must be resolved.
        """
        key = self._identities[dev, inode]
        try:
            status = self._filesystems.status_at(path)
        except OSError:
            raise KeyError(path) from None
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != (dev, inode, key.size, key.mtime_ns):
            raise KeyError(path)
        parsed = self._parsed[key]
        self._used(key)
        return _object(key, path, parsed)

    def resolve(self, pid: int, mapping: Mapping) -> Object | None:
        """Return the object that a process maps, or None if it has no notes.

        Raises ObjectGoneError if it cannot be reached, OSError if this process is out of resources, and
        ObjectPendingError if it will be known later.
        """
        with contextlib.suppress(KeyError):
            return self.recall(mapping.dev, mapping.inode, mapping.path)
        for way in procfs.ways_to(pid, mapping):
            try:
                with self._filesystems.held(way) as descriptor:
                    key = _key(descriptor, pid, mapping, way)
                    if key is None:
                        continue
                    if self._filesystems.why_not(descriptor, pid) is not None:
                        return self._resolve_copy(pid, mapping, key)
                    parsed = self._parsed.get(key)
                    if parsed is None:
                        parsed = self._parse(descriptor, pid, mapping, key, way)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    raise
                continue
            if parsed is None:
                continue
            self._remember(key, parsed, mapping.path)
            return _object(self._identity(key, parsed), mapping.path, parsed)
        raise ObjectGoneError(mapping.path)

    def _resolve_copy(self, pid: int, mapping: Mapping, seen: ObjectKey) -> Object | None:
        """Resolve a file that this process must not open. seen: from the kernel's cache, which may be out of date."""
        earlier = self._identities.get((seen.dev, seen.inode))
        parsed = self._parsed.get(earlier) if earlier == seen else None
        if parsed is None:
            user = user_of(pid)
            copy = self._copies.take(pid, user, mapping)
            seen = copy.key
            try:
                parsed = self._parse_file(copy.descriptor, pid, user)
            except ObjectUnreadableError as error:
                _log.debug("%s: %s", mapping.path, error)
                parsed = _NOTHING
            self._copies.drop(copy)
        self._remember(seen, parsed, mapping.path)
        return _object(self._identity(seen, parsed), mapping.path, parsed)

    def _remember(self, key: ObjectKey, parsed: ParsedObject, path: str) -> None:
        if key in self._parsed:
            self._used(key)
            return
        for _ in range(_CHECKS):
            # not the latest, which are about to be mapped
            if len(self._to_check) > _UNMAPPED_YET:
                self._check(self._to_check.popitem(last=False)[0])
        self._parsed[key] = parsed
        self._set_idle(key, path)
        while self._idle_bytes > _IDLE_BYTES and len(self._idle) > 1:
            self._forget(next(iter(self._idle)))

    def _used(self, key: ObjectKey) -> None:
        if key in self._idle:
            self._idle.move_to_end(key)

    def _set_idle(self, key: ObjectKey, path: str) -> None:
        self._idle[key] = path
        self._idle_bytes += _bytes_of(self._parsed[key])
        self._to_check[key] = None

    def _check(self, key: ObjectKey) -> None:
        """Forget an idle file that was deleted or replaced, or that can only be reached through a process."""
        path = self._idle.get(key)
        if path is None:
            return
        keys = list(_keys_at(path, self._filesystems))
        if key in keys or None in keys:
            self._to_check[key] = None
        else:
            self._forget(key)

    def mapped(self, obj: Object) -> None:
        """Keep an object while processes map it: parsing it again for each of them would cost more than its memory."""
        key = obj.key
        if self._idle.pop(key, None) is not None:
            self._idle_bytes -= _bytes_of(obj.parsed)
            self._to_check.pop(key, None)
        # it may have had to go already, if its process maps many others
        self._parsed.setdefault(key, obj.parsed)
        self._identities.setdefault((key.dev, key.inode), key)

    def unmapped(self, obj: Object) -> None:
        """Let an object go that nobody maps any more; at once if it had no name when it was parsed, like a memfd."""
        key = obj.key
        if key not in self._parsed:
            return
        if key in self._unlinked:
            self._forget(key)
        elif key not in self._idle:
            self._set_idle(key, obj.path)

    def _forget(self, key: ObjectKey) -> None:
        self._unlinked.discard(key)
        parsed = self._parsed.pop(key)
        if self._idle.pop(key, None) is not None:
            self._idle_bytes -= _bytes_of(parsed)
            self._to_check.pop(key, None)
        if self._identities.get((key.dev, key.inode)) == key:
            del self._identities[key.dev, key.inode]

    def _identity(self, key: ObjectKey, parsed: ParsedObject) -> ObjectKey:
        """Return the key of the file's object: the earlier one if a mapped file was touched but has the same probes.

        The kernel arms the inode, so that two objects of one file would report each event twice. If nobody maps the
        earlier one, this may be another file with the inode of a deleted one.
        """
        earlier = self._identities.get((key.dev, key.inode))
        is_mapped = earlier is not None and earlier in self._parsed and earlier not in self._idle
        if earlier is not None and is_mapped and self._parsed[earlier] == parsed and (parsed.sites or parsed.problems):
            return earlier
        if earlier is not None and earlier != key and earlier in self._parsed:
            self._forget(earlier)
        self._identities[key.dev, key.inode] = key
        return key

    def _parse(self, held: int, pid: int, mapping: Mapping, key: ObjectKey, way: str) -> ParsedObject | None:
        with open(f"/proc/self/fd/{held}", "rb", opener=_open_now) as file:
            if _key(file.fileno(), pid, mapping, way) != key:
                return None
            if status_of(file.fileno()).st_nlink == 0:
                self._unlinked.add(key)
            try:
                return self._parse_file(file.fileno(), pid)
            except ObjectUnreadableError as error:
                _log.debug("%s: %s", mapping.path, error)
                return _NOTHING


def _object(key: ObjectKey, path: str, parsed: ParsedObject) -> Object | None:
    return Object(key, path, parsed) if parsed.sites or parsed.problems else None


def _bytes_of(parsed: ParsedObject) -> int:
    return _FILE_BYTES + _NOTE_BYTES * (len(parsed.sites) + len(parsed.problems))


def open_object(obj: Object, mappings: Iterable[tuple[int, Mapping]], parse: Parse, filesystems: Filesystems) -> int:
    """Open the very file that was parsed, through any process that maps it. mappings: by pid.

    Raises ObjectGoneError, ObjectPendingError if it may be opened later, and ObjectForeignError for a file that must
    not be armed, which is not opened.
    """
    is_pending = False
    for pid, mapping in mappings:
        for way in procfs.ways_to(pid, mapping):
            try:
                with filesystems.held(way) as held:
                    key = _key(held, pid, mapping, way)
                    if key is None or (key.dev, key.inode) != (obj.key.dev, obj.key.inode):
                        continue
                    if reason := filesystems.why_not(held, pid):
                        raise ObjectForeignError(reason)
                    descriptor = _open_now(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
            except ObjectPendingError:
                is_pending = True
                continue
            except OSError:
                continue
            key = _key(descriptor, pid, mapping, way)
            try:
                if _is_same(descriptor, key, obj, partial(parse, pid=pid)):
                    return descriptor
            except ObjectPendingError:
                is_pending = True
            os.close(descriptor)
    raise ObjectPendingError(obj.path) if is_pending else ObjectGoneError(obj.path)


def _is_same(descriptor: int, key: ObjectKey | None, obj: Object, parse: Callable[[int], ParsedObject]) -> bool:
    """Report whether an open file is the object, with all probes where they were."""
    if key is None or (key.dev, key.inode) != (obj.key.dev, obj.key.inode):
        return False
    if key == obj.key:
        return True
    # touched or written to since
    try:
        return parse(descriptor) == obj.parsed
    except (ObjectUnreadableError, OSError):
        return False


def _open_now(path: str, flags: int) -> int:
    """Open without blocking: a process may put a FIFO in a file's place, and opening that would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_host_file(obj: Object, filesystems: Filesystems) -> bool:
    """Report whether the object's path still leads to it, so that a later process may map it from there.

    A file that was written to meanwhile is another object, though it has the same inode.
    """
    return leads_to(obj, filesystems) is True


def leads_to(obj: Object, filesystems: Filesystems) -> bool | None:
    """Report what is_host_file does, or None if the kernel's cache of names does not know the path at the moment.

    That is so of most deleted files, and for an instant while something is mounted or renamed anywhere on the host.
    """
    keys = list(_keys_at(obj.path, filesystems))
    if obj.key in keys:
        return True
    return None if None in keys and not any(keys) else False


def was_written_to(obj: Object, filesystems: Filesystems) -> bool:
    """Report whether the object's path leads to the same file with other content."""
    file = obj.key.dev, obj.key.inode
    return any(key and key != obj.key and (key.dev, key.inode) == file for key in _keys_at(obj.path, filesystems))


def _keys_at(path: str, filesystems: Filesystems) -> Iterator[ObjectKey | None]:
    """Yield the keys of the files that a path leads to in this mount namespace and in the first process's, which no
    sandbox hides; None if that is not known at the moment.
    """
    for pid, root in (os.getpid(), ""), (_FIRST_PROCESS, f"/proc/{_FIRST_PROCESS}/root"):
        try:
            status = filesystems.status_at(f"{root}{path}")
        except (BlockingIOError, ObjectPendingError):
            yield None
        except OSError:
            continue
        else:
            yield _key_of(real_file(pid, path, status) or status)


def _key(descriptor: int, pid: int, mapping: Mapping, way: str) -> ObjectKey | None:
    """Return the key of the file that is open, or None if it is not the mapped one. A file of an overlay has its
    layer's.

    map_files leads to what is at these addresses now, which after an exec can be another file. Some file systems show
    another inode in maps than in stat (overlayfs before Linux 6.8), so there the path may do instead.
    """
    status = status_of(descriptor)
    if not status.is_regular:
        return None
    if "/map_files/" in way:
        is_mapped = status.st_ino == mapping.inode or procfs.shown_link(f"/proc/self/fd/{descriptor}") == mapping.path
    else:
        is_mapped = (status.st_dev, status.st_ino) == (mapping.dev, mapping.inode)
    return _key_of(real_file(pid, mapping.path, status) or status) if is_mapped else None


def _key_of(status: FileStatus) -> ObjectKey:
    return ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
