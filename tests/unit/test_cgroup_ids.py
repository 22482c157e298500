"""Cgroups of the host by their ids, and the names that events get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.errors import KernelFeatureError
from stapsdtd.events.columns import U64, Strings
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.cgroup_ids import CgroupGoneError, CgroupIds
from tests.support import without_descriptors

CONTAINER = "0123456789abcdef" * 4


@pytest.fixture
def ids() -> Iterator[CgroupIds]:
    if os.geteuid() != 0:
        pytest.skip("CAP_DAC_READ_SEARCH is missing")
    with closing(CgroupIds()) as made:
        yield made


@pytest.fixture
def mount_point() -> Path:
    try:
        return Path(os.fsdecode(cgroups.mounted("/proc/self/mountinfo")[1]))
    except KernelFeatureError:
        pytest.skip("there is no cgroup2 here")


@pytest.fixture
def cgroup(mount_point: Path) -> Iterator[Path]:
    directory = mount_point / f"stapsdtd (deleted) {os.getpid()} (deleted)"
    directory.mkdir()
    yield directory
    if directory.exists():
        directory.rmdir()


def test_path_is_what_find_takes(ids: CgroupIds, cgroup: Path, mount_point: Path) -> None:
    """Also with a name that ends as those of removed files are shown."""
    for path in ("/", f"/{cgroup.name}"):
        info = cgroups.find(path)
        assert info is not None
        assert ids.path_of(info.id) == path.encode()
    assert cgroup.stat().st_ino != mount_point.stat().st_ino


def test_removed_cgroup_is_gone(ids: CgroupIds, cgroup: Path) -> None:
    cgroup_id = cgroup.stat().st_ino
    cgroup.rmdir()
    with pytest.raises(CgroupGoneError):
        ids.path_of(cgroup_id)


def test_what_cannot_be_looked_up_now_may_be_later(ids: CgroupIds, cgroup: Path) -> None:
    names = CgroupNames(ids.path_of)
    found = np.array([cgroup.stat().st_ino], np.uint64)
    ids.path_of(cgroup.stat().st_ino)
    with without_descriptors():
        assert texts(names.column(found, 1, is_container=False)[0]) == [None]
    assert texts(names.column(found, 1, is_container=False)[0]) == [f"/{cgroup.name}".encode()]


def test_hierarchy_that_is_not_mounted_is_looked_for_again(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.touch()
    now = 100.0
    with closing(CgroupIds(str(mountinfo), clock=lambda: now)) as ids:
        with pytest.raises(OSError, match="not mounted"):
            ids.path_of(1)
        mountinfo.write_text(Path("/proc/self/mountinfo").read_text())
        with pytest.raises(OSError, match="not mounted"):
            ids.path_of(1)
        now += 60
        if " - cgroup2 " in mountinfo.read_text() and os.geteuid() == 0:
            assert ids.path_of(1) == b"/"


PATHS = {1: b"/", 2: f"/docker/{CONTAINER}/init".encode(), 3: b"/system.slice"}


def path_of(cgroup_id: int) -> bytes:
    try:
        return PATHS[cgroup_id]
    except KeyError:
        raise CgroupGoneError from None


def of(*cgroup_ids: int) -> U64:
    return np.array(cgroup_ids, np.uint64)


def texts(column: Strings) -> list[bytes | None]:
    return column.tolist()


def test_names_of_events() -> None:
    names = CgroupNames(path_of)
    column, looked_up = names.column(of(2, 1, 9, 2), 10, is_container=False)
    assert (texts(column), looked_up) == ([PATHS[2], b"/", None, PATHS[2]], 3)
    column, looked_up = names.column(of(2, 1, 9, 2), 10, is_container=True)
    assert (texts(column), looked_up) == ([CONTAINER.encode(), b"", None, CONTAINER.encode()], 0)
    assert texts(names.column(of(3, 3), 10, is_container=False)[0]) == [PATHS[3]] * 2


def test_one_sweep_looks_up_so_many() -> None:
    names = CgroupNames(path_of)
    assert texts(names.column(of(3, 2, 1), 2, is_container=False)[0]) == [None, PATHS[2], b"/"]
    assert texts(names.column(of(3, 2, 1), 2, is_container=False)[0]) == [PATHS[3], PATHS[2], b"/"]
    assert names.column(of(), 2, is_container=False)[1] == 0


def test_names_of_many_cgroups_are_forgotten() -> None:
    calls: list[int] = []

    def many(cgroup_id: int) -> bytes:
        calls.append(cgroup_id)
        return b"/%d" % cgroup_id

    names = CgroupNames(many)
    names.column(np.arange(10_000, dtype=np.uint64), 10_000, is_container=False)
    assert texts(names.column(of(0, 9_999), 10, is_container=False)[0]) == [b"/0", b"/9999"]
    assert calls[10_000:] == [0]
