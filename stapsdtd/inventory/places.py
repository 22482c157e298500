"""Where programs and libraries are installed, and where none are to be looked for."""

from __future__ import annotations

import glob
import os
import re
from contextlib import suppress

from stapsdtd.inventory.walk import Directory
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.mounts import mounts

_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Of a login shell; see /etc/login.defs."""
_LIBRARIES = ("/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/libexec")
"""What the loader knows without a configuration, and where packages have programs and libraries of their own, such as
/usr/lib/jvm and /usr/lib/postgresql.
"""
_LEFT_OUT = ("/usr/lib/debug", "/usr/lib/firmware", "/usr/lib/modules")
"""Nothing in these is mapped by a process."""

_MAX_INCLUDES = 100
_INCLUDE = re.compile(r"\s*include\s+(\S+)")
_MOUNTS = ("/proc/self/mountinfo", "/proc/1/mountinfo")


def default_directories() -> tuple[Directory, ...]:
    libraries = dict.fromkeys((*_LIBRARIES, *_loader_directories("/etc/ld.so.conf")))
    return (*(Directory(path, is_deep=False) for path in _PATH), *map(Directory, libraries))


def _loader_directories(path: str) -> list[str]:
    """Return the directories that a configuration of the loader names (ldconfig(8)), those in its includes too."""
    files, directories = [path], list[str]()
    for _ in range(_MAX_INCLUDES):
        if not files:
            break
        with suppress(OSError, UnicodeDecodeError), open(files.pop(0), encoding="utf-8") as file:
            for line in file:
                text = line.partition("#")[0].strip()
                if match := _INCLUDE.fullmatch(text):
                    files += sorted(glob.glob(os.path.join(os.path.dirname(path), match[1])))
                elif text.startswith("/"):
                    directories.append(text)
    return directories


def left_out(filesystems: Filesystems) -> tuple[str, ...]:
    """Return directories in which nothing may be armed: what is mounted there may not reply."""
    points = set(_LEFT_OUT)
    for path in _MOUNTS:
        with suppress(OSError):
            table = {mount.id: mount for mount in mounts(path)}
            points |= {
                os.fsdecode(mount.point) for mount in table.values() if filesystems.judge(mount, table) is not None
            }
    return tuple(sorted(points - {"/"}))
