"""What the kernel shows of the inodes behind mapped files."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stapsdtd.kernel import procfs
from stapsdtd.kernel.inodes import InodeReader, ProcessInodes
from stapsdtd.kernel.locked import LockedCalls
from tests.kernel.test_overlays import overlay
from tests.support import ROOT, Ticker
from tests.units import capabilities, with_capabilities

pytestmark = [pytest.mark.kernel, pytest.mark.vm]


_MANY = 800
"""Mappings, which the kernel returns in two buffers. Python opens a descriptor for each."""


@pytest.fixture(scope="module")
def reader() -> InodeReader:
    return InodeReader()


def test_one_process_is_shown(reader: InodeReader, ticker: Ticker) -> None:
    (mapping,) = [each for each in procfs.executable_mappings(ticker.pid) if each.path.endswith("/ticker")]
    inodes = reader.mapped_by(ticker.pid)
    found = inodes[mapping.start]
    assert found.number == mapping.inode
    assert found.kind
    assert {each.start for each in procfs.executable_mappings(ticker.pid)} <= inodes.keys()
    assert found not in reader.mapped_by(os.getpid()).values()
    assert ProcessInodes(ticker.pid, LockedCalls(), lambda: reader).at(mapping.start) == found


def test_open_file_is_what_mapping_it_shows(reader: InodeReader, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"content")
    (tmp_path / "three").hardlink_to(tmp_path / "one")
    (tmp_path / "empty").touch()
    found = {}
    for path in tmp_path.iterdir():
        with path.open("rb") as file:
            found[path.name] = reader.of_open(file.fileno())
            status = os.fstat(file.fileno())
        inode = found[path.name]
        assert inode is not None
        assert (inode.dev, inode.number) == (status.st_dev, status.st_ino)
    assert len(set(found.values())) == 3


def test_process_may_map_more_than_one_read_returns(reader: InodeReader, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file, ExitStack() as stack:
        for _ in range(_MANY):
            stack.enter_context(mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ))
        of_file = [each for each in reader.mapped_by(os.getpid()).values() if each.number == path.stat().st_ino]
    assert len(of_file) == _MANY
    assert len(set(of_file)) == 1


def test_overlays_show_their_layers_file(reader: InodeReader, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "file").write_bytes(b"content")
    found = set()
    with overlay(layer, tmp_path / "one") as one, overlay(layer, tmp_path / "two") as two:
        for folder in (layer, one, two):
            with (folder / "file").open("rb") as file:
                found.add(reader.of_open(file.fileno()))
        with (two / "file").open("ab") as file:
            file.write(b"copied up")
        with (two / "file").open("rb") as file:
            copied = reader.of_open(file.fileno())
    assert len(found) == 1
    assert copied not in found


def test_process_that_is_gone_has_none(reader: InodeReader, ticker: Ticker) -> None:
    ticker.kill()
    assert reader.mapped_by(ticker.pid) == {}


def test_services_capabilities_are_enough_and_needed() -> None:
    script = "from stapsdtd.kernel import inodes; print(inodes.inode_reader() is None, inodes.why_no_reader())"

    def said(*without: str) -> str:
        prefix = with_capabilities(name for name in capabilities() if name not in without)
        command = [*prefix, sys.executable, "-c", script]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert said().startswith("False")
    for name in ("bpf", "perfmon"):
        assert said(name).startswith("True inodes.bpf.o is rejected")
