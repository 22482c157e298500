from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture
def checkout() -> Iterator[Path]:
    """What ./dev reads, without an environment, where everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "proto", folder / "proto", ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("dev", "pyproject.toml"):
            shutil.copy(ROOT / file, folder)
        yield folder


def dev(
    folder: Path, command: str, user: int | None = None, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "./dev", command],
        cwd=folder,
        env={"PATH": path or os.environ["PATH"]},
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "command", ["demo", "test", "serve", "bench", "soak", "siege", "truth", "pictures", "install", "uninstall"]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_root_one_line_says_what_to_run(checkout: Path, command: str) -> None:
    ended = dev(checkout, command, user=65534)
    assert ended.returncode == 1
    assert ended.stderr == f"dev: {command} needs root; run 'sudo ./dev {command}'\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="./dev first wants root")
def test_without_apt_one_line_says_where_to_look(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("id", "dirname", "cat", "cksum"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    ended = dev(checkout, "demo", path=str(tools))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "no Debian or Ubuntu" in ended.stderr


def test_unknown_command_shows_the_usage(checkout: Path) -> None:
    ended = dev(checkout, "fly")
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: ./dev")
