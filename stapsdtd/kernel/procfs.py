"""/proc: processes, their identity and executable mappings.

    55563b0ea000-55563b0eb000 r-xp 00001000 fe:00 1835043    /tmp/demo              a line of /proc/PID/maps

Reading maps directly takes a twelfth of the time of psutil.memory_maps(), which reads smaps and drops device, inode and
offset. A process may exit at any moment: every function returns an empty result if /proc has no entry.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stapsdtd.kernel.host_calls import READ_PROC
from stapsdtd.kernel.reach import cached_status
from stapsdtd.model import FileOffset, Mapping, ProcessKey

_PATH_COLUMN = 73
_READ_BYTES = 65536
MAX_MAPS_BYTES = 16 << 20
"""65,530 mappings, the kernel's default limit, with paths of 150 bytes. With paths of 50 KB it could be 3 GB."""
_DELETED = b" (deleted)"

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO (include/linux/proc_ns.h)."""

_PF_EXITING = 0x4
"""include/linux/sched.h: it ends, though its state does not say so yet."""

DEAD = frozenset("ZX")
"""States of a process, or of a main thread that others outlive, which has no memory any more."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """From /proc/PID/stat: state is one letter; threads counts live ones and an unreaped leader."""

    key: ProcessKey
    state: str
    threads: int


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def stat(pid: int) -> ProcessStat | None:
    return parse_stat(pid, _read(f"/proc/{pid}/stat"))


def parse_stat(pid: int, text: bytes) -> ProcessStat | None:
    """Parse /proc/PID/stat."""
    # the command name, in parentheses, may itself contain spaces and parentheses
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return ProcessStat(ProcessKey(pid, int(fields[19])), fields[0].decode(), int(fields[17]))


def tgid(tid: int) -> int | None:
    """Return the process that a live thread belongs to."""
    match = re.search(rb"^Tgid:\s*(\d+)", _read(f"/proc/{tid}/status"), re.MULTILINE)
    return int(match[1]) if match else None


def parent(pid: int) -> int | None:
    """Return the process's parent."""
    match = re.search(rb"^PPid:\s*(\d+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(match[1]) if match else None


def namespace_pid(pid: int) -> int | None:
    """Return a process's pid in its innermost pid namespace."""
    match = re.search(rb"^NSpid:(?:[\t ]++(\d++))+$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(match[1]) if match else None


def is_filtered() -> bool:
    """Report whether a seccomp filter, such as a container's, may deny this process what its capabilities allow."""
    return re.search(rb"^Seccomp:\s2$", _read("/proc/self/status"), re.MULTILINE) is not None


def comm(pid: int) -> bytes:
    return _read(f"/proc/{pid}/comm").removesuffix(b"\n")


def command_line(pid: int, max_bytes: int) -> list[bytes]:
    """Return a process's arguments, truncated to max_bytes in all.

    They are read from its memory, wherever it says (PR_SET_MM_MAP), so they may be of any length, and reading waits for
    its mmap_lock. Raises OSError.
    """
    descriptor = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, max_bytes)
    finally:
        os.close(descriptor)
    return text.removesuffix(b"\0").split(b"\0") if text else []


def cgroup_lines(pid: int) -> bytes:
    return _read(f"/proc/{pid}/cgroup")


def executable_mappings(pid: int) -> list[Mapping]:
    """Return the executable file mappings, one per line of maps. Anonymous memory and the vdso are left out.

    Of a process that is not root's, what MAX_MAPS_BYTES of text tell.
    """
    most = MAX_MAPS_BYTES if _owner(pid) else None
    maps = _read(f"/proc/{pid}/maps", most)
    if not maps and (thread := memory_holder(pid)) != pid:
        return parse_maps(thread, _read(f"/proc/{pid}/task/{thread}/maps", most))
    return parse_maps(pid, maps)


def _owner(pid: int) -> int:
    """Return the uid that /proc shows as a process's; root if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return 0


def memory_holder(pid: int) -> int:
    """Return the thread whose directory in /proc shows a process's memory: the main one, or another if that ended."""
    leader = stat(pid)
    if leader is None or leader.state not in DEAD or leader.threads <= 1:
        return pid
    states = ((tid, parse_stat(tid, _read(f"/proc/{pid}/task/{tid}/stat"))) for tid in thread_ids(pid))
    return next((tid for tid, thread in states if thread and thread.state not in DEAD), pid)


def parse_maps(pid: int, text: bytes) -> list[Mapping]:
    """Parse /proc/PID/maps. Paths that its text leaves in doubt are read from the process's map_files."""
    mappings = []
    for line in text.split(b"\n"):
        # before the path, only the permissions can contain an x
        if b"x" not in line[:_PATH_COLUMN]:
            continue
        addresses, permissions, offset, dev, inode, *path = line.split(None, 5)
        if b"x" not in permissions or inode == b"0":
            continue
        start, end = addresses.split(b"-")
        major, minor = dev.split(b":")
        mappings.append(
            Mapping(
                start=int(start, 16),
                end=int(end, 16),
                file_offset=FileOffset(int(offset, 16)),
                dev=os.makedev(int(major, 16), int(minor, 16)),
                inode=int(inode),
                path=_path(pid, start, end, path[0]) if path else "",
            )
        )
    return mappings


class Region(NamedTuple):
    """Any line of /proc/PID/maps. dev is encoded as st_dev; path is as in the line, empty if there is none."""

    start: int
    end: int
    permissions: str
    file_offset: int
    dev: int
    inode: int
    path: str

    @property
    def is_file(self) -> bool:
        return self.inode != 0


def regions(pid: int, most_bytes: int) -> list[Region]:
    """Return the mappings of a process in order of their addresses, as far as so many bytes of text tell."""
    lines = _read(f"/proc/{memory_holder(pid)}/maps", most_bytes).split(b"\n")[:-1]
    return [_region(line) for line in lines]


def region_at(pid: int, address: int) -> Region | None:
    """Return the mapping that contains an address; None if there is none, or the process is gone."""
    for line in _read(f"/proc/{memory_holder(pid)}/maps").split(b"\n"):
        start, _, end = line.partition(b" ")[0].partition(b"-")
        if end and int(start, 16) <= address < int(end, 16):
            return _region(line)
    return None


def _region(line: bytes) -> Region:
    addresses, permissions, offset, dev, inode, *path = line.split(None, 5)
    start, end = addresses.split(b"-")
    major, minor = dev.split(b":")
    return Region(
        int(start, 16),
        int(end, 16),
        permissions.decode(),
        int(offset, 16),
        os.makedev(int(major, 16), int(minor, 16)),
        int(inode),
        shown_path(path[0]) if path else "",
    )


def _path(pid: int, start: bytes, end: bytes, raw: bytes) -> str:
    r"""Return a mapping's path from its line of maps, which escapes only newlines, as \012, and marks deleted files.

    A name may contain either text itself; the link in map_files then decides, if it is readable.
    """
    if rb"\012" not in raw and not raw.endswith(_DELETED):
        return shown_path(raw)
    try:
        link = os.readlink(b"/proc/%d/map_files/%b-%b" % (pid, start.lstrip(b"0"), end.lstrip(b"0")))
    except OSError:
        return shown_path(raw.replace(rb"\012", b"\n"))
    if link.endswith(_DELETED) and _is_mapped_as(pid, start, end, link):
        return link.decode(errors="backslashreplace")
    return shown_path(link)


def _is_mapped_as(pid: int, start: bytes, end: bytes, path: bytes) -> bool:
    """Report whether the mapped file is the one at exactly this path."""
    try:
        mapped = cached_status(f"/proc/{pid}/map_files/{start.lstrip(b'0').decode()}-{end.lstrip(b'0').decode()}")
        named = cached_status(os.fsdecode(b"/proc/%d/root%b" % (pid, path)))
    except OSError:
        return False
    return (mapped.st_dev, mapped.st_ino) == (named.st_dev, named.st_ino)


def shown_path(raw: bytes) -> str:
    """Drop the kernel's mark of a deleted file, and escape bytes that are not text."""
    return raw.removesuffix(_DELETED).decode(errors="backslashreplace")


def ways_to(pid: int, mapping: Mapping) -> Iterator[str]:
    """Yield paths that may lead to a mapped file, the most reliable first. The caller must verify what it finds there.

    pid: a process that maps it, or the `memory_holder` of one.

    map_files reaches deleted files, memfds with closed descriptors and other mount namespaces, but needs
    CAP_CHECKPOINT_RESTORE. The process's root reaches files that still have their name; so does this process's root,
    even after the process has exited. A descriptor reaches a memfd.
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
    """Return the target of a link in /proc, in the form of `Mapping.path`; empty if it cannot be read."""
    try:
        return shown_path(os.readlink(os.fsencode(path)))
    except OSError:
        return ""


def thread_ids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def descendants(pids: Iterable[int]) -> Iterator[set[int]]:
    """Yield the processes that some have forked, and so on, as far as the chain of parents is alive: those of one
    thread at a time, of which there may be none.

    Each is yielded before its own children are looked for: whoever notes it by then misses none of them.
    """
    waiting = list(pids)
    seen = set(waiting)
    while waiting:
        parent = waiting.pop()
        # a read misses some if others end meanwhile (proc(5)), so there are two
        for tid in (tid for _ in range(2) for tid in thread_ids(parent)):
            born = set(map(int, _read(f"/proc/{parent}/task/{tid}/children").split())) - seen
            seen |= born
            waiting += born
            yield born


def has_ended(pid: int) -> bool:
    """Report whether no thread of a process runs any more, though its parent may not know yet."""
    text = _read(f"/proc/{pid}/stat")
    found = parse_stat(pid, text)
    if found is None:
        return True
    flags = int(text[text.rfind(b")") + 2 :].split()[6])
    return found.threads <= 1 and (found.state in DEAD or bool(flags & _PF_EXITING))


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace, which identifies it."""
    return os.stat("/proc/self/ns/pid").st_ino


def panics_on_warning() -> bool:
    return _read("/proc/sys/kernel/panic_on_warn").strip() not in {b"", b"0"}


def _read(path: str, most: int | None = None) -> bytes:
    """most: bytes that are read, up to the last whole line."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks, size = [], 0
            while chunk := os.read(descriptor, _READ_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                if most is not None and size > most:
                    return b"".join(chunks)[:most].rpartition(b"\n")[0]
            return b"".join(chunks)
        finally:
            os.close(descriptor)
    except OSError as error:
        # a process that is gone or hidden reads as empty; running out of descriptors or memory is another matter
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise READ_PROC.refused(path, error.errno) from error
        return b""
