"""Lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue

Whoever mounts chooses the names, in which only spaces, tabs, newlines, backslashes and # are escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MOST_BYTES = 4 << 20
"""Some 30,000 mounts."""

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


def find(path: str, mount_id: int) -> Mount | None:
    """Return a mount by its id, None if the first _MOST_BYTES show none. Raises OSError.

    A user may mount 100,000 times in a namespace, of which parsing takes a second.
    """
    start, read = b"%d " % mount_id, 0
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(start):
                return _mount(line.rstrip(b"\n"))
            read += len(line)
            if read > _MOST_BYTES:
                break
    return None


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
