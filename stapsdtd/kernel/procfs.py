"""/proc: processes, their identity and executable mappings.

    55563b0ea000-55563b0eb000 r-xp 00001000 fe:00 1835043    /tmp/demo              a line of /proc/PID/maps

Reading maps by hand takes a twelfth of psutil.memory_maps(), which reads smaps and drops device, inode and offset.
A process may go at any moment, so each function answers with nothing where /proc has nothing.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stapsdtd.kernel.reach import cached_status
from stapsdtd.model import FileOffset, Mapping, ProcessKey

_BEFORE_THE_PATH = 73
_ENOUGH = 65536
_DELETED = b" (deleted)"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """From /proc/PID/stat: state is one letter, threads counts the living ones and an unreaped leader."""

    key: ProcessKey
    state: str
    threads: int


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def stat(pid: int) -> ProcessStat | None:
    text = _read(f"/proc/{pid}/stat")
    # the command name, in parentheses, may hold blanks and parentheses
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return ProcessStat(ProcessKey(pid, int(fields[19])), fields[0].decode(), int(fields[17]))


def tgid(tid: int) -> int | None:
    """Answer the process that a living thread belongs to."""
    found = re.search(rb"^Tgid:\s*(\d+)", _read(f"/proc/{tid}/status"), re.MULTILINE)
    return int(found.group(1)) if found else None


def namespace_pid(pid: int) -> int | None:
    """Answer a process's number in the innermost pid namespace that it is in."""
    found = re.search(rb"^NSpid:[\t ](?:.*[\t ])?(\d+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found.group(1)) if found else None


def is_filtered() -> bool:
    """Answer whether a seccomp filter, such as a container's, may refuse this process what its capabilities allow."""
    return re.search(rb"^Seccomp:\s2$", _read("/proc/self/status"), re.MULTILINE) is not None


def comm(pid: int) -> bytes:
    return _read(f"/proc/{pid}/comm").removesuffix(b"\n")


def command_line(pid: int, most_bytes: int) -> list[bytes]:
    """Return a process's arguments as far as that many bytes hold them.

    They lie in its memory where it says (PR_SET_MM_MAP), so that they may be as many as it likes, and reading waits for
    its mmap_lock. Raises OSError.
    """
    descriptor = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)
    return text.removesuffix(b"\0").split(b"\0") if text else []


def cgroup_lines(pid: int) -> bytes:
    return _read(f"/proc/{pid}/cgroup")


def executable_mappings(pid: int) -> list[Mapping]:
    """Every file mapped executable, once for each of its lines. Anonymous memory and the vdso are left out."""
    found = []
    for line in _read(f"/proc/{pid}/maps").split(b"\n"):
        # before the path, no field but the permissions can hold an x
        if b"x" not in line[:_BEFORE_THE_PATH]:
            continue
        addresses, permissions, offset, dev, inode, *path = line.split(None, 5)
        if b"x" not in permissions or inode == b"0":
            continue
        start, end = addresses.split(b"-")
        major, minor = dev.split(b":")
        found.append(
            Mapping(
                start=int(start, 16),
                end=int(end, 16),
                file_offset=FileOffset(int(offset, 16)),
                dev=os.makedev(int(major, 16), int(minor, 16)),
                inode=int(inode),
                path=_path(pid, start, end, path[0]) if path else "",
            )
        )
    return found


class Region(NamedTuple):
    """A line of /proc/PID/maps, whatever it is of."""

    start: int
    end: int
    is_file: bool


def region_at(pid: int, address: int) -> Region | None:
    """Return what a process has at an address; None where that is nothing, or the process is gone."""
    for line in _read(f"/proc/{pid}/maps").split(b"\n"):
        addresses, _, rest = line.partition(b" ")
        start, _, end = addresses.partition(b"-")
        if end and int(start, 16) <= address < int(end, 16):
            return Region(int(start, 16), int(end, 16), rest.split(None, 4)[3] != b"0")
    return None


def _path(pid: int, start: bytes, end: bytes, raw: bytes) -> str:
    r"""A mapping's path from its line, which escapes a newline as \012 and nothing else, and marks what was deleted.

    A name may have either in itself; then the kernel's own link tells, where this process may read it.
    """
    if rb"\012" not in raw and not raw.endswith(_DELETED):
        return shown_path(raw)
    try:
        link = os.readlink(b"/proc/%d/map_files/%b-%b" % (pid, start.lstrip(b"0"), end.lstrip(b"0")))
    except OSError:
        return shown_path(raw.replace(rb"\012", b"\n"))
    if link.endswith(_DELETED) and _is_there(pid, start, end, link):
        return link.decode(errors="backslashreplace")
    return shown_path(link)


def _is_there(pid: int, start: bytes, end: bytes, path: bytes) -> bool:
    """Whether a process maps the file that has this very name."""
    try:
        mapped = cached_status(f"/proc/{pid}/map_files/{start.lstrip(b'0').decode()}-{end.lstrip(b'0').decode()}")
        named = cached_status(os.fsdecode(b"/proc/%d/root%b" % (pid, path)))
    except OSError:
        return False
    return (mapped.st_dev, mapped.st_ino) == (named.st_dev, named.st_ino)


def shown_path(raw: bytes) -> str:
    """Drop the kernel's mark of a deleted file, and show bytes that are no text harmlessly."""
    return raw.removesuffix(_DELETED).decode(errors="backslashreplace")


def ways_to(pid: int, mapping: Mapping) -> Iterator[str]:
    """Paths that may reach a mapped file, the surest first; the caller compares what it finds there.

    map_files reaches deleted files, memfds with closed descriptors and other mount namespaces, and wants
    CAP_CHECKPOINT_RESTORE; the process's root reaches what still has its name, and this process's own root does so also
    when the other process has ended; a descriptor reaches a memfd.
    """
    yield f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    if mapping.path.startswith("/"):
        yield f"/proc/{pid}/root{mapping.path}"
        yield mapping.path
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        yield f"/proc/{pid}/fd/{descriptor}"


def shown_link(path: str) -> str:
    """Answer where a link of /proc leads, as `Mapping.path` would show it; empty where it leads nowhere."""
    try:
        return shown_path(os.readlink(os.fsencode(path)))
    except OSError:
        return ""


def thread_ids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def pid_namespace() -> int:
    """Answer the inode of this process's pid namespace, which tells whose pids its numbers are."""
    return os.stat("/proc/self/ns/pid").st_ino


def panics_on_warning() -> bool:
    return _read("/proc/sys/kernel/panic_on_warn").strip() not in {b"", b"0"}


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks = []
            while chunk := os.read(descriptor, _ENOUGH):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            os.close(descriptor)
    except OSError as error:
        # a process that is gone or hidden has nothing to say; want of descriptors or memory says nothing of the process
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        return b""
