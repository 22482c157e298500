"""From a mapping to the object behind it: its file is reached through /proc, and parsed once as long as it stays the
same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec import structs

from stapsdtd.errors import ObjectForeignError, ObjectGoneError, ObjectPendingError, ObjectUnreadableError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.inodes import ProcessInodes
from stapsdtd.kernel.reach import status_of
from stapsdtd.model import Mapping, Object, ObjectKey, ParsedObject
from stapsdtd.procs.budgets import NOBODY, user_of
from stapsdtd.procs.file_keys import identify_mapped, identify_open, open_now
from stapsdtd.procs.parsed_files import ParsedFiles

_log = logging.getLogger(__name__)

_NOTHING = ParsedObject("", None, (), ())
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


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

    def close(self) -> None:
        """Stop copying, and close all copies."""


@dataclass(frozen=True, slots=True)
class Copy:
    """descriptor: the copy's, owned by Copies. key: the copied file's."""

    descriptor: int
    key: ObjectKey


class ObjectStore:
    """Resolves mappings. Each file is parsed once, as long as it stays in the cache."""

    def __init__(self, parse: Parse, filesystems: Filesystems, copies: Copies, files: ParsedFiles) -> None:
        self._parse_file = parse
        self._filesystems = filesystems
        self._copies = copies
        self._files = files

    def close(self) -> None:
        self._copies.close()

    def recall(self, dev: int, inode: int, path: str) -> Object | None:
        """Return what `resolve` would for a cached file that has this path here too and has not changed.

        path: empty where the kernel does not tell it, so that one which led to the file before stands in.

        Raises KeyError if the file must be resolved.
        """
        key = self._files.object_of((dev, inode, 0))
        if key is None:
            raise KeyError(path)
        path = path or self._files.path_of(key)
        try:
            status = self._filesystems.status_at(path)
        except OSError:
            raise KeyError(path) from None
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != (dev, inode, key.size, key.mtime_ns):
            raise KeyError(path)
        parsed = self._files.get(key)
        if parsed is None:
            raise KeyError(path)
        return _object(key, path, parsed)

    def owner_of(self, path: str) -> int:
        """Return whose a file is, as this process sees it; NOBODY if it cannot be known."""
        try:
            return self._filesystems.status_at(path).st_uid
        except OSError:
            return NOBODY

    def inodes_of(self, pid: int) -> ProcessInodes:
        """Return the inodes that a process maps, for `resolve`. Its maps must have been read before."""
        return self._filesystems.inodes_of(pid)

    def resolve(self, pid: int, mapping: Mapping, inodes: ProcessInodes | None = None) -> Object | None:
        """Return the object that a process maps, or None if it has no notes. inodes: those of all of its mappings.

        Raises ObjectGoneError if it cannot be reached, OSError if this process is out of resources, and
        ObjectPendingError if it will be known later.
        """
        with contextlib.suppress(KeyError):
            return self.recall(mapping.dev, mapping.inode, mapping.path)
        inodes = inodes or self.inodes_of(pid)
        pid = inodes.thread
        for way in procfs.ways_to(pid, mapping):
            try:
                with self._filesystems.held(way) as descriptor:
                    found = identify_mapped(descriptor, mapping, way, inodes, self._filesystems)
                    if found is None:
                        continue
                    key = found.key
                    if self._filesystems.why_not(descriptor, pid, found.inode) is not None:
                        return self._resolve_copy(pid, mapping, key)
                    parsed = self._files.get(key)
                    if parsed is None:
                        parsed = self._parse(descriptor, pid, mapping, key)
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    raise
                continue
            if parsed is None:
                continue
            return _object(self._files.identify(key), mapping.path, parsed)
        raise ObjectGoneError(mapping.path)

    def _resolve_copy(self, pid: int, mapping: Mapping, seen: ObjectKey) -> Object | None:
        """Resolve a file that this process must not open. seen: from the kernel's cache, which may be out of date."""
        parsed = self._files.get(seen) if self._files.object_of(seen.file) == seen else None
        if parsed is None:
            user = user_of(pid)
            copy = self._copies.take(pid, user, mapping)
            seen = structs.replace(seen, size=copy.key.size, mtime_ns=copy.key.mtime_ns)
            try:
                parsed = self._parse_file(copy.descriptor, pid, user)
            except ObjectUnreadableError as error:
                _log.debug("%s: %s", mapping.path, error)
                parsed = _NOTHING
            self._copies.drop(copy)
            self._files.add(seen, parsed, mapping.path)
        return _object(self._files.identify(seen), mapping.path, parsed)

    def _parse(self, held: int, pid: int, mapping: Mapping, key: ObjectKey) -> ParsedObject | None:
        """Parse and cache a file; None if another one is open, such as its copy in an overlay's upper layer."""
        with open(f"/proc/self/fd/{held}", "rb", opener=open_now) as file:
            if identify_open(file.fileno(), pid, mapping.path, self._filesystems).key != key:
                return None
            is_unlinked = status_of(file.fileno()).st_nlink == 0
            try:
                parsed = self._parse_file(file.fileno(), pid)
            except ObjectUnreadableError as error:
                _log.debug("%s: %s", mapping.path, error)
                parsed = _NOTHING
        self._files.add(key, parsed, mapping.path, is_unlinked=is_unlinked)
        return parsed

    def object_of(self, key: ObjectKey, path: str, parsed: ParsedObject) -> Object:
        """Return the object of a file with notes that was parsed: the same as of a process that maps it."""
        self._files.add(key, parsed, path)
        return Object(self._files.identify(key), path, parsed)

    def mapped(self, obj: Object) -> None:
        """Keep an object while processes map it, or a client names it."""
        self._files.mapped(obj)

    def unmapped(self, obj: Object) -> None:
        """Let an object go that nobody maps or names any more."""
        self._files.unmapped(obj)


