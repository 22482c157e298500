"""Names that say whose a tracefs event or instance is.

    stapsdtd_4026531836_4711_57590/e12      pid namespace, pid and start time of the daemon that made it
    instances/stapsdtd_4026531836_4711_57590_3

What belongs to a process that lives no more was left by a killed daemon and may be removed. What belongs to
another pid namespace cannot be judged from here and is left alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from stapsdtd.kernel import procfs

_NAME = re.compile(r"stapsdtd_(\d+)_(\d+)_(\d+)(?:_(\d+))?")


@dataclass(frozen=True, slots=True)
class Owner:
    """A daemon process."""

    pid_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def this_process(cls) -> Owner:
        stat = procfs.stat(os.getpid())
        if stat is None:
            raise RuntimeError("/proc/self/stat cannot be read: is /proc mounted?")
        return cls(procfs.pid_namespace(), stat.key.pid, stat.key.start_ticks)

    @classmethod
    def of(cls, name: str) -> Owner | None:
        """Return whose a group or instance is; None where it is not a daemon's of this project."""
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups()[:3])) if found else None

    @property
    def group(self) -> str:
        return f"stapsdtd_{self.pid_namespace}_{self.pid}_{self.start_ticks}"

    def instance(self, number: int) -> str:
        return f"{self.group}_{number}"

    def is_dead(self) -> bool:
        """Report whether the daemon is certainly no more."""
        if self.pid_namespace != procfs.pid_namespace():
            return False
        stat = procfs.stat(self.pid)
        return stat is None or stat.key.start_ticks != self.start_ticks
