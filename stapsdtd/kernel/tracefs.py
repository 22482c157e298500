"""tracefs: uprobe definitions, instances and their files (Documentation/trace/uprobetracer.rst, ftrace.rst).

p:GROUP/EVENT PATH:0xOFFSET(0xREFCTR) name=fetch:type …     a line of uprobe_events
"""

from __future__ import annotations

import os
import re

from stapsdtd.errors import KernelFeatureError, TracefsRejectedError
from stapsdtd.kernel.host_calls import TRACEFS_READ, TRACEFS_WRITE, host_call
from stapsdtd.kernel.mounts import mounts
from stapsdtd.kernel.places import KPROBE_EVENTS, UPROBE_EVENTS

_REMEDY = "run 'mount -t tracefs nodev /sys/kernel/tracing' as root"


class Tracefs:
    """A mounted tracefs. Paths given to its methods are relative to the mount point."""

    def __init__(self, root: str) -> None:
        self.root = root

    @classmethod
    def locate(cls) -> Tracefs:
        """Find the mounted tracefs. Raises KernelFeatureError if there is none or it is not writable."""
        roots = [os.fsdecode(mount.point) for mount in mounts() if mount.kind == b"tracefs"]
        if not roots:
            raise KernelFeatureError("tracefs", "it is not mounted", _REMEDY)
        # prefer the canonical mount to the automatic one under debugfs, which has the same contents
        root = min(roots, key=lambda path: path != "/sys/kernel/tracing")
        if not os.access(os.path.join(root, "uprobe_events"), os.R_OK | os.W_OK):
            raise KernelFeatureError(
                "tracefs",
                f"{root}/uprobe_events is not writable",
                "run as root, on a kernel with CONFIG_UPROBE_EVENTS",
            )
        return cls(root)

    def problem(self) -> str | None:
        """Return why no probe can be armed at present; None if one can."""
        path = self.path("uprobe_events")
        try:
            # opened as for arming; without O_APPEND this would remove every event
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        except OSError as error:
            return str(TRACEFS_WRITE.of(error, path))
        return None

    def path(self, relative: str) -> str:
        return f"{self.root}/{relative}"

    def read(self, relative: str) -> str:
        """Raises OSError."""
        path = self.path(relative)
        with host_call(TRACEFS_READ, path), open(path, encoding="utf-8", errors="backslashreplace") as file:
            return file.read()

    def write(self, relative: str, text: str) -> None:
        """Raises TracefsRejectedError, with error_log's explanation, if the kernel rejects the text."""
        self._write(relative, text, os.O_WRONLY)

    def append(self, relative: str, text: str) -> None:
        """Append a line to a file that holds a list; opening such a file without O_APPEND would empty it."""
        self._write(relative, text + "\n", os.O_WRONLY | os.O_APPEND)

    def append_definition(self, line: str, events_file: str = UPROBE_EVENTS) -> None:
        """Add or remove one definition, leaving all others alone. events_file: of its kind, see `kernel.places`."""
        self.append(events_file, line)

    def _write(self, relative: str, text: str, flags: int) -> None:
        try:
            descriptor = os.open(self.path(relative), flags | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            line = text.strip()
            raise _rejected(relative, line, error, self._explanation(line)) from error

    def _explanation(self, line: str) -> str:
        """Return the message of error_log's newest entry if it is about this line:

        [  579.123] trace_uprobe: error: Invalid argument
          Command: p:g/e /bin/true:0x10
                                   ^
        """
        try:
            entries = re.findall(r"error: (.*)\n\s+Command: (.*)\n", self.read("error_log"))
        except OSError:
            return ""
        if entries and entries[-1][1].strip() == line:
            return str(entries[-1][0])
        return ""

    def make_instance(self, name: str) -> None:
        """Create instances/NAME, with its own ring buffer and event switches."""
        try:
            os.mkdir(self.path(f"instances/{name}"), 0o700)
        except OSError as error:
            raise _rejected("instances", f"mkdir {name}", error) from error

    def remove_instance(self, name: str) -> None:
        try:
            os.rmdir(self.path(f"instances/{name}"))
        except OSError as error:
            raise _rejected("instances", f"rmdir {name}", error) from error

    def instances(self) -> list[str]:
        with host_call(TRACEFS_READ):
            return os.listdir(self.path("instances"))

    def events(self, group: str) -> list[str]:
        """Return the names of a group's events; none if there is no such group."""
        return [event for its_group, event in self.uprobe_events() if its_group == group]

    def uprobe_events(self) -> list[tuple[str, str]]:
        """Return (group, event) of every uprobe event on the host, without duplicates, in order of definition."""
        return self._defined(UPROBE_EVENTS)

    def kprobe_events(self) -> list[tuple[str, str]]:
        """As uprobe_events, of events on kernel functions; none where the kernel has no kprobes."""
        return self._defined(KPROBE_EVENTS) if os.path.exists(self.path(KPROBE_EVENTS)) else []

    def _defined(self, events_file: str) -> list[tuple[str, str]]:
        return list(dict.fromkeys(re.findall(r"^[pr][^:]*:([^/\s]+)/(\S+)", self.read(events_file), re.MULTILINE)))


def _rejected(path: str, line: str, error: OSError, kernel_message: str = "") -> TracefsRejectedError:
    number = error.errno or 0
    return TracefsRejectedError(path, line, number, kernel_message, TRACEFS_WRITE.remedy(number))
