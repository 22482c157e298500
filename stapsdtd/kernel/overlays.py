"""overlayfs: which file of which layer a file of an overlay is, since that is the inode the kernel arms.

    57 30 0:48 / /merged rw - overlay none rw,lowerdir=/a:/b,upperdir=/u,workdir=/w        a line of /proc/PID/mountinfo

Two overlays of one lower file show it under two devices (tried on 6.18). Paths of layers are those of whoever mounted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from stapsdtd.kernel.mounts import mounts
from stapsdtd.kernel.procfs import shown_path
from stapsdtd.kernel.reach import FileStatus, cached_status

_UNESCAPED_COLON = re.compile(rb"(?<!\\):")


class _Overlay(NamedTuple):
    """root: what of the overlay is mounted; layers: the upper one first."""

    root: bytes
    mount_point: bytes
    layers: tuple[bytes, ...]


def real_file(pid: int, path: str, shown: FileStatus) -> FileStatus | None:
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
            if witness == "self" and shares_user_namespace(pid):
                continue
            return None
        found = [real for mount in mounts if (real := _in_layers(witness, mount, path, shown))]
        if found:
            return found[0]
        if not shares_user_namespace(pid):
            return None
    return None


def _mounts(witness: str, dev: int) -> list[_Overlay] | None:
    """Answer the mounts of a device that are overlays; None where it is not mounted at all."""
    device = f"{os.major(dev)}:{os.minor(dev)}".encode()
    try:
        found = [mount for mount in mounts(f"/proc/{witness}/mountinfo") if mount.device == device]
    except OSError:
        return None
    overlays = [mount for mount in found if mount.kind == b"overlay"]
    return [_Overlay(mount.root, mount.point, tuple(layers_of(mount.options))) for mount in overlays] if found else None


def layers_of(options: bytes) -> Iterator[bytes]:
    """The upper one first, as whoever mounted named them."""
    lower = []
    for option in re.split(rb"(?<!\\),", options):
        name, _, value = option.partition(b"=")
        if name == b"upperdir":
            yield _without_backslashes(value)
        elif name == b"lowerdir":
            lower += [_without_backslashes(each) for each in _UNESCAPED_COLON.split(value) if each]
        elif name == b"lowerdir+":
            lower.append(_without_backslashes(value))
    yield from lower


def _without_backslashes(value: bytes) -> bytes:
    return re.sub(rb"\\(.)", rb"\1", value, flags=re.DOTALL)


def _in_layers(witness: str, mount: _Overlay, path: str, shown: FileStatus) -> FileStatus | None:
    """The first layer that has the name is the one that is shown."""
    # bytes that are no text are shown in place of themselves
    point = shown_path(mount.mount_point.rstrip(b"/"))
    if not path.startswith(point + "/"):
        return None
    within = mount.root.rstrip(b"/") + path[len(point) :].encode()
    for layer in mount.layers:
        if not layer.startswith(b"/"):
            # relative to where the mounter was, which nobody knows any more
            return None
        try:
            found = cached_status(os.fsdecode(f"/proc/{witness}/root".encode() + layer + within))
        except OSError:
            continue
        same = (found.st_ino, found.st_size, found.st_mtime_ns) == (shown.st_ino, shown.st_size, shown.st_mtime_ns)
        return found if same and found.is_regular else None
    return None


def shares_user_namespace(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return False
