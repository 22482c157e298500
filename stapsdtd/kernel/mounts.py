"""Lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)).

    36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue

Who mounts chooses the names, in which nothing but blanks, tabs, newlines, backslashes and # is escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """device is as MAJOR:MINOR; root: what of the file system is mounted; options are the file system's own.

    number: the mount's, unique on the host while anything holds it.
    """

    number: int
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
    # splitlines would find many more ends of lines
    return [_mount(line) for line in text.split(b"\n") if line]


def _mount(line: bytes) -> Mount:
    fields = line.split(b" ")
    kind, source, options = fields[fields.index(b"-", 6) + 1 :][:3]
    return Mount(
        int(fields[0]), fields[2], _plain(fields[3]), _plain(fields[4]), _plain(kind), _plain(source), _plain(options)
    )


def _plain(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), field)
