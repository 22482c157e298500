"""Looks for ELF files that are new since the last look, in a process of its own:

    python -I -S walking.py SOCKET ROOT MAX_NAMES

Receives what to do, one item a message, until the sender shuts down:

    I                           run at idle priority
    K and a descriptor          fingerprints that are known, 8 bytes each
    X/usr/lib/debug             a directory to leave out
    Tr/usr/lib                  a directory of which to trust what root alone can change; r: with all below it
    A./opt/app/bin              a directory to take as it is; .: without those below it

Sends what it finds. A fingerprint stands for a path and its file's device, inode, size and times:

    D mtime path                and the directory, if it is worth watching; d: of one that is taken as it is
    k fingerprint...            files that are known
    n fingerprint...            files that are none to know: not ELF
    F fingerprint path          and an ELF file, open for reading
    L path                      a named directory with more than MAX_NAMES names in and below it: the rest is left out
    .                           that was all

An ELF file's fingerprint is odd and any other file's even, so that a known one tells whether its directory is worth
watching. What is named first is looked at first, and what one named directory holds costs the others nothing.

Symbolic links are not followed, except to the directories that are named, and nothing but regular files is opened.
"""

import ctypes
import hashlib
import mmap
import os
import socket
import stat
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MAX_DEPTH = 24
_WATCHED_DEPTH = 1
"""Directories this far below a named one are watched whatever is in them: packages come into them."""
_FINGERPRINTS = 512
"""In a message."""
_RECENT_NS = 1_000_000_000
"""A file that changed this lately may still be written to, within one tick of the file system's clock."""
_MAX_MESSAGE_BYTES = 1 << 16
_OPENAT2 = 437
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_IN_ROOT = 0x10
_HELD = os.O_PATH | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_ELF = b"\x7fELF"
_MIN_ELF_BYTES = 52
_STATUS = struct.Struct("<QQQqq")
_MTIME = struct.Struct("<q")
_FIRST_USER_GID = 1000

_NEVER_ELF = (
    ".a", ".c", ".cc", ".class", ".conf", ".cpp", ".css", ".debug", ".el", ".elc", ".gz", ".h", ".hpp", ".html", ".jar",
    ".js", ".json", ".ko", ".la", ".lua", ".map", ".md", ".mo", ".o", ".pc", ".php", ".pl", ".pm", ".png", ".pod",
    ".ps", ".py", ".pyc", ".pyi", ".rb", ".rs", ".sh", ".sql", ".svg", ".tcl", ".ts", ".txt", ".xml", ".xz", ".yaml",
    ".yml", ".zip", ".zst",
)  # fmt: skip
"""Names of files that no process maps executable: most files of a host, and not even asked for their status."""

_libc = ctypes.CDLL(None, use_errno=True)


class _TooManyError(Exception):
    """A named directory has more names than are looked at."""


class _Directory:
    """One that is being looked at. is_watched: D was sent for it."""

    def __init__(self, descriptor: int, path: str, parent: "_Directory | None", *, is_any_owner: bool) -> None:
        self.descriptor = descriptor
        self.path = path
        self.parent = parent
        self.is_any_owner = is_any_owner
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.status = os.fstat(descriptor)
        self.is_watched = False


