"""overlayfs: which file of which layer a file of an overlay is, since that is the inode the kernel arms.

    57 30 0:48 / /merged rw - overlay none rw,lowerdir=/a:/b,upperdir=/u,workdir=/w        a line of /proc/PID/mountinfo

Two overlays of one lower file show it under two devices (tried on 6.18). Paths of layers are those of whoever mounted.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")
_UNESCAPED_COLON = re.compile(r"(?<!\\):")


class _Overlay(NamedTuple):
    """root: what of the overlay is mounted; layers: the upper one first."""

    root: str
    mount_point: str
    layers: tuple[str, ...]


def real_file(pid: int, path: str, shown: os.stat_result) -> os.stat_result | None:
    """Answer the layer's file behind what a process sees under a path; None where that is no overlay or not to be told.

    Only mounts of this process's own mount namespace are believed, and those that a process of the same user namespace
    sees: in one of their own, anybody may mount what they like.
    """
    if os.major(shown.st_dev) or not shown.st_nlink or not path.startswith("/"):
        # on a device, or without a name, as memfds are: they need not wait for mountinfo
        return None
    for witness in ("self", str(pid)):
        mounts = _mounts(witness, shown.st_dev)
        if mounts is None:
            if witness == "self" and _shares_user_namespace(pid):
                continue
            return None
        found = [real for mount in mounts if (real := _in_layers(witness, mount, path, shown))]
        if found:
            return found[0]
        if not _shares_user_namespace(pid):
            return None
    return None


def _mounts(witness: str, dev: int) -> list[_Overlay] | None:
    """Answer the mounts of a device that are overlays; None where it is not mounted at all."""
    try:
        with open(f"/proc/{witness}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    device = f"{os.major(dev)}:{os.minor(dev)}"
    found, is_known = [], False
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 9 and fields[2] == device:
            is_known = True
            kind, _, options = fields[fields.index("-", 6) + 1 :][:3]
            if kind == "overlay":
                found.append(_Overlay(_plain(fields[3]), _plain(fields[4]), tuple(_layers(_plain(options)))))
    return found if is_known else None


def _layers(options: str) -> Iterator[str]:
    lower = []
    for option in re.split(r"(?<!\\),", options):
        name, _, value = option.partition("=")
        if name == "upperdir":
            yield _without_backslashes(value)
        elif name == "lowerdir":
            lower += [_without_backslashes(each) for each in _UNESCAPED_COLON.split(value) if each]
        elif name == "lowerdir+":
            lower.append(_without_backslashes(value))
    yield from lower


def _plain(field: str) -> str:
    """Undo the octal escapes of blanks, tabs, newlines and backslashes."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)


def _without_backslashes(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value)


def _in_layers(witness: str, mount: _Overlay, path: str, shown: os.stat_result) -> os.stat_result | None:
    """The first layer that has the name is the one that is shown."""
    point = mount.mount_point.rstrip("/")
    if not path.startswith(point + "/"):
        return None
    within = mount.root.rstrip("/") + path[len(point) :]
    for layer in mount.layers:
        if not layer.startswith("/"):
            # relative to where the mounter was, which nobody knows any more
            return None
        try:
            found = os.stat(f"/proc/{witness}/root{layer}{within}", follow_symlinks=False)
        except OSError:
            continue
        same = (found.st_ino, found.st_size, found.st_mtime_ns) == (shown.st_ino, shown.st_size, shown.st_mtime_ns)
        return found if same and stat.S_ISREG(found.st_mode) else None
    return None


def _shares_user_namespace(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return False
