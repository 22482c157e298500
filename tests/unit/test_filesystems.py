"""Which file systems files may be armed on, by what mount tables say."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from stapsdtd.kernel import mounts
from stapsdtd.kernel.filesystems import LOCAL, Filesystems
from stapsdtd.kernel.inodes import MappedInode
from stapsdtd.kernel.mounts import Mount, find, parse
from stapsdtd.kernel.reach import status_of

TABLE = rb"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:40 / /home/anne/far rw,nosuid - fuse.sshfs anne@far: rw,user_id=1000,group_id=1000
29 27 0:41 / /pool rw - fuse.mergerfs a:b rw,user_id=0,group_id=0,allow_other
30 27 0:42 / /mnt/nfs rw - nfs4 server:/ rw,vers=4.2,hard
31 27 0:43 / /vm rw - 9p share rw,trans=virtio
32 27 0:44 / /data rw - btrfs /dev/loop1 rw,subvol=/
33 27 7:0 / /snap/core ro - squashfs /dev/loop0 ro
34 27 253:0 / /crypt rw - xfs /dev/mapper/crypt rw
35 27 43:0 / /nbd rw - ext4 /dev/nbd0 rw
40 27 0:50 / /merged rw - overlay none rw,lowerdir=/a:/b,upperdir=/u,workdir=/w
41 27 0:51 / /merged2 rw - overlay none rw,lowerdir=/a:/mnt/nfs/b
42 27 0:52 / /merged3 rw - overlay none rw,lowerdir=/merged/c:/merged2/d
43 27 0:53 / /merged4 rw - overlay none rw,lowerdir=l/A:l/B,upperdir=/u,workdir=/w
44 27 0:54 / /with\040blank rw - tmpfs none rw
45 27 0:55 / /home/anne/hidden rw - tmpfs none rw
46 27 0:56 / /home/anne/hidden rw - fuse anne rw,user_id=1000,group_id=1000
47 27 0:57 / /merged5 rw - overlay none rw,lowerdir=/home/anne/hidden/x
48 27 0:58 / /disk rw - fuseblk /dev/sdb1 rw,user_id=0,group_id=0
49 27 0:59 / /dax rw - virtiofs share rw
"""
TABLES = {mount.id: mount for mount in parse(TABLE)}


@pytest.fixture
def devices(tmp_path: Path) -> str:
    """What /sys shows of the block devices above."""
    for name, number, backing in (("loop0", "7:0", "/var/core.snap"), ("loop1", "7:1", "/home/anne/far/disk")):
        (tmp_path / "devices" / name / "loop").mkdir(parents=True)
        (tmp_path / "devices" / name / "loop" / "backing_file").write_text(f"{backing}\n")
        link(tmp_path, name, number)
    (tmp_path / "devices" / "nbd0").mkdir()
    link(tmp_path, "nbd0", "43:0")
    (tmp_path / "devices" / "dm-0" / "slaves").mkdir(parents=True)
    link(tmp_path, "dm-0", "253:0")
    (tmp_path / "devices" / "dm-0" / "slaves" / "loop1p1").symlink_to(tmp_path / "devices" / "loop1" / "loop1p1")
    (tmp_path / "devices" / "loop1" / "loop1p1").mkdir()
    return str(tmp_path)


def link(folder: Path, name: str, number: str) -> None:
    for kind, as_what in (("class", name), ("dev", number)):
        (folder / kind / "block").mkdir(parents=True, exist_ok=True)
        (folder / kind / "block" / as_what).symlink_to(folder / "devices" / name)


def judged(number: int, *armed_too: str, devices: str = "/nowhere") -> str | None:
    return Filesystems(armed_too, devices).judge(TABLES[number], TABLES)


def test_local_ones_are_allowed() -> None:
    for number in (27, 33, 44):
        assert judged(number) is None
    assert "fuse" not in LOCAL
    assert not {kind for kind in LOCAL if kind.startswith(("fuse", "nfs", "9p", "cifs", "smb", "ceph", "virtiofs"))}


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (28, "fuse.sshfs"),
        (29, "fuse.mergerfs"),
        (30, "nfs4"),
        (31, "9p"),
        (46, "fuse"),
        (48, "fuseblk"),
        (49, "virtiofs"),
    ],
)
def test_those_with_a_server_are_not(number: int, kind: str) -> None:
    reason = judged(number)
    assert reason is not None
    assert f"the file is on {kind}, whose server" in reason
    assert f'[filesystems] arm = ["{kind}"]' in reason


def test_configuration_allows_others() -> None:
    assert judged(30, "nfs4") is None
    assert judged(31, "9p", "nfs4") is None
    assert judged(41, "nfs4") is None
    assert judged(29, "fuse.mergerfs") is None
    assert judged(29, "fuse.other") is not None


