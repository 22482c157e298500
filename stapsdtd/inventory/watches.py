"""Watches directories with installed files, and those that packages come into."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from stapsdtd.inventory.walk import Directory, Watched
from stapsdtd.kernel.inotify import ENTRIES, Inotify

_log = logging.getLogger(__name__)

MAX_WATCHES = 8192
"""Each takes some 2 KB of the kernel's memory: the watch, and the directory's inode."""


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    is_any_owner: bool


class DirectoryWatches:
    """Used by one thread. fileno: readable when directories have changed. Raises OSError if inotify is not to be had.

    has_all: whether all that is worth watching is watched.
    """

    def __init__(self, max_watches: int = MAX_WATCHES) -> None:
        self._inotify = Inotify(ENTRIES)
        self._max_watches = max_watches
        self._places: dict[int, _Place] = {}
        self.has_all = True

    def fileno(self) -> int:
        return self._inotify.fileno()

    def add(self, directory: Watched) -> Directory | None:
        """Watch a directory. Return what to look at again, if it changed since it was looked at."""
        if len(self._places) >= self._max_watches:
            self._miss(f"{self._max_watches} directories are watched")
            return None
        link = f"/proc/self/fd/{directory.descriptor}"
        try:
            watch = self._inotify.add(link)
        except OSError as error:
            self._miss(str(error))
            return None
        is_new = watch not in self._places
        self._places[watch] = _Place(directory.path, directory.is_any_owner)
        if is_new and os.fstat(directory.descriptor).st_mtime_ns != directory.mtime_ns:
            return Directory(directory.path, is_deep=False, is_any_owner=directory.is_any_owner)
        return None

    def _miss(self, why: str) -> None:
        if self.has_all:
            self.has_all = False
            _log.warning("%s; what is installed in others is noticed with the next scan", why)

    def changed(self) -> set[Directory] | None:
        """Return what to look at, since the last call; None if that is everything."""
        events = self._inotify.events()
        if events is None:
            return None
        directories: set[Directory] = set()
        for event in events:
            if event.is_over:
                self._places.pop(event.watch, None)
            elif place := self._places.get(event.watch):
                directories.add(Directory(place.path, is_deep=False, is_any_owner=place.is_any_owner))
                if event.is_directory and event.name:
                    path = f"{place.path.rstrip('/')}/{event.name}"
                    directories.add(Directory(path, is_deep=True, is_any_owner=place.is_any_owner))
        return directories

    def close(self) -> None:
        self._inotify.close()
