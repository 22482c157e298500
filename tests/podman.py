"""Podman with runc, whose storage, state and cgroups are a test's own, so that nothing of it is left."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.support import Ticker, require, wait_for
from tests.users import User

_SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
netns = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "runc"
tmp_dir = "{folder}/tmp"
"""
"""crun takes no cgroups of both versions. The limits of Podman itself are above those that a sandbox may allow."""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
rootless_storage_path = "{folder}/storage"
runroot = "{folder}/run"
"""
_AS_USER = """
set -e
for name in passwd group subuid subgid; do
    mount --bind "$0/$name" /etc/$name
done
exec "$@"
"""


class Podman:
    """folder: on a file system that can be an overlay's. prefix: what runs it. cgroup: where its containers' are."""

    def __init__(self, folder: Path, *, prefix: Sequence[str] = (), cgroup: str = "") -> None:
        for program in ("podman", "runc"):
            require(shutil.which(program), program)
        self.storage = folder / "storage"
        settings = {"CONTAINERS_CONF": _SETTINGS, "CONTAINERS_STORAGE_CONF": _STORAGE}
        self._command = [*prefix, "env", f"HOME={folder}", f"XDG_RUNTIME_DIR={folder}"]
        for name, text in settings.items():
            (folder / name).write_text(text.format(folder=folder))
            self._command.append(f"{name}={folder / name}")
        self._where = ["--cgroup-parent", cgroup] if cgroup else []

    def command(self, *arguments: Path | str) -> list[str]:
        return [*self._command, "podman", *map(str, arguments)]

    def run_command(self, *arguments: Path | str) -> list[str]:
        return self.command("run", *self._where, *arguments)

    def __call__(self, *arguments: Path | str) -> str:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def import_image(self, name: str, tar: Path, *changes: str) -> None:
        """changes: instructions of a Dockerfile."""
        self("import", "--quiet", *(f"--change={change}" for change in changes), tar, name)


class Container:
    """A container in which a program runs that speaks as tests/targets/ticker.c does."""

    def __init__(self, podman: Podman, name: str, *image_and_command: str) -> None:
        self.name = name
        self._podman = podman
        self._begin(*podman.run_command("--interactive", "--name", name, *image_and_command))

    def _begin(self, *command: str) -> None:
        self.ticker = Ticker(*command)
        self.id, pid = self._podman("inspect", "--format={{.Id}} {{.State.Pid}}", self.name).split()
        self.pid = int(pid)

    def restart(self) -> None:
        self._podman("stop", "--time=0", self.name)
        self.ticker.kill()
        self._begin(*self._podman.command("start", "--attach", "--interactive", self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._podman("rm", "--force", "--time=0", self.name)
        self.ticker.kill()


@contextmanager
def podman_of_root(folder: Path) -> Iterator[Podman]:
    cgroup = f"/stapsdtd_podman_{os.getpid()}"
    try:
        with _ended(Podman(folder, cgroup=cgroup)) as podman:
            yield podman
    finally:
        for hierarchy in _cgroup_mounts():
            _remove_cgroups(hierarchy / cgroup.lstrip("/"))


@contextmanager
def podman_of(user: User, folder: Path) -> Iterator[Podman]:
    """Podman of a user who has a name and subordinate ids, which only its commands see. folder: the user's own."""
    require(shutil.which("newuidmap"), "newuidmap, of the package uidmap")
    name = f"user{user.uid}"
    names = folder / "etc"
    names.mkdir()
    for file in ("passwd", "group"):
        shutil.copy(f"/etc/{file}", names)
    with open(names / "passwd", "a") as passwd, open(names / "group", "a") as group:
        passwd.write(f"{name}:x:{user.uid}:{user.uid}::{folder}:/bin/sh\n")
        group.write(f"{name}:x:{user.uid}:\n")
    for file in ("subuid", "subgid"):
        (names / file).write_text(f"{name}:{1 << 30}:65536\n")
    prefix = ["unshare", "--mount", "sh", "-c", _AS_USER, str(names), *user.command(f"USER={name}")]
    podman = Podman(folder, prefix=prefix)
    os.chown(folder, user.uid, user.uid)
    try:
        with _ended(podman):
            yield podman
    finally:
        # ends the process that keeps the user namespace
        podman("system", "migrate")


@contextmanager
def _ended(podman: Podman) -> Iterator[Podman]:
    try:
        yield podman
    finally:
        podman("rm", "--all", "--force", "--time=0")
        # without it, what a user's images have of other ids could not be removed
        podman("rmi", "--all", "--force")


def _cgroup_mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4]) for line in lines if line.partition(" - ")[2].startswith("cgroup")]


def _remove_cgroups(top: Path) -> None:
    def are_removed() -> bool:
        for directory, _, _ in os.walk(top, topdown=False):
            # conmon may be about to end
            with suppress(OSError):
                os.rmdir(directory)
        return not top.exists()

    wait_for(are_removed, f"{top} to be empty")
