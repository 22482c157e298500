"""A guest's first root: busybox, modules, and the /init that mounts the real one and runs a command in it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

_INIT = """\
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in {modules}; do $b insmod /modules/$module || $b poweroff -f; done
plan9() {{ $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,$3 $1 $2; }}
$b mkdir -p /lower /rw /new /tree /share
plan9 root /lower ro,cache=loose || $b poweroff -f
$b mount -t tmpfs tmpfs /rw
$b mkdir /rw/upper /rw/work /rw/tree /rw/tree-work
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work overlay /new
$b mount -t proc proc /new/proc
$b mount -t sysfs sys /new/sys
$b mount -t devtmpfs dev /new/dev
$b mkdir -p /new/dev/pts /new/dev/shm
$b mount -t devpts devpts /new/dev/pts
$b ln -s /proc/self/fd /new/dev/fd
for descriptor in 0:stdin 1:stdout 2:stderr; do
    $b ln -s /proc/self/fd/${{descriptor%:*}} /new/dev/${{descriptor#*:}}
done
for folder in /tmp /run /dev/shm; do $b mount -t tmpfs -o mode=1777 tmpfs /new$folder; done
$b mkdir -p /new{tree} /new/run/share
plan9 tree /tree ro,cache=loose || $b poweroff -f
$b mount -t overlay -o lowerdir=/tree,upperdir=/rw/tree,workdir=/rw/tree-work overlay /new{tree}
plan9 share /new/run/share rw,cache=none || $b poweroff -f
$b mount -t tracefs nodev /new/sys/kernel/tracing
$b mount -t cgroup2 none /new/sys/fs/cgroup
$b ip link set lo up
$b hostname guest
# what the overlays lie on stays visible, where their options say that it is
for layer in /lower /rw /tree; do $b mkdir -p /new$layer && $b mount --move $layer /new$layer; done
$b cp $b /new/run/busybox
exec $b switch_root /new /run/busybox sh -c '
    /bin/sh /run/share/command </dev/null >/dev/console 2>&1
    echo $? >/run/share/status
    /run/busybox sync
    /run/busybox poweroff -f'
"""
SHARE = "/run/share"
"""Where the guest has the folder that it shares with the host."""


def write(output: Path, busybox: Path, modules: tuple[Path, ...], tree: Path) -> None:
    """tree: the folder that tests run in; the guest has it at the same path."""
    init = _INIT.format(modules=" ".join(path.name for path in modules), tree=tree)
    files = {"init": init.encode(), "bin/busybox": busybox.read_bytes()}
    files |= {f"modules/{path.name}": path.read_bytes() for path in modules}
    output.write_bytes(gzip.compress(archive(files), compresslevel=1))


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return executable files, and the folders they are in, as cpio's newc format has them
    (Documentation/driver-api/early-userspace/buffer-format.rst).
    """
    folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    folders |= {"proc", "sys", "dev"}
    entries = [(name, 0o040755, b"") for name in sorted(folders)]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    return b"".join(
        _entry(number, name, mode, content) for number, (name, mode, content) in enumerate(entries, start=1)
    )


def _entry(inode: int, name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    #        ino    mode  uid gid nlink mtime filesize  dev, rdev    namesize      check
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return _padded(header) + _padded(content)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 4)
