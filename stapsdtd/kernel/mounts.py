"""Lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue

Whoever mounts chooses the names, in which only spaces, tabs, newlines, backslashes and # are escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """id is unique on the host while the mount is referenced; device is MAJOR:MINOR; root is the path within the file
    system that is mounted; options are the file system's own.
    """

    id: int
    device: bytes
    root: bytes
    point: bytes
    kind: bytes
    source: bytes
    options: bytes


def mounts(path: str = "/proc/self/mountinfo") -> list[Mount]:
    """Raises OSError."""
    with open(path, "rb") as file:
        return parse(file.read())


def parse(text: bytes) -> list[Mount]:
    # bytes.splitlines would also split at \r
    return [_mount(line) for line in text.split(b"\n") if line]


def _mount(line: bytes) -> Mount:
    fields = line.split(b" ")
    kind, source, options = fields[fields.index(b"-", 6) + 1 :][:3]
    return Mount(
        int(fields[0]),
        fields[2],
        _unescape(fields[3]),
        _unescape(fields[4]),
        _unescape(kind),
        _unescape(source),
        _unescape(options),
    )


def _unescape(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), field)
