"""Watches armed files for writes.

The kernel identifies a probe by inode and offset alone, so code written there later gets the old code's breakpoint.
A file that replaces another by rename is another inode, and no concern.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from stapsdtd.kernel.inotify import Inotify
from stapsdtd.model import ObjectKey

_log = logging.getLogger(__name__)


class FileWriteWatcher:
    """Runs on an event loop; `armed` may be called in any thread.

    on_write: called with the files that were written to, each by the key that it had until then.
    """

    def __init__(self, on_write: Callable[[set[ObjectKey]], None]) -> None:
        self._on_write = on_write
        self._lock = threading.Lock()
        self._armed: Counter[ObjectKey] = Counter()
        self._watches: dict[ObjectKey, int] = {}
        # versions of one file share a watch
        self._keys: defaultdict[int, set[ObjectKey]] = defaultdict(set)
        self._loop = asyncio.get_running_loop()
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            _log.warning("a file that is rewritten in place is noticed some seconds later: %s", error)
            return
        self._loop.add_reader(self._inotify.fileno(), self._read)

    def armed(self, key: ObjectKey, path: str | None) -> None:
        """Watch a file. path: opens it in this process, during the call; None if nothing of it is armed."""
        with self._lock:
            self._armed[key] += 1
            if path is None or self._inotify is None or key in self._watches:
                return
            try:
                watch = self._watches[key] = self._inotify.add(path)
                self._keys[watch].add(key)
            except OSError as error:
                _log.debug("a file is not watched: %s", error)

    def disarmed(self, key: ObjectKey) -> None:
        """Undo one call of armed()."""
        with self._lock:
            self._armed[key] -= 1
            if self._armed[key]:
                return
            del self._armed[key]
            watch = self._watches.pop(key, None)
            if self._inotify is None or watch is None:
                return
            self._keys[watch].remove(key)
            if not self._keys[watch]:
                del self._keys[watch]
                self._inotify.remove(watch)

    def close(self) -> None:
        with self._lock:
            if self._inotify is not None:
                self._loop.remove_reader(self._inotify.fileno())
                self._inotify.close()
                self._inotify = None

    def _read(self) -> None:
        if self._inotify is None:
            return
        with self._lock:
            watches = self._inotify.read()
            affected = self._keys.keys() if watches is None else watches & self._keys.keys()
            written = {key for watch in affected for key in self._keys[watch]}
        if written:
            self._on_write(written)
