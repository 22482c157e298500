"""BPF programs that are loaded for some attachments alone, so that what the kernel counts for a program is theirs."""

from __future__ import annotations

import os
import re
import threading
from typing import Self

_SKIPPED = re.compile(r"^recursion_misses:\s*(\d+)$", re.MULTILINE)


class OwnProgram:
    """A program's descriptor, which is closed when nobody uses it any more. Any thread may use it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._users = 1
        self._told = 0
        # a descriptor that was closed may be another program's at once
        self._lock = threading.Lock()

    @property
    def users(self) -> int:
        return self._users

    def shared(self) -> Self:
        """Return this for one more user, which is to release it, too."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self.descriptor)

    def take_skipped(self) -> int:
        """Return for how many more hits the program did not run, since it or another one was running on that CPU.

        The kernel counts that for fentry and fexit, and since Linux 6.7 also for kprobes. 0 once it is closed.
        """
        with self._lock:
            if not self._users:
                return 0
            before, self._told = self._told, recursion_misses(self.descriptor)
            return self._told - before


def recursion_misses(program: int) -> int:
    """Return what the kernel has counted for a program since it was loaded. program: its descriptor."""
    with open(f"/proc/self/fdinfo/{program}", encoding="ascii") as file:
        found = _SKIPPED.search(file.read())
    return int(found[1]) if found else 0
