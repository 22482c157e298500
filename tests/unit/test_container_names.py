"""Names of containers, in the words of each engine's own files. They have to belong to root, as these tests' do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.config import ContainerSettings
from stapsdtd.kernel.container_names import ContainerNames, called

ID, OTHER, THIRD = "8d0c" * 16, "c0ff" * 16, "ab12" * 16
DOCKER = f"var/lib/docker/containers/{ID}/config.v2.json"
STORED = "var/lib/containers/storage/overlay-containers/containers.json"
VOLATILE = "var/lib/containers/storage/vfs-containers/volatile-containers.json"
TASK = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
K3S = f"run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
CRI = "io.kubernetes.cri"
POD = {f"{CRI}.sandbox-name": "shop-7d9f", f"{CRI}.sandbox-namespace": "prod", f"{CRI}.container-type": "container"}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's files are believed")


def write(root: Path, path: str, content: Any) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    file.chmod(0o600)
    return file


def names(root: Path, *ids: str) -> dict[str, str]:
    return ContainerNames(ContainerSettings(), str(root)).of(ids or [ID])


@pytest.mark.parametrize(
    ("path", "content", "name"),
    [
        (DOCKER, {"ID": ID, "Name": "/web", "Driver": "overlay2"}, "web"),
        (DOCKER, {"ID": ID, "Name": "/k8s_web_shop-7d9f_prod_5f1b6a52-8d0c_0"}, "prod/shop-7d9f/web"),
        (STORED, [{"id": OTHER, "names": ["db"]}, {"id": ID, "names": ["web"], "flags": {"Volatile": True}}], "web"),
        (VOLATILE, [{"id": ID, "names": ["web"]}], "web"),
        (STORED, [{"id": ID, "names": ["k8s_web_shop-7d9f_prod_5f1b6a52-8d0c_2"]}], "prod/shop-7d9f/web"),
        (TASK, {"annotations": {"nerdctl/name": "web", "other": 1}, "process": {}}, "web"),
        (TASK, {"annotations": POD | {f"{CRI}.container-name": "web"}}, "prod/shop-7d9f/web"),
        (K3S, {"annotations": POD | {f"{CRI}.container-name": "web"}}, "prod/shop-7d9f/web"),
    ],
)
def test_each_engine_names_its_own(tmp_path: Path, path: str, content: Any, name: str) -> None:
    write(tmp_path, path, content)
    assert names(tmp_path) == {ID: name}
    assert names(tmp_path, THIRD, "web") == {}


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (DOCKER, ""),
        (DOCKER, "{"),
        (DOCKER, "[" * 100_000),
        (DOCKER, '{"Name":' + "[" * 100_000),
        (DOCKER, {"Name": None}),
        (DOCKER, {"Name": "/"}),
        (DOCKER, {"Name": "/\x1b[2J"}),
        (DOCKER, {"Name": "/" + "x" * 254}),
        (DOCKER, {"Name": "/../web"}),
        (DOCKER, {"Name": "/wéb"}),
        (DOCKER, {"Name": "/k8s_POD_shop-7d9f_prod_5f1b6a52_0"}),
        (STORED, {"id": ID, "names": ["web"]}),
        (STORED, [{"id": ID}]),
        (STORED, [{"id": ID, "names": []}]),
        (STORED, [{"id": ID, "names": ["a b"]}]),
        (TASK, {}),
        (TASK, {"annotations": {}}),
        (TASK, {"annotations": POD}),
        (TASK, {"annotations": {f"{CRI}.container-name": "web"}}),
        (TASK, {"annotations": POD | {f"{CRI}.container-name": "a/b"}}),
    ],
)
def test_what_is_no_name(tmp_path: Path, path: str, content: Any) -> None:
    write(tmp_path, path, content)
    assert names(tmp_path) == {}


def test_one_wrong_record_costs_no_other_name(tmp_path: Path) -> None:
    write(tmp_path, STORED, [7, {"id": 7}, {"id": OTHER, "names": "db"}, {"id": ID, "names": ["\x00", "web"]}])
    write(tmp_path, VOLATILE, "{")
    write(tmp_path, DOCKER.replace(ID, THIRD), {"Name": "/third"})
    assert names(tmp_path, ID, OTHER, THIRD) == {ID: "web", THIRD: "third"}


def test_only_files_of_roots_alone_are_believed(tmp_path: Path) -> None:
    file = write(tmp_path, DOCKER, {"Name": "/web"})
    os.chown(file, 12345, 0)
    assert names(tmp_path) == {}
    os.chown(file, 0, 0)
    assert names(tmp_path) == {ID: "web"}
    file.chmod(0o602)
    assert names(tmp_path) == {}


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / DOCKER
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert names(tmp_path) == {}
    path.unlink()
    path.mkdir()
    assert names(tmp_path) == {}


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, DOCKER, {"Name": "/web"})
    os.truncate(file, 1 << 40)
    assert names(tmp_path) == {}


def test_links_are_followed(tmp_path: Path) -> None:
    """Such as one from /var/lib/docker to another disk."""
    root = tmp_path / "root"
    write(root, DOCKER.replace("var/lib/docker", "disk/docker"), {"Name": "/web"})
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/docker").symlink_to("../../disk/docker")
    assert names(root) == {ID: "web"}


def test_root_that_may_not_be_looked_at(tmp_path: Path) -> None:
    data = tmp_path / "docker"
    write(data, f"containers/{ID}/config.v2.json", {"Name": "/web"})
    settings = ContainerSettings(docker=(str(tmp_path / "none"), str(data)))
    assert ContainerNames(settings, "/proc/0/root").of([ID]) == {ID: "web"}
    # another process's root, with links followed there
    assert ContainerNames(settings, f"/proc/{os.getpid()}/root").of([ID]) == {ID: "web"}


def test_called() -> None:
    known = {ID: "prod/shop-7d9f/web", OTHER: "web", THIRD: "test/shop/db"}
    assert called("web", known) == [ID, OTHER]
    assert called("shop-7d9f/web", known) == [ID]
    assert called("prod/shop-7d9f/web", known) == [ID]
    for wrong in ("", "/", "we", "7d9f/web", "shop-7d9f", "prod"):
        assert called(wrong, known) == []
