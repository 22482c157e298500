from __future__ import annotations

import hashlib
import logging
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import msgpack

from stapsdtd.inventory.files import InstalledFile
from stapsdtd.inventory.store import Store, Stored

FILE = InstalledFile(1 << 63, "/usr/bin/postgres", "x86-64", "ab12", (("postgresql", "query__start"),), 1)
STORED = Stored("1", 1_700_000_000.5, (FILE,), b"12345678")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"{tmp_path}/state", "1")


def test_what_was_saved_is_loaded(store: Store) -> None:
    assert store.load() is None
    store.save(STORED)
    assert store.load() == STORED
    assert os.stat(store.path).st_mode & 0o777 == 0o600
    store.save(Stored("1", 2.0, (), b""))
    assert store.load() == Stored("1", 2.0, (), b"")
    assert os.listdir(os.path.dirname(store.path)) == ["inventory"]


def content(**changed: object) -> dict[str, object]:
    """What a file holds of STORED."""
    file = {"fingerprint": FILE.fingerprint, "path": FILE.path, "architecture": "x86-64", "build_id": "ab12"}
    return {
        "version": "1",
        "scanned_at": 1.5,
        "tables": [FILE.probes],
        "files": [{**file, "probes": 0, "sites": 1}],
        "known": b"12345678",
        **changed,
    }


def signed(body: bytes) -> bytes:
    return b"stapsdtd inventory 2\n" + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"\0" * 1000,
        signed(msgpack.encode(content()))[:-1],
        signed(msgpack.encode(content())).replace(b"postgres", b"postgrez", 1),
        signed(b"no MessagePack"),
        signed(msgpack.encode(content(files=[{"path": 1}]))),
        signed(msgpack.encode(content(tables=[]))),
        signed(msgpack.encode(content(known=b"123"))),
    ],
    ids=["empty", "zeros", "truncated", "changed", "garbage", "other types", "no such table", "half a fingerprint"],
)
def test_garbage_is_discarded(store: Store, written: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store.save(STORED)
    Path(store.path).write_bytes(written)
    assert store.load() is None
    assert "is no inventory, or not whole, and files are read once more" in caplog.text


def test_another_versions_is_discarded(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.save(Stored("0.9", 1.0, (FILE,), b""))
    assert store.load() is None
    assert "is of version 0.9" in caplog.text


@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_what_others_can_write_to_is_not_believed(
    store: Store, what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(STORED)
    path = store.path if what == "file" else os.path.dirname(store.path)
    if how == "owner":
        os.chown(path, 65534, 65534)
    else:
        os.chmod(path, 0o777)
    assert store.load() is None
    assert "others than root may write to it" in caplog.text


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("symlink", "Too many levels of symbolic links"),
        ("fifo", "it is not a regular file"),
        ("directory", "it is not a regular file"),
    ],
)
def test_only_a_file_is_read(store: Store, kind: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store.save(STORED)
    path = Path(store.path)
    other = path.rename(path.with_name("other"))
    match kind:
        case "symlink":
            path.symlink_to(other)
        case "fifo":
            os.mkfifo(path, 0o600)
        case _:
            path.mkdir(0o700)
    before = os.listdir("/proc/self/fd")
    assert store.load() is None
    assert f"files are read once more: open {path}: " in caplog.text
    assert reason in caplog.text
    assert os.listdir("/proc/self/fd") == before


def test_nothing_is_left_of_a_file_that_cannot_be_written(store: Store) -> None:
    Path(store.path).mkdir(parents=True)
    (Path(store.path) / "in the way").touch()
    with pytest.raises(OSError, match="directory"):
        store.save(STORED)
    assert os.listdir(os.path.dirname(store.path)) == ["inventory"]


def test_what_a_kill_left_is_written_over(store: Store) -> None:
    store.save(STORED)
    Path(f"{store.path}.part").write_bytes(b"half")
    store.save(STORED)
    assert store.load() == STORED
    assert os.listdir(os.path.dirname(store.path)) == ["inventory"]


def test_what_many_files_have_alike_is_written_once(store: Store) -> None:
    """Such as all hard links to a file, which anybody can make."""
    probes = tuple(("p" * 90, f"{'n' * 90}{number}") for number in range(4000))
    files = tuple(replace(FILE, fingerprint=number, path=f"/opt/{number}", probes=probes) for number in range(1500))
    stored = Stored("1", 1.0, files, b"")
    tracemalloc.start()
    store.save(stored)
    _, taken = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert os.path.getsize(store.path) < 2_000_000
    assert taken < 10_000_000, taken
    loaded = store.load()
    assert loaded == stored
    assert len({id(file.probes) for file in loaded.files}) == 1


def test_inventory_that_could_not_be_loaded_is_not_saved(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    small = Store(os.path.dirname(store.path), "1", max_bytes=1000)
    small.save(STORED)
    small.save(Stored("1", 2.0, (), bytes(1000)))
    assert "is not written: it would have 1," in caplog.text
    assert small.load() == STORED
    store.save(Stored("1", 2.0, (), bytes(1000)))
    assert small.load() is None
    assert "more than 1,000" in caplog.text
