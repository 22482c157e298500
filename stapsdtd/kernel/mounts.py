"""Lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue

Who mounts chooses the names, in which nothing but blanks, tabs, newlines, backslashes and # is escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """device is as MAJOR:MINOR; root: what of the file system is mounted; options are the file system's own."""

    device: bytes
    root: bytes
    point: bytes
    kind: bytes
    options: bytes


def mounts(path: str = "/proc/self/mountinfo") -> list[Mount]:
    """Raises OSError."""
    with open(path, "rb") as file:
        # splitlines would find many more ends of lines
        lines = file.read().split(b"\n")
    return [_mount(line) for line in lines if line]


def _mount(line: bytes) -> Mount:
    fields = line.split(b" ")
    kind, _, options = fields[fields.index(b"-", 6) + 1 :][:3]
    return Mount(fields[2], _plain(fields[3]), _plain(fields[4]), kind, _plain(options))


def _plain(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), field)
