from __future__ import annotations

import os
import subprocess
import threading

import pytest

from stapsdtd.kernel import procfs
from stapsdtd.model import FileOffset, Mapping, ProcessKey

MAPS = rb"""55563b0ea000-55563b0eb000 r-xp 00001000 fe:00 1835043                    /tmp/demo
55563b0eb000-55563b0ec000 r--p 00002000 fe:00 1835043                    /tmp/demo
55563c000000-55563c021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
7f1000000000-7f1000001000 r-xs 00000000 00:01 2048                       /memfd:jit (deleted)
7f2000000000-7f2000001000 --xp 0000f000 103:1f 77                        /usr/lib/lib with blanks.so
7f3000000000-7f3000001000 r-xp 00000000 fe:00 78                         /tmp/new\012line \101 (deleted)
7f4000000000-7f4000001000 r-xp 00000000 fe:00 79                         /tmp/caf\351 x (deleted) (deleted)
7fff00000000-7fff00002000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
""".replace(rb"\351", b"\351")


@pytest.fixture
def maps() -> list[Mapping]:
    return procfs.parse_maps(1, MAPS)


def test_executable_mappings_of_files(maps: list[Mapping]) -> None:
    assert maps[0] == Mapping(
        0x55563B0EA000, 0x55563B0EB000, FileOffset(0x1000), os.makedev(0xFE, 0), 1835043, "/tmp/demo"
    )
    assert maps[1] == Mapping(0x7F1000000000, 0x7F1000001000, FileOffset(0), os.makedev(0, 1), 2048, "/memfd:jit")
    assert maps[2].dev == os.makedev(0x103, 0x1F)
    assert maps[2].file_offset == 0xF000
    assert len(maps) == 5


def test_paths_are_shown_as_they_are(maps: list[Mapping]) -> None:
    """The kernel escapes the newline and nothing else, so a backslash in a name stays one."""
    assert [mapping.path for mapping in maps[2:]] == [
        "/usr/lib/lib with blanks.so",
        "/tmp/new\nline \\101",
        r"/tmp/caf\xe9 x (deleted)",
    ]


def test_own_mappings_are_files_that_exist() -> None:
    mappings = procfs.executable_mappings(os.getpid())
    assert mappings
    for mapping in mappings:
        status = os.stat(mapping.path)
        assert (status.st_dev, status.st_ino) == (mapping.dev, mapping.inode)


def test_ways_begin_with_the_surest() -> None:
    (mapping, *_) = procfs.executable_mappings(os.getpid())
    pid = os.getpid()
    first, second, third, *rest = procfs.ways_to(pid, mapping)
    assert first == f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    assert second == f"/proc/{pid}/root{mapping.path}"
    assert third == mapping.path
    assert set(rest) >= {f"/proc/{pid}/fd/{number}" for number in (0, 1, 2)}


def test_what_has_no_path_has_no_way_through_the_root() -> None:
    mapping = Mapping(0x1000, 0x2000, FileOffset(0), 1, 1, "anon_inode:x")
    assert not [way for way in procfs.ways_to(os.getpid(), mapping) if "/root" in way or way == mapping.path]


@pytest.fixture
def gone() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_process_that_is_gone_has_nothing(gone: int) -> None:
    assert procfs.stat(gone) is None
    assert procfs.tgid(gone) is None
    assert procfs.executable_mappings(gone) == []
    assert procfs.thread_ids(gone) == []
    mapping = Mapping(0x1000, 0x2000, FileOffset(0), 1, 1, "/x")
    assert len(list(procfs.ways_to(gone, mapping))) == 3
    assert gone not in procfs.pids()


def test_stat_of_a_hostile_name() -> None:
    rest = "1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 7 0 4242 9999"
    text = f"55 (a) S (b) R 1 1) Z {rest}\n".encode()
    assert procfs.parse_stat(55, text) == procfs.ProcessStat(ProcessKey(55, 4242), "Z", 7)


def test_threads() -> None:
    release = threading.Event()
    started = threading.Event()
    ids: list[int] = []

    def wait() -> None:
        ids.append(threading.get_native_id())
        started.set()
        release.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(20)
    pid = os.getpid()
    assert {pid, *ids} <= set(procfs.thread_ids(pid))
    assert procfs.tgid(ids[0]) == procfs.tgid(pid) == pid
    stat = procfs.stat(pid)
    assert stat is not None
    assert stat.threads >= 2
    assert pid in procfs.pids()
    release.set()
    thread.join()


def test_the_map_of_a_users_process_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = procfs.executable_mappings(os.getpid())
    assert len(whole) > 3
    monkeypatch.setattr(procfs, "MAX_MAPS_BYTES", 1000)
    # root's is read as a whole
    monkeypatch.setattr(procfs, "_owner", lambda _pid: 0)
    assert procfs.executable_mappings(os.getpid()) == whole
    monkeypatch.setattr(procfs, "_owner", lambda _pid: 1000)
    some = procfs.executable_mappings(os.getpid())
    assert 0 < len(some) < len(whole)
    assert some == whole[: len(some)]
