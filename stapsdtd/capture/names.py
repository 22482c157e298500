"""Names of tracefs events and instances, which tell the daemon that made them.

    stapsdtd_4026531836_4711_57590/e12      pid namespace, pid and start time of that daemon
    instances/stapsdtd_4026531836_4711_57590_3

Whatever belongs to a process that is gone was left by a killed daemon and may be removed. What belongs to another pid
namespace cannot be judged from here and is left alone.
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
        """Return the owner of a group or instance, or None if it was not made by a stapsdtd."""
        match = _NAME.fullmatch(name)
        return cls(*map(int, match.groups()[:3])) if match else None

    @property
    def group(self) -> str:
        return f"stapsdtd_{self.pid_namespace}_{self.pid}_{self.start_ticks}"

    def instance(self, serial: int) -> str:
        return f"{self.group}_{serial}"

    def is_dead(self) -> bool:
        """Report whether the daemon has certainly ended."""
        if self.pid_namespace != procfs.pid_namespace():
            return False
        stat = procfs.stat(self.pid)
        return stat is None or stat.key.start_ticks != self.start_ticks
