"""Armed files that somebody writes to.

The kernel knows a probe by its file and offset alone, so what is written there gets the breakpoint of what was there
before. Files that others take the place of by rename are no concern: those are other files.
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

    on_write: told which files were written to, each by the key that it had until then.
    """

    def __init__(self, on_write: Callable[[set[ObjectKey]], None]) -> None:
        self._on_write = on_write
        self._lock = threading.Lock()
        self._armed: Counter[ObjectKey] = Counter()
        self._numbers: dict[ObjectKey, int] = {}
        # versions of one file have one number
        self._keys: defaultdict[int, set[ObjectKey]] = defaultdict(set)
        self._loop = asyncio.get_running_loop()
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            _log.warning("inotify: %s; a file that is rewritten in place is noticed some seconds later", error)
            return
        self._loop.add_reader(self._inotify.fileno(), self._read)

    def armed(self, key: ObjectKey, path: str | None) -> None:
        """path: opens the file in this process; it need not live beyond the call. None where nothing of it is armed."""
        with self._lock:
            self._armed[key] += 1
            if path is None or self._inotify is None or key in self._numbers:
                return
            try:
                number = self._numbers[key] = self._inotify.add(path)
                self._keys[number].add(key)
            except OSError as error:
                _log.debug("a file cannot be watched: %s", error)

    def disarmed(self, key: ObjectKey) -> None:
        """Once for each time that it was armed."""
        with self._lock:
            self._armed[key] -= 1
            if self._armed[key]:
                return
            del self._armed[key]
            number = self._numbers.pop(key, None)
            if self._inotify is None or number is None:
                return
            self._keys[number].remove(key)
            if not self._keys[number]:
                del self._keys[number]
                self._inotify.remove(number)

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
            numbers = self._inotify.read()
            known = self._keys.keys() if numbers is None else numbers & self._keys.keys()
            written = {key for number in known for key in self._keys[number]}
        if written:
            self._on_write(written)
