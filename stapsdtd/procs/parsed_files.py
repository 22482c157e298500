"""Caches what was parsed: objects while they are mapped; other files, those without probes too, within a bound of
memory and while their paths lead to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from stapsdtd.model import FileId, Object, ObjectKey, ParsedObject

_FILE_BYTES = 1000
_NOTE_BYTES = 400
"""What a file and each of its notes take: rough estimates."""

_CHECKS = 2
"""How many idle files are checked for each new one."""


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Of idle files, which have no probes or which no process maps.

    idle_bytes: what they may take together, by default some 4,000. unchecked: the latest, which may not have been
    mapped yet, and are not checked.
    """

    idle_bytes: int = 4 << 20
    unchecked: int = 64


DEFAULT_BOUNDS = CacheBounds()


class ParsedFiles:
    """Knows each file by its key, and the object of each inode."""

    def __init__(self, may_lead_to: Callable[[ObjectKey, str], bool], bounds: CacheBounds = DEFAULT_BOUNDS) -> None:
        """may_lead_to: reports whether a path may still lead to a file."""
        self._may_lead_to = may_lead_to
        self._bounds = bounds
        self._parsed: dict[ObjectKey, ParsedObject] = {}
        self._objects: dict[FileId, ObjectKey] = {}
        self._unlinked: set[ObjectKey] = set()
        # by path, the least recently used first
        self._idle: OrderedDict[ObjectKey, str] = OrderedDict()
        self._idle_bytes = 0
        self._to_check: OrderedDict[ObjectKey, None] = OrderedDict()

    def object_of(self, file: FileId) -> ObjectKey | None:
        """Return the key of an inode's object."""
        return self._objects.get(file)

    def path_of(self, key: ObjectKey) -> str:
        """Return a path that led to an idle file, as all without probes are; empty for others."""
        return self._idle.get(key, "")

    def get(self, key: ObjectKey) -> ParsedObject | None:
        """Return a cached file; of the idle ones, it is forgotten last."""
        if key in self._idle:
            self._idle.move_to_end(key)
        return self._parsed.get(key)

    def add(self, key: ObjectKey, parsed: ParsedObject, path: str, *, is_unlinked: bool = False) -> None:
        """Cache a file, and forget others if it needs their room. is_unlinked: it has no name, like a memfd."""
        if self.get(key) is not None:
            return
        for _ in range(_CHECKS):
            if len(self._to_check) > self._bounds.unchecked:
                self._check(self._to_check.popitem(last=False)[0])
        self._parsed[key] = parsed
        if is_unlinked:
            self._unlinked.add(key)
        self._set_idle(key, path)
        while self._idle_bytes > self._bounds.idle_bytes and len(self._idle) > 1:
            self._forget(next(iter(self._idle)))

    def _check(self, key: ObjectKey) -> None:
        """Forget an idle file that was deleted or replaced, or that can only be reached through a process."""
        if self._may_lead_to(key, self._idle[key]):
            self._to_check[key] = None
        else:
            self._forget(key)

    def identify(self, key: ObjectKey) -> ObjectKey:
        """Return the key of a cached file's object: the earlier one if a mapped file was touched but has the same
        probes.

        The kernel arms the inode, so that two objects of one file would report each event twice. If nobody maps the
        earlier one, this may be another file with the inode of a deleted one.
        """
        parsed = self._parsed[key]
        earlier = self._objects.get(key.file)
        is_mapped = earlier is not None and earlier in self._parsed and earlier not in self._idle
        if earlier is not None and is_mapped and self._parsed[earlier] == parsed and (parsed.sites or parsed.problems):
            return earlier
        if earlier is not None and earlier != key and earlier in self._parsed:
            self._forget(earlier)
        self._objects[key.file] = key
        return key

    def mapped(self, obj: Object) -> None:
        """Keep an object while processes map it: parsing it again for each of them would cost more than its memory."""
        key = obj.key
        self._unset_idle(key)
        # it may have had to go already, if its process maps many others
        self._parsed.setdefault(key, obj.parsed)
        self._objects.setdefault(key.file, key)

    def unmapped(self, obj: Object) -> None:
        """Let an object go that nobody maps any more; at once if it had no name when it was parsed, like a memfd."""
        key = obj.key
        if key not in self._parsed:
            return
        if key in self._unlinked:
            self._forget(key)
        elif key not in self._idle:
            self._set_idle(key, obj.path)

    def _set_idle(self, key: ObjectKey, path: str) -> None:
        self._idle[key] = path
        self._idle_bytes += _bytes_of(self._parsed[key])
        self._to_check[key] = None

    def _unset_idle(self, key: ObjectKey) -> None:
        if self._idle.pop(key, None) is not None:
            self._idle_bytes -= _bytes_of(self._parsed[key])
            self._to_check.pop(key, None)

    def _forget(self, key: ObjectKey) -> None:
        self._unset_idle(key)
        self._unlinked.discard(key)
        del self._parsed[key]
        if self._objects.get(key.file) == key:
            del self._objects[key.file]


def _bytes_of(parsed: ParsedObject) -> int:
    return _FILE_BYTES + _NOTE_BYTES * (len(parsed.sites) + len(parsed.problems))
