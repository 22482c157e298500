"""Files that the daemon's own mounts hide from it, and the host's first process sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.model import Object
from stapsdtd.procs.file_keys import is_host_file, was_written_to
from tests.support import Ticker
from tests.unit.test_objects import LOCAL, made_store

pytestmark = pytest.mark.kernel

_TMPFS = "mount -t tmpfs none {folder} && cp {program} {folder}/hidden"
_OVERLAY = """
mount -t tmpfs none {folder}
mkdir {folder}/lower {folder}/upper {folder}/work {folder}/merged
cp {program} {folder}/lower/hidden
mount -t overlay -o lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work none {folder}/merged
"""


def mapped_by(pid: int, path: str) -> Object:
    (mapping,) = [mapping for mapping in procfs.executable_mappings(pid) if mapping.path == path]
    found = made_store().resolve(pid, mapping)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("script", "inside"), [(_TMPFS, "hidden"), (_OVERLAY, "merged/hidden")], ids=["tmpfs", "overlay"]
)
def test_what_the_first_process_sees_is_the_hosts(
    tmp_path: Path, ticker_program: Path, script: str, inside: str
) -> None:
    path = tmp_path / inside
    mounting = script.format(folder=tmp_path, program=ticker_program)
    with Ticker("unshare", "-m", "sh", "-ec", f"{mounting}\nexec {path}") as host:
        found = mapped_by(host.pid, str(path))
        assert not path.exists()
        assert not is_host_file(found, LOCAL)
        # who is the first process here may let nobody look
        filesystems = Filesystems(first_pid=host.pid)
        assert is_host_file(found, filesystems)
        assert not was_written_to(found, filesystems)
        os.utime(f"/proc/{host.pid}/root{path}", (1, 1))
        assert not is_host_file(found, filesystems)
        # what is written to the overlay is another file, in its upper layer
        assert was_written_to(found, filesystems) is (script == _TMPFS)
