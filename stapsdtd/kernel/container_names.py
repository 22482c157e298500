r"""Find the names that engines gave containers, by the containers' ids, in the state that they keep for themselves.

    /var/lib/docker/containers/ID/config.v2.json               Docker
        {"ID": "8d0c…", "Name": "/web", …}
    /var/lib/containers/storage/overlay-containers/containers.json, or volatile-containers.json for --rm
        [{"id": "8d0c…", "names": ["web"], …}, …]              Podman
        [{"id": "8d0c…", "names": ["k8s_web_shop-7d9f_prod_5f1b6a52-…_0"], …}, …]              CRI-O
    /run/containerd/io.containerd.runtime.v2.task/NAMESPACE/ID/config.json
        {"annotations": {"nerdctl/name": "web", …}, …}         nerdctl
        {"annotations": {"io.kubernetes.cri.container-name": "web",
                         "io.kubernetes.cri.sandbox-name": "shop-7d9f",
                         "io.kubernetes.cri.sandbox-namespace": "prod", …}, …}          Kubernetes with containerd

A container of a pod is called NAMESPACE/POD/CONTAINER here: `prod/shop-7d9f/web`.

Only files that nobody but root can write are believed. A mistake in one costs no more than the names that it tells.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from msgspec import DecodeError, Raw, Struct, field, json

from stapsdtd.config import ContainerSettings
from stapsdtd.kernel import reach

_Kind = TypeVar("_Kind")

FIRST_PROCESS = "/proc/1/root"
"""The host's root, also where the daemon has mounts of its own."""
_STORAGE_FILES = ("containers.json", "volatile-containers.json")
_TASKS = "io.containerd.runtime.v2.task"
_MAX_BYTES = 16 << 20
"""Of one file; Podman and CRI-O write about 1 KiB for each container."""
_ID = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_KUBERNETES = re.compile(r"k8s_([^_]+)_([^_]+)_([^_]+)_[^_]+_[0-9]+")
_SANDBOX = "POD"
"""What is called so holds a pod's namespaces and runs no program of the pod's."""


class _DockerConfig(Struct):
    name: str = field(name="Name", default="")


class _Stored(Struct):
    id: str
    names: list[str] = []


class _Annotations(Struct):
    nerdctl: str = field(name="nerdctl/name", default="")
    container: str = field(name="io.kubernetes.cri.container-name", default="")
    pod: str = field(name="io.kubernetes.cri.sandbox-name", default="")
    namespace: str = field(name="io.kubernetes.cri.sandbox-namespace", default="")


class _Bundle(Struct):
    annotations: _Annotations


class ContainerNames:
    """Nothing is kept: a container may be renamed at any time."""

    def __init__(self, settings: ContainerSettings, root: str = FIRST_PROCESS) -> None:
        """root: of the file system; this process's own if it may not look there."""
        self._settings = settings
        self._first_root = root

    def of(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the names of those containers that have one. Reads some files for each id."""
        wanted = {each for each in ids if _ID.fullmatch(each)}
        if not wanted:
            return {}
        root = self._first_root if os.access(self._first_root, os.X_OK) else ""
        names: dict[str, str] = {}
        for storage in self._settings.storage:
            names |= {each: name for each, name in _stored(root + storage) if each in wanted}
        namespaces = [
            f"{root}{state}/{_TASKS}/{namespace}"
            for state in self._settings.containerd
            for namespace in _listed(f"{root}{state}/{_TASKS}")
        ]
        for each in wanted - names.keys():
            told = (
                *(_docker_name(f"{root}{data}/containers/{each}/config.v2.json") for data in self._settings.docker),
                *(_task_name(f"{namespace}/{each}/config.json") for namespace in namespaces),
            )
            if name := next(filter(None, told), None):
                names[each] = name
        return names


def called(wanted: str, names: Mapping[str, str]) -> list[str]:
    """Return the ids of containers with this name; of a pod's, the last parts are enough: `web`, `shop-7d9f/web`."""
    return [each for each, name in names.items() if f"/{name}".endswith(f"/{wanted}")] if wanted else []


def _stored(storage: str) -> Iterator[tuple[str, str]]:
    """Yield ids and names of the containers in a graphroot, which has a folder for each storage driver."""
    for folder in _listed(storage):
        for file in _STORAGE_FILES if folder.endswith("-containers") else ():
            for record in _decoded(f"{storage}/{folder}/{file}", list[Raw]) or ():
                stored = _parsed(record, _Stored)
                name = next(filter(None, map(_name, stored.names)), None) if stored else None
                if stored and name:
                    yield stored.id, name


def _docker_name(path: str) -> str | None:
    config = _decoded(path, _DockerConfig)
    return _name(config.name.removeprefix("/")) if config else None


def _task_name(path: str) -> str | None:
    bundle = _decoded(path, _Bundle)
    if bundle is None:
        return None
    told = bundle.annotations
    return _name(told.nerdctl) or _joined(told.namespace, told.pod, told.container)


def _name(name: str) -> str | None:
    """Return a name as it is shown; None if it is none that an engine gives."""
    if of_pod := _KUBERNETES.fullmatch(name):
        container, pod, namespace = of_pod.groups()
        return None if container == _SANDBOX else _joined(namespace, pod, container)
    return _joined(name)


def _joined(*parts: str) -> str | None:
    return "/".join(parts) if all(map(_PART.fullmatch, parts)) else None


def _listed(folder: str) -> list[str]:
    with suppress(OSError), _held(folder) as held:
        return os.listdir(f"/proc/self/fd/{held}")
    return []


def _decoded(path: str, kind: type[_Kind]) -> _Kind | None:
    content = _content(path)
    return None if content is None else _parsed(content, kind)


def _parsed(content: bytes | Raw, kind: type[_Kind]) -> _Kind | None:
    with suppress(DecodeError, RecursionError):
        return json.decode(content, type=kind)
    return None


def _content(path: str) -> bytes | None:
    """Return what a file contains if nobody but root can write it, and it is not too large."""
    with suppress(OSError), _held(path) as held:
        status = os.fstat(held)
        is_roots = status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISREG(status.st_mode) and is_roots and status.st_size <= _MAX_BYTES:
            with open(f"/proc/self/fd/{held}", "rb") as file:
                return file.read(_MAX_BYTES)
    return None


@contextmanager
def _held(path: str) -> Iterator[int]:
    """Hold a file open, whatever kind it is of, with links in the path followed in its own root. Raises OSError."""
    held = reach.hold(path, may_query=lambda: True)
    try:
        yield held
    finally:
        os.close(held)
