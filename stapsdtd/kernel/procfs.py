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

from stapsdtd.model import FileOffset, Mapping, ProcessKey

_EXECUTABLE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*) *(.*)$", re.MULTILINE
)
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


def executable_mappings(pid: int) -> list[Mapping]:
    """Every file mapped executable, once for each of its lines. Anonymous memory and the vdso are left out."""
    return [
        Mapping(
            start=int(start, 16),
            end=int(end, 16),
            file_offset=FileOffset(int(offset, 16)),
            dev=os.makedev(int(major, 16), int(minor, 16)),
            inode=int(inode),
            path=_shown_path(path),
        )
        for start, end, offset, major, minor, inode, path in _EXECUTABLE.findall(_read(f"/proc/{pid}/maps"))
    ]


def _shown_path(raw: bytes) -> str:
    """Undo maps' escape of the newline, the only one it makes, drop its mark of a deleted file, and show other bytes
    harmlessly.
    """
    path = raw.removesuffix(_DELETED).replace(rb"\012", b"\n")
    return path.decode(errors="backslashreplace")


def ways_to(pid: int, mapping: Mapping) -> Iterator[str]:
    """Paths that may reach a mapped file, the surest first; the caller compares what it finds there.

    map_files reaches deleted files, memfds with closed descriptors and other mount namespaces, and wants
    CAP_CHECKPOINT_RESTORE; the process's root reaches what still has its name; a descriptor reaches a memfd.
    """
    yield f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    if mapping.path.startswith("/"):
        yield f"/proc/{pid}/root{mapping.path}"
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        yield f"/proc/{pid}/fd/{descriptor}"


def shown_link(path: str) -> str:
    """Answer where a link of /proc leads, as `Mapping.path` would show it; empty where it leads nowhere."""
    try:
        return _shown_path(os.readlink(os.fsencode(path)))
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
        with open(path, "rb", buffering=0) as file:
            chunks = []
            while chunk := file.read(65536):
                chunks.append(chunk)
            return b"".join(chunks)
    except OSError as error:
        # a process that is gone or hidden has nothing to say; want of descriptors or memory says nothing of the process
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        return b""
