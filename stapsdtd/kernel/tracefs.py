"""tracefs: uprobe definitions, instances and their files (Documentation/trace/uprobetracer.rst, ftrace.rst).

p:GROUP/EVENT PATH:0xOFFSET(0xREFCTR) name=fetch:type …     a line of uprobe_events
"""

from __future__ import annotations

import os
import re

from stapsdtd.errors import KernelFeatureError, TracefsRejectedError
from stapsdtd.kernel.mounts import mounts

_REMEDY = "run 'mount -t tracefs nodev /sys/kernel/tracing' as root"


class Tracefs:
    """One mounted tracefs; paths given to its methods are relative to the mount point."""

    def __init__(self, root: str) -> None:
        self.root = root

    @classmethod
    def locate(cls) -> Tracefs:
        """Raise KernelFeatureError where tracefs is not mounted or may not be read."""
        roots = [os.fsdecode(mount.point) for mount in mounts() if mount.kind == b"tracefs"]
        if not roots:
            raise KernelFeatureError("tracefs", "it is not mounted", _REMEDY)
        # the mount under debugfs is automatic and of the same content; the proper one is preferred
        root = min(roots, key=lambda path: path != "/sys/kernel/tracing")
        if not os.access(os.path.join(root, "uprobe_events"), os.R_OK | os.W_OK):
            raise KernelFeatureError(
                "tracefs",
                f"{root}/uprobe_events may not be written",
                "run as root, on a kernel with CONFIG_UPROBE_EVENTS",
            )
        return cls(root)

    def problem(self) -> str | None:
        """Answer why no probe can be armed here now; None where one can."""
        path = self.path("uprobe_events")
        try:
            # as to arm one; without O_APPEND all that there are would be removed
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        except OSError as error:
            return f"{path} cannot be written: {error.strerror or error}"
        return None

    def path(self, relative: str) -> str:
        return f"{self.root}/{relative}"

    def read(self, relative: str) -> str:
        with open(self.path(relative), encoding="utf-8", errors="backslashreplace") as file:
            return file.read()

    def write(self, relative: str, text: str) -> None:
        """Raise TracefsRejectedError with error_log's explanation where the kernel refuses."""
        self._write(relative, text, os.O_WRONLY)

    def append(self, relative: str, text: str) -> None:
        """Add to a file that holds a list; opened without O_APPEND, such a file is emptied first."""
        self._write(relative, text + "\n", os.O_WRONLY | os.O_APPEND)

    def append_definition(self, line: str) -> None:
        """Add or remove one uprobe definition, and nobody else's."""
        self.append("uprobe_events", line)

    def _write(self, relative: str, text: str, flags: int) -> None:
        try:
            descriptor = os.open(self.path(relative), flags | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            line = text.strip()
            raise TracefsRejectedError(relative, line, error.errno or 0, self._explanation(line)) from error

    def _explanation(self, line: str) -> str:
        """error_log's newest entry if it is about this line:

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
        """Make a ring buffer with event switches of its own, under instances/NAME."""
        try:
            os.mkdir(self.path(f"instances/{name}"), 0o700)
        except OSError as error:
            raise TracefsRejectedError("instances", f"mkdir {name}", error.errno or 0, "") from error

    def remove_instance(self, name: str) -> None:
        try:
            os.rmdir(self.path(f"instances/{name}"))
        except OSError as error:
            raise TracefsRejectedError("instances", f"rmdir {name}", error.errno or 0, "") from error

    def instances(self) -> list[str]:
        return os.listdir(self.path("instances"))

    def events(self, group: str) -> list[str]:
        """Name the events of a group; none where the group does not exist."""
        return [event for found, event in self.uprobe_events() if found == group]

    def uprobe_events(self) -> list[tuple[str, str]]:
        """(group, event) of every uprobe event on the host, each once, in the order of their definition."""
        return list(dict.fromkeys(re.findall(r"^[pr][^:]*:([^/\s]+)/(\S+)", self.read("uprobe_events"), re.MULTILINE)))