def _object(key: ObjectKey, path: str, parsed: ParsedObject) -> Object | None:
    return Object(key, path, parsed) if parsed.sites or parsed.problems else None


def open_object(obj: Object, mappings: Iterable[tuple[int, Mapping]], parse: Parse, filesystems: Filesystems) -> int:
    """Open the very file that was parsed, through any process that maps it. mappings: by pid.

    Raises ObjectGoneError, ObjectPendingError if it may be opened later, ObjectForeignError for a file that must not be
    armed, which is not opened, and OSError if there is no descriptor or no memory left.
    """
    is_pending = False
    for process, mapping in mappings:
        inodes = filesystems.inodes_of(process)
        pid = inodes.thread
        for way in procfs.ways_to(pid, mapping):
            try:
                with filesystems.held(way) as held:
                    found = identify_mapped(held, mapping, way, inodes, filesystems)
                    if found is None or found.key.file != obj.key.file:
                        continue
                    if reason := filesystems.why_not(held, pid, found.inode):
                        raise ObjectForeignError(reason)
                    descriptor = open_now(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
            except ObjectPendingError:
                is_pending = True
                continue
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    raise
                continue
            try:
                key = identify_open(descriptor, pid, mapping.path, filesystems).key
                if is_same(descriptor, key, obj, partial(parse, pid=pid)):
                    return descriptor
            except ObjectPendingError:
                is_pending = True
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise ObjectPendingError(obj.path) if is_pending else ObjectGoneError(obj.path)


def is_same(descriptor: int, key: ObjectKey, obj: Object, parse: Callable[[int], ParsedObject]) -> bool:
    """Report whether an open file is the object, with all probes where they were."""
    if key.file != obj.key.file:
        return False
    if key == obj.key:
        return True
    # touched or written to since
    try:
        return parse(descriptor) == obj.parsed
    except (ObjectUnreadableError, OSError):
        return False
