from __future__ import annotations

import os
from pathlib import Path

import pytest

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.cgroups import CgroupInfo, all_paths, find, processes


@pytest.fixture
def mount_point(tmp_path: Path) -> Path:
    """A hierarchy in a folder whose name mountinfo has to escape."""
    made = tmp_path / "the unified"
    (made / "system.slice" / "cron.service").mkdir(parents=True)
    (made / "cgroup.procs").touch()
    return made


def mountinfo(mount_point: Path, root: str = "/") -> str:
    path = mount_point.parent / "mountinfo"
    shown = str(mount_point).replace(" ", "\\040")
    path.write_text(
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
        f"41 31 0:38 {root} {shown} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("path", "directory", "level"),
    [
        ("/", "", 0),
        ("/system.slice", "system.slice", 1),
        ("/system.slice/cron.service", "system.slice/cron.service", 2),
        ("//system.slice//cron.service/", "system.slice/cron.service", 2),
        ("{mount}/system.slice", "system.slice", 1),
        ("{mount}", "", 0),
    ],
)
def test_id_is_the_directorys_inode_and_level_its_depth(
    mount_point: Path, path: str, directory: str, level: int
) -> None:
    found = find(path.format(mount=mount_point), mountinfo(mount_point))
    assert found == CgroupInfo((mount_point / directory).stat().st_ino, level)


@pytest.mark.parametrize(
    "path", ["", "system.slice", "/nobody.slice", "/cgroup.procs", "/system.slice/..", "/./system.slice", "/a\0b"]
)
def test_what_is_no_cgroup(mount_point: Path, path: str) -> None:
    assert find(path, mountinfo(mount_point)) is None


def test_mount_of_a_part_of_the_hierarchy(mount_point: Path) -> None:
    part = mountinfo(mount_point, root="/docker/abc")
    assert find("/system.slice", part) is None
    found = find("/docker/abc/system.slice", part)
    assert found == CgroupInfo((mount_point / "system.slice").stat().st_ino, 3)


def test_every_cgroup_is_told_from_the_hierarchys_root(mount_point: Path) -> None:
    below = {"/system.slice", "/system.slice/cron.service"}
    assert set(all_paths(mountinfo(mount_point))) == below | {"/"}
    part = set(all_paths(mountinfo(mount_point, root="/docker/abc")))
    assert part == {f"/docker/abc{path}" for path in below} | {"/docker/abc"}
    assert all(find(path, mountinfo(mount_point, root="/docker/abc")) for path in part)


def test_name_that_is_no_text_is_found_again(mount_point: Path) -> None:
    os.mkdir(os.fsencode(mount_point) + b"/caf\xe9")
    (path,) = (path for path in all_paths(mountinfo(mount_point)) if "caf" in path)
    assert find(path, mountinfo(mount_point)) is not None


def test_processes_below_a_cgroup(mount_point: Path) -> None:
    (mount_point / "cgroup.procs").write_text("1\n")
    (mount_point / "system.slice" / "cgroup.procs").write_text("0\n7\n8\n")
    (mount_point / "system.slice" / "cron.service" / "cgroup.procs").write_text("9\n")
    assert processes("/system.slice", mountinfo(mount_point)) == {7, 8, 9}
    assert processes("/nobody.slice", mountinfo(mount_point)) == frozenset()
    assert processes("..", mountinfo(mount_point)) == frozenset()


def test_host_without_the_unified_hierarchy(tmp_path: Path) -> None:
    empty = tmp_path / "mountinfo"
    empty.touch()
    with pytest.raises(KernelFeatureError, match="cgroup2"):
        find("/", str(empty))
