"""An image with the daemon in it: what deploy/Dockerfile makes, of a root and an installed tree kept in .cache.

Kept are packages of Debian and PyPI, and the interpreter. How these are installed, tests/kernel/test_install.py tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.support import ROOT, require

SOURCES = (
    "LICENSE", "README.md", "dev", "hatch_build.py", "pyproject.toml",
    "bpf", "deploy/client", "deploy/provider", "proto", "stapsdtd", "systemd",
)  # fmt: skip
"""What an installation is made from."""
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

_CACHE = ROOT / ".cache" / "containers"
_SUITE = "bookworm"
_PACKAGES = ("base-passwd", "libbpf1", "libpython3-stdlib", "libstdc++6", "python3-minimal")
"""What debian:12-slim and the Dockerfile's packages have of which the daemon takes something."""
_SETTLING = ("ENV", "VOLUME", "ENTRYPOINT", "CMD")


def instructions(name: str) -> list[str]:
    """What the Dockerfile's instructions of a kind say, each on one line."""
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def changes() -> list[str]:
    """The instructions that `podman import` takes."""
    return [f"{name} {text}" for name in _SETTLING for text in instructions(name)]


def copy_sources(folder: Path) -> None:
    """Building writes into the tree, which other tests read."""
    (folder / "deploy").mkdir(parents=True)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


def root_tar(folder: Path) -> Path:
    """Return the image's root as a file in a folder, with the daemon's own code as it is now."""
    kept = _CACHE / f"{_key()}.tar"
    if not kept.exists():
        _make(kept)
    tar = Path(shutil.copy(kept, folder / "root.tar"))
    with tarfile.open(tar, "a") as appended:
        (packages,) = [name for name in appended.getnames() if name.endswith("/site-packages")]
        appended.add(ROOT / "stapsdtd", f"{packages}/stapsdtd")
    return tar


def _key() -> str:
    parts = [
        ROOT / name for name in ("pyproject.toml", "deploy/client/pyproject.toml", "deploy/provider/pyproject.toml")
    ]
    content = [*map(Path.read_text, parts), _SUITE, *_PACKAGES]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


def _make(kept: Path) -> None:
    require(shutil.which("mmdebstrap"), "mmdebstrap")
    _CACHE.mkdir(parents=True, exist_ok=True)
    for older in _CACHE.glob("*.tar"):
        older.unlink()
    with tempfile.TemporaryDirectory(dir=_CACHE) as name:
        made = Path(name)
        root = made / "root"
        # the packages' own scripts would take most of the time, and only one does something that is needed
        hooks = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
        _run("mmdebstrap", "--quiet", "--variant=extract", hooks, f"--include={','.join(_PACKAGES)}", _SUITE, str(root))
        for file in ("passwd", "group"):
            shutil.copy(root / "usr" / "share" / "base-passwd" / f"{file}.master", root / "etc" / file)
        copy_sources(made / "sources")
        _run("./dev", "install", cwd=made / "sources", env={**os.environ, "DESTDIR": str(root)})
        (code,) = root.glob("opt/stapsdtd/lib/python*/site-packages/stapsdtd")
        shutil.rmtree(code)
        _run("tar", "--create", f"--file={made / 'root.tar'}", f"--directory={root}", ".")
        (made / "root.tar").rename(kept)


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
