"""Probe what this host supports, rather than infer it from a version."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import inodes, procfs
from stapsdtd.kernel.connector import ProcessConnector
from stapsdtd.kernel.mapping_programs import MappingPrograms
from stapsdtd.kernel.perf import MappingRing, online_cpus, way_of_opening
from stapsdtd.kernel.tracefs import Tracefs


@dataclass(frozen=True, slots=True)
class Feature:
    """required: the daemon cannot capture without it. The others have a fallback, which detail or remedy names."""

    name: str
    available: bool
    required: bool
    detail: str
    remedy: str


def probe_features() -> list[Feature]:
    return [
        _try("tracefs", _tracefs, required=True),
        _try("uprobe semaphores", _semaphores, required=True),
        _try("tracefs instances", _instances, required=True),
        _try("mapping records", _mapping_records, required=False),
        _try("process connector", _connector, required=False),
        _try("other processes", _other_processes, required=False),
        _try("map_files", _map_files, required=False),
        _try("files of others", _files_of_others, required=False),
        _try("overlays' inodes", _inodes, required=False),
    ]


def _try(name: str, check: Callable[[], str], *, required: bool) -> Feature:
    try:
        return Feature(name, True, required, check(), "")
    except KernelFeatureError as error:
        return Feature(name, False, required, error.reason, error.remedy)


def _tracefs() -> str:
    return f"at {Tracefs.locate().root}"


def _semaphores() -> str:
    """Reference counters of uprobes, since Linux 4.20. tracefs's README gives the accepted syntax."""
    if "(ref_ctr_offset)" not in Tracefs.locate().read("README").replace("[", "").replace("]", ""):
        raise KernelFeatureError(
            "uprobe semaphores", "uprobe_events does not support reference counters", "use Linux 4.20 or newer"
        )
    return "uprobe_events supports reference counters"


def _instances() -> str:
    path = Tracefs.locate().path("instances")
    if not os.access(path, os.W_OK):
        raise KernelFeatureError("tracefs instances", f"{path} is not writable", "run as root")
    return "private ring buffers"


def _mapping_records() -> str:
    try:
        MappingRing(online_cpus()[0]).close()
    except KernelFeatureError as refused:
        try:
            programs = MappingPrograms()
        except KernelFeatureError as error:
            raise KernelFeatureError("mapping records", f"{refused.reason}; {error.reason}", refused.remedy) from error
        programs.close()
        return f"a BPF program reports executable mappings, by {programs.way}, since perf does not ({refused.reason})"
    return f"perf reports executable mappings{way_of_opening()}"


def _connector() -> str:
    ProcessConnector().close()
    return "netlink reports fork, exec and exit"


def _other_processes() -> str:
    try:
        # kthreadd has all capabilities, so being the same user is not enough; unlike init, it is the same everywhere
        os.readlink("/proc/2/root")
    except FileNotFoundError:
        return "no process to test with in this pid namespace"
    except PermissionError as error:
        raise KernelFeatureError(
            "other processes",
            f"/proc/PID of other users is denied ({error.strerror}): "
            "memfds and files in other mount namespaces are out of reach",
            "run as root or with CAP_SYS_PTRACE",
        ) from error
    return "their files are accessible"


def _map_files() -> str:
    for mapping in procfs.executable_mappings(os.getpid()):
        try:
            os.stat(next(procfs.ways_to(os.getpid(), mapping)))
        except OSError as error:
            raise KernelFeatureError(
                "map_files",
                f"/proc/PID/map_files is denied ({error.strerror}): deleted files and closed memfds are out of reach",
                "run as root or with CAP_CHECKPOINT_RESTORE",
            ) from error
        break
    return "deleted files and memfds are accessible"


def _files_of_others() -> str:
    """Try a file with mode 0, standing in for files that only another user may read."""
    descriptor = os.memfd_create("stapsdt-unreadable", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0)
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError as error:
        raise KernelFeatureError(
            "files of others",
            f"files readable only by their owner are denied ({error.strerror}): "
            "programs in private directories are out of reach",
            "run as root or with CAP_DAC_READ_SEARCH",
        ) from error
    finally:
        os.close(descriptor)
    return "files readable only by their owner are accessible"


def _inodes() -> str:
    inodes.load()
    return "a BPF iterator shows which containers' files are the same"
