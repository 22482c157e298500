"""Resolve files of an overlayfs to the files of its layers, which have the inodes that the kernel arms.

    57 30 0:48 / /merged rw - overlay none rw,lowerdir=/a:/b,upperdir=/u,workdir=/w        a line of /proc/PID/mountinfo

Two overlays show the same lower file under two devices (tried on 6.18). Paths of layers are as the mounter saw them,
which for a container is its runtime, in the host's mount namespace. `kernel.inodes` is the better way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from stapsdtd.kernel.mounts import mounts
from stapsdtd.kernel.procfs import shown_path
from stapsdtd.kernel.reach import FileStatus, cached_status

OVERLAY = "overlay"
_UNESCAPED_COLON = re.compile(rb"(?<!\\):")


class _Overlay(NamedTuple):
    """root: the path within the overlay that is mounted; layers: uppermost first."""

    root: bytes
    mount_point: bytes
    layers: tuple[bytes, ...]


def real_file(pid: int, path: str, shown: FileStatus, first_pid: int = 1) -> FileStatus | None:
    """Return the layer's file behind the file that a process sees at path; None if it is not on an overlay or cannot be
    determined. first_pid: the process that sees what the host has mounted.

    Only mounts seen by this process or by processes in its user namespace are trusted: in a user namespace of their
    own, users can mount what they like.
    """
    if os.major(shown.st_dev) or not shown.st_nlink or not path.startswith("/"):
        # on a block device, or unnamed like a memfd: no need to read mountinfo
        return None
    for witness in ("self", str(pid)):
        mounts = _mounts(witness, shown.st_dev)
        if mounts is None:
            if witness == "self" and shares_user_namespace(pid):
                continue
            return None
        roots = [f"/proc/{root}/root" for root in dict.fromkeys(("self", str(first_pid), witness))]
        candidates = (_in_layers(root, mount, path, shown) for mount in mounts for root in roots)
        real_files = [real for real in candidates if real]
        if real_files:
            return real_files[0]
        if not shares_user_namespace(pid):
            return None
    return None


def _mounts(witness: str, dev: int) -> list[_Overlay] | None:
    """Return the overlay mounts of a device that the witness, a pid or self, sees; None if it is not mounted there."""
    device = f"{os.major(dev)}:{os.minor(dev)}".encode()
    try:
        of_device = [mount for mount in mounts(f"/proc/{witness}/mountinfo") if mount.device == device]
    except OSError:
        return None
    if not of_device:
        return None
    overlays = [mount for mount in of_device if mount.kind == b"overlay"]
    return [_Overlay(mount.root, mount.point, tuple(layers_of(mount.options))) for mount in overlays]


def layers_of(options: bytes) -> Iterator[bytes]:
    """Yield the paths of an overlay's layers, uppermost first, as the mounter saw them."""
    lower = []
    for option in re.split(rb"(?<!\\),", options):
        name, _, value = option.partition(b"=")
        if name == b"upperdir":
            yield _without_backslashes(value)
        elif name == b"lowerdir":
            lower += [_without_backslashes(layer) for layer in _UNESCAPED_COLON.split(value) if layer]
        elif name == b"lowerdir+":
            lower.append(_without_backslashes(value))
    yield from lower


def _without_backslashes(value: bytes) -> bytes:
    return re.sub(rb"\\(.)", rb"\1", value, flags=re.DOTALL)


def _in_layers(root: str, mount: _Overlay, path: str, shown: FileStatus) -> FileStatus | None:
    """Return the file of the first layer that has the path, which is the one that the overlay shows.

    root: in which to look up the layers' paths.
    """
    # bytes that are not text are shown escaped in both
    point = shown_path(mount.mount_point.rstrip(b"/"))
    if not path.startswith(point + "/"):
        return None
    within = mount.root.rstrip(b"/") + path[len(point) :].encode()
    for layer in mount.layers:
        if not layer.startswith(b"/"):
            # relative to the mounter's working directory, which is unknown
            return None
        try:
            status = cached_status(os.fsdecode(root.encode() + layer + within))
        except OSError:
            continue
        same = (status.st_ino, status.st_size, status.st_mtime_ns) == (shown.st_ino, shown.st_size, shown.st_mtime_ns)
        return status if same and status.is_regular else None
    return None


def shares_user_namespace(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return False