class _Walker:
    def __init__(
        self, connection: socket.socket, known: frozenset[int], left_out: frozenset[str], max_names: int
    ) -> None:
        self._connection = connection
        self._max_names = max_names
        self._known = known
        self._left_out = left_out
        self._names = 0
        self._looks: dict[tuple[int, int], set[tuple[bool, bool]]] = {}
        self._sent: set[bytes] = set()
        self._fingerprints = {b"k": array("Q"), b"n": array("Q")}

    def walk(self, root: int, named: str, *, is_deep: bool, is_any_owner: bool) -> None:
        """Look at a directory that was named, if there is one."""
        with suppress(OSError), _closing(_open_in(root, named)) as held:
            path = os.readlink(f"/proc/self/fd/{held}")
            is_left_out = any(f"{path}/".startswith(f"{each}/") for each in self._left_out)
            if not is_left_out and (is_any_owner or _are_roots(root, path)):
                with _closing(os.open(f"/proc/self/fd/{held}", _DIRECTORY)) as directory:
                    self._names = 0
                    try:
                        self._walk(_Directory(directory, path, None, is_any_owner=is_any_owner), is_deep=is_deep)
                    except _TooManyError:
                        self._send(b"L" + os.fsencode(path))

    def _walk(self, directory: _Directory, *, is_deep: bool) -> None:
        if directory.path in self._left_out or not (directory.is_any_owner or _is_roots(directory.status)):
            return
        if not self._is_to_look(directory, is_deep=is_deep):
            return
        if directory.depth <= _WATCHED_DEPTH:
            self._watch(directory)
        below: list[str] = []
        with os.scandir(directory.descriptor) as entries:
            for entry in entries:
                self._names += 1
                if self._names > self._max_names:
                    raise _TooManyError
                if entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                elif not entry.name.endswith(_NEVER_ELF):
                    # it may be gone, or unreadable
                    with suppress(OSError):
                        self._look_at(directory, entry)
        if not is_deep or directory.depth >= _MAX_DEPTH:
            return
        for name in below:
            with suppress(OSError), _closing(_open_below(directory, name)) as descriptor:
                path = f"{directory.path.rstrip('/')}/{name}"
                subdirectory = _Directory(descriptor, path, directory, is_any_owner=directory.is_any_owner)
                self._walk(subdirectory, is_deep=True)

    def _is_to_look(self, directory: _Directory, *, is_deep: bool) -> bool:
        """Report whether no look at a directory has covered this one, and note it."""
        looks = self._looks.setdefault((directory.status.st_dev, directory.status.st_ino), set())
        if any(deep >= is_deep and any_owner >= directory.is_any_owner for deep, any_owner in looks):
            return False
        looks.add((is_deep, directory.is_any_owner))
        return True

    def _look_at(self, directory: _Directory, entry: "os.DirEntry[str]") -> None:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _MIN_ELF_BYTES:
            return
        if not directory.is_any_owner and not _is_roots(status):
            return
        path = f"{directory.path.rstrip('/')}/{entry.name}"
        fingerprint = _fingerprint(path, status, is_elf=False)
        elf_fingerprint = _fingerprint(path, status, is_elf=True)
        if self._is_known(elf_fingerprint):
            self._watch(directory)
            self._count(b"k", elf_fingerprint)
            return
        if self._is_known(fingerprint):
            self._count(b"k", fingerprint)
            return
        if elf_fingerprint in self._sent:
            # an earlier look at the same directory was not as deep, or trusted less
            self._watch(directory)
            return
        with _closing(os.open(entry.name, _READ, dir_fd=directory.descriptor)) as file:
            opened = os.fstat(file)
            if not stat.S_ISREG(opened.st_mode) or _fingerprint(path, opened, is_elf=False) != fingerprint:
                return
            if os.pread(file, len(_ELF), 0) == _ELF:
                self._watch(directory)
                self._sent.add(elf_fingerprint)
                self._send(b"F" + elf_fingerprint + os.fsencode(path), [file])
            elif time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _RECENT_NS:
                self._count(b"n", fingerprint)

    def _is_known(self, fingerprint: bytes) -> bool:
        return int.from_bytes(fingerprint, sys.byteorder) in self._known

    def _watch(self, directory: "_Directory | None") -> None:
        """Have a directory watched, and all above it, in which another may take its place."""
        while directory is not None and not directory.is_watched:
            directory.is_watched = True
            kind = b"d" if directory.is_any_owner else b"D"
            message = kind + _MTIME.pack(directory.status.st_mtime_ns) + os.fsencode(directory.path)
            self._send(message, [directory.descriptor])
            directory = directory.parent

    def _count(self, kind: bytes, fingerprint: bytes) -> None:
        self._fingerprints[kind].frombytes(fingerprint)
        if len(self._fingerprints[kind]) >= _FINGERPRINTS:
            self.flush()

    def flush(self) -> None:
        for kind, fingerprints in self._fingerprints.items():
            if fingerprints:
                self._send(kind + fingerprints.tobytes())
            del fingerprints[:]

    def _send(self, message: bytes, descriptors: list[int] = []) -> None:  # noqa: B006 - it is not changed
        socket.send_fds(self._connection, [message], descriptors)


def main(connection: socket.socket, root: str, max_names: int) -> None:
    known: frozenset[int] = frozenset()
    left_out: set[str] = set()
    directories: list[tuple[str, bool, bool]] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
        kind, text = message[:1], os.fsdecode(message[1:])
        if kind == b"I":
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        elif kind == b"K":
            known = _read_fingerprints(descriptors[0])
        elif kind == b"X":
            left_out.add(text)
        elif kind in {b"T", b"A"}:
            directories.append((text[1:], text[0] == "r", kind == b"A"))
        else:
            break
    walker = _Walker(connection, known, frozenset(left_out), max_names)
    with _closing(_root(root)) as held_root:
        for path, is_deep, is_any_owner in directories:
            walker.walk(held_root, path, is_deep=is_deep, is_any_owner=is_any_owner)
    walker.flush()
    connection.send(b".")


def _read_fingerprints(descriptor: int) -> frozenset[int]:
    with _closing(descriptor):
        if not os.fstat(descriptor).st_size:
            return frozenset()
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
            return frozenset(memoryview(mapped[:]).cast("Q"))


def _fingerprint(path: str, status: os.stat_result, *, is_elf: bool) -> bytes:
    packed = _STATUS.pack(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digest = hashlib.blake2b(packed + os.fsencode(path), digest_size=8).digest()
    return (int.from_bytes(digest, sys.byteorder) & ~1 | is_elf).to_bytes(8, sys.byteorder)


def _is_roots(status: os.stat_result) -> bool:
    """Report whether only root, and groups of the system such as Debian's staff, may change a file."""
    is_for_group = status.st_mode & stat.S_IWGRP and status.st_gid >= _FIRST_USER_GID
    return status.st_uid == 0 and not status.st_mode & stat.S_IWOTH and not is_for_group


def _are_roots(root: int, path: str) -> bool:
    """Report whether only root may put another directory in this one's place."""
    while path != "/":
        path = os.path.dirname(path)
        with _closing(_open_in(root, path)) as held:
            if not _is_roots(os.fstat(held)):
                return False
    return True


def _root(path: str) -> int:
    """As in `procs.opening`."""
    try:
        return os.open(path, _HELD)
    except OSError:
        return os.open("/", _HELD)


def _open_in(root: int, path: str) -> int:
    """Return an O_PATH descriptor of what path leads to in a root directory. Raises OSError."""
    how = _OPEN_HOW.pack(_HELD, 0, _RESOLVE_IN_ROOT)
    descriptor: int = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "openat2")
    return descriptor


def _open_below(directory: _Directory, name: str) -> int:
    return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory.descriptor)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    # the daemon may have enough, or end
    with suppress(BrokenPipeError, ConnectionResetError):
        main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