def test_user_who_names_a_fuse_as_roots_is_called_gets_nothing() -> None:
    reason = judged(28, "fuse.sshfs")
    assert reason is not None
    assert "that root did not mount" in reason
    # to the user namespace that it was mounted in, any user is root
    assert Filesystems(["fuse.mergerfs"]).judge(TABLES[29], None) is not None


def test_overlay_is_what_its_layers_are() -> None:
    assert judged(40) is None
    for number, kind in ((41, "nfs4"), (42, "nfs4"), (47, "fuse")):
        reason = judged(number)
        assert reason is not None
        assert f"the file is on {kind}, whose server" in reason


def test_overlay_whose_layers_cannot_be_told_is_refused() -> None:
    for mount, table in ((TABLES[43], TABLES), (TABLES[40], None)):
        reason = Filesystems().judge(mount, table)
        assert reason is not None
        assert ("l/A, whose file system no mount shows" if table else "the file is on overlay, whose server") in reason
        assert Filesystems(["overlay"]).judge(mount, table) is None


def test_overlays_on_themselves_end() -> None:
    loop = dict([_overlay(60, b"/x", b"/y/a"), _overlay(61, b"/y", b"/x/a")])
    assert Filesystems().judge(loop[60], loop) is not None


def _overlay(number: int, point: bytes, layer: bytes) -> tuple[int, Mount]:
    return number, Mount(number, b"0:9", b"/", point, b"overlay", b"none", b"lowerdir=" + layer)


def test_disk_that_is_a_file_is_what_that_file_lies_on(devices: str) -> None:
    assert judged(33, devices=devices) is None
    for number in (32, 34):
        reason = judged(number, devices=devices)
        assert reason is not None
        assert "the file is on fuse.sshfs, whose server" in reason
    assert "a network block device" in (judged(35, devices=devices) or "")


def test_inode_decides_whatever_is_stacked_on_its_file_system() -> None:
    filesystems, pid, unseen = Filesystems(), os.getpid(), os.makedev(0, 0xFFFFF)
    with open("/proc/self/maps", "rb") as served:
        for inode, reason in (
            (MappedInode(os.stat(sys.executable).st_dev, 1), None),
            (MappedInode(os.fstat(served.fileno()).st_dev, 1), "the file is on proc"),
            (MappedInode(unseen, 1, "tmpfs"), None),
            (MappedInode(unseen, 1, "fuse"), "the file is on fuse that no visible mount shows"),
            (MappedInode(unseen, 1), "the file is on a file system that no visible mount shows"),
        ):
            found = filesystems.why_not(served.fileno(), pid, inode)
            assert found == reason or (reason is not None and found is not None and found.startswith(reason))


def test_what_stat_shows_is_the_inode_but_for_some() -> None:
    filesystems = Filesystems()
    memory = os.memfd_create("x")
    with open(sys.executable, "rb") as program:
        for descriptor in (program.fileno(), memory):
            assert filesystems.shows_inodes(status_of(descriptor))
        stacked = status_of(program.fileno())._replace(st_dev=os.makedev(0, 0xFFFFF), mount=-1)
        assert not filesystems.shows_inodes(stacked)
    os.close(memory)


def test_files_of_this_host() -> None:
    filesystems = Filesystems()
    memory = os.memfd_create("x")
    huge = os.memfd_create("x", os.MFD_HUGETLB)
    with open(sys.executable, "rb") as program, open("/proc/self/maps", "rb") as served:
        assert filesystems.why_not(program.fileno(), os.getpid()) is None
        assert filesystems.why_not(memory, os.getpid()) is None
        # a mount of the kernel's own, in no table
        assert "no visible mount" in (filesystems.why_not(huge, os.getpid()) or "")
        assert "the file is on proc" in (filesystems.why_not(served.fileno(), os.getpid()) or "")
    # SysV shared memory and shared anonymous memory are of the same kind
    with mmap.mmap(-1, mmap.PAGESIZE):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/zero" in line]
        devices = {os.makedev(*(int(part, 16) for part in fields[3].split(":"))) for fields in lines}
        assert devices == {os.fstat(memory).st_dev}
    os.close(memory)
    os.close(huge)


def test_one_mount_is_found_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"%d 1 0:%d / /mnt/%d rw - tmpfs tmpfs rw\n"
    path = tmp_path / "mountinfo"
    path.write_bytes(b"".join(line % (number, number, number) for number in range(100, 1100)))
    assert find(str(path), 10) is None
    found = find(str(path), 1000)
    assert found is not None
    assert (found.id, found.point, found.options) == (1000, b"/mnt/1000", b"rw")
    monkeypatch.setattr(mounts, "_MOST_BYTES", 1000)
    assert find(str(path), 105) is not None
    assert find(str(path), 1000) is None
