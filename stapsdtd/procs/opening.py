"""Opens files as a user may, in a process that may be given up: `python -I -S opening.py SOCKET ROOT UID GID...`.

Its standard input is a pipe of the daemon's. When the daemon closes that or ends itself, the kernel kills this process:
the daemon cannot, since a process with another user's ids takes CAP_KILL to be killed.

Receives paths, one a message, until the sender shuts down; one after a ? need not be usable. For each it sends the
path, then O_PATH descriptors, which the daemon can close without asking a file system:

    P/usr/bin/postgres          N and an ELF file
    P/opt/bin                   D and the directory, then F and an ELF file in it, as often as there is one
    P/opt/*/bin/server          F and an ELF file, as often as one matches
    P/opt/x                     E and why it cannot be used: "not an ELF file"; nothing follows but for ?/opt/x
    +                           it goes on looking
    .                           that was all

Paths are of ROOT, a link such as /proc/1/root, and /proc/PID/root leads to what process PID sees.
"""

import ctypes
import errno
import fcntl
import fnmatch
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_FOUND = 4096
"""ELF files in directories and by globs, and ..."""
_MAX_ENTRIES = 100_000
"""... names in directories, that a request may make this process look at."""

_ENTRIES_PER_SIGN = 100
"""So that a slow disk is not taken for a file system that does not reply."""
_MAX_MESSAGE_BYTES = 1 << 16
_OPENAT2 = 437
"""The same on all architectures; `kernel.reach`, which also uses it, would take this process long to import."""
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_IN_ROOT = 0x10
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
"""_LINUX_CAPABILITY_VERSION_3, and this process; see include/uapi/linux/capability.h."""
_CAPABILITY_BYTES = 24
_PR_SET_DUMPABLE = 4
_HELD = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_PROCESS_ROOT = re.compile(r"(/proc/[0-9]+/root)(/.*)?", re.DOTALL)
_GLOB = re.compile(r"[*?[]")
_ELF = b"\x7fELF"
_OPTIONAL = "?"

_NO_IDS = (
    "the server lacks CAP_SETUID and CAP_SETGID, and so cannot open files as you; add them to CapabilityBoundingSet "
    "with 'systemctl edit stapsdtd', or to its container with --cap-add"
)
_REASONS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EACCES: "not readable by you",
    errno.EPERM: "not readable by you",
    errno.ELOOP: "too many symbolic links",
    errno.EMFILE: "the server has no descriptors left; raise LimitNOFILE with 'systemctl edit stapsdtd'",
    errno.ENFILE: "the host has no open files left; raise them with 'sysctl -w fs.file-max=NUMBER'",
    errno.ENOMEM: "the server has no memory left; raise MemoryMax with 'systemctl edit stapsdtd'",
    errno.EIO: "its file system or device fails; see 'journalctl -k'",
    errno.ESTALE: "its server has forgotten it; mount its file system again",
    errno.ENOTCONN: "its file system's server has ended; unmount it with 'fusermount3 -u', and mount it again",
    errno.EXDEV: "leads through a link of /proc, of which only /proc/PID/root can be followed",
}

_LIFELINE = 0

_libc = ctypes.CDLL(None, use_errno=True)


class _RefusedError(Exception):
    """Why a path cannot be used."""


class _Sender:
    """Sends what is found."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._found = 0
        self._entries = 0

    def send(self, kind: bytes, text: str = "") -> None:
        self._connection.send(kind + os.fsencode(text))

    def send_file(self, kind: bytes, descriptor: int) -> None:
        socket.send_fds(self._connection, [kind], [descriptor])

    def send_found(self, descriptor: int) -> None:
        """Send a file that no path names itself."""
        self._found += 1
        if self._found > MAX_FOUND:
            raise _RefusedError(f"too many files: more than {MAX_FOUND} are ELF files")
        self.send_file(b"F", descriptor)

    def count_entry(self) -> None:
        self._entries += 1
        if not self._entries % _ENTRIES_PER_SIGN:
            self.send(b"+")
        if self._entries > _MAX_ENTRIES:
            raise _RefusedError(f"too many files: there are more than {_MAX_ENTRIES} to look at")


def main(connection: socket.socket, root: str, user: int, groups: list[int]) -> None:
    paths = list(iter(lambda: os.fsdecode(connection.recv(_MAX_MESSAGE_BYTES)), ""))
    sender = _Sender(connection)
    with _closing(_root(root)) as held_root:
        try:
            _become(user, groups)
        except PermissionError:
            sender.send(b"E", _NO_IDS)
            return
        if not _live_with(_LIFELINE):
            return
        for sent in paths:
            path = sent.removeprefix(_OPTIONAL)
            sender.send(b"P", path)
            if reason := _why_not(path, held_root, sender):
                sender.send(b"E", reason)
                if path == sent:
                    return
    sender.send(b".")


def _why_not(path: str, root: int, sender: _Sender) -> str | None:
    """Send what a path names. Return why that cannot be used."""
    try:
        _name(path, root, sender)
    except _RefusedError as error:
        return str(error)
    except OSError as error:
        number = error.errno or 0
        return _REASONS.get(number) or os.strerror(number).lower()
    return None


def _root(path: str) -> int:
    """Return a descriptor of the first process's root; of this one's own if nobody may look at that, as in a container
    that shares the host's processes.
    """
    try:
        return os.open(path, _HELD)
    except OSError:
        return os.open("/", _HELD)


def _become(user: int, groups: list[int]) -> None:
    """Take on the ids of a user. Raises PermissionError."""
    if user == os.geteuid():
        return
    os.setgroups(groups)
    os.setresgid(groups[0], groups[0], groups[0])
    os.setresuid(user, user, user)
    # the kernel takes them only from those who were root
    if _libc.capset(_CAPABILITY_HEADER, bytes(_CAPABILITY_BYTES)):
        raise PermissionError
    # so that the user cannot trace this process, and have it send what he may not read, whatever fs.suid_dumpable is
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise PermissionError


def _live_with(lifeline: int) -> bool:
    """Have the kernel kill this process once nobody can write to a pipe any more. Report whether somebody still can.

    The kernel sends the signal with the rights that this process has now (sigio_perm in fs/fcntl.c), so it must have
    changed its ids by now. SIGKILL also ends a process that its user has stopped.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    return not select.select([lifeline], [], [], 0)[0]


def _name(path: str, root: int, sender: _Sender) -> None:
    """Send what a path names. Raises OSError and _RefusedError."""
    match = _PROCESS_ROOT.fullmatch(path)
    if match is None:
        _name_in(root, path, sender)
        return
    with _closing(os.open(match[1], _HELD)) as process_root:
        _name_in(process_root, match[2] or "/", sender)


def _name_in(root: int, path: str, sender: _Sender) -> None:
    try:
        held = _open_in(root, path)
    except OSError:
        if not _GLOB.search(path):
            raise
        any_found = False
        for each in _expanded(root, path, sender):
            sender.count_entry()
            any_found |= _find(root, each, sender)
        if not any_found:
            raise _RefusedError("no ELF file that you may read matches") from None
        return
    with _closing(held):
        mode = os.fstat(held).st_mode
        if stat.S_ISDIR(mode):
            _send_directory(held, sender)
            return
        if not stat.S_ISREG(mode):
            raise _RefusedError("not a regular file")
        if not _is_elf(held):
            raise _RefusedError("not an ELF file")
        sender.send_file(b"N", held)


def _send_directory(held: int, sender: _Sender) -> None:
    """Send a directory's ELF files, but not what symbolic links in it lead to."""
    with _closing(_reopen(held, os.O_DIRECTORY)) as directory:
        sender.send_file(b"D", held)
        for name in sorted(os.listdir(directory)):
            sender.count_entry()
            _find(directory, name, sender, may_follow=False)


def _find(directory: int, path: str, sender: _Sender, *, may_follow: bool = True) -> bool:
    """Send a file if it is a regular ELF file that may be read. Report whether it is."""
    try:
        held = _open_in(directory, path) if may_follow else os.open(path, _HELD | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return False
    with _closing(held):
        try:
            is_found = stat.S_ISREG(os.fstat(held).st_mode) and _is_elf(held)
        except OSError:
            return False
        if is_found:
            sender.send_found(held)
        return is_found


def _expanded(root: int, pattern: str, sender: _Sender) -> list[str]:
    """Expand a glob as a shell does; some of the results may not exist."""
    paths = [""]
    for part in filter(None, pattern.split("/")):
        if _GLOB.search(part):
            paths = [f"{path}/{name}" for path in paths for name in _matching(root, path or "/", part, sender)]
        else:
            paths = [f"{path}/{part}" for path in paths]
    return paths


def _matching(root: int, path: str, pattern: str, sender: _Sender) -> Iterator[str]:
    """Yield the names in a directory that match."""
    try:
        with _closing(_open_in(root, path)) as held, _closing(_reopen(held, os.O_DIRECTORY)) as directory:
            names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        sender.count_entry()
        if fnmatch.fnmatchcase(name, pattern) and (not name.startswith(".") or pattern.startswith(".")):
            yield name


def _open_in(root: int, path: str) -> int:
    """Return an O_PATH descriptor of what path leads to in a root directory. Raises OSError."""
    how = _OPEN_HOW.pack(_HELD, 0, _RESOLVE_IN_ROOT)
    descriptor: int = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "openat2")
    return descriptor


def _reopen(held: int, flags: int = 0) -> int:
    """Open what is held for reading: the very file, whatever its path leads to by now. Raises OSError."""
    return os.open(f"/proc/self/fd/{held}", _READ | flags)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_elf(held: int) -> bool:
    """Report whether a regular file is one. Raises OSError if it cannot be read."""
    with _closing(_reopen(held)) as file:
        return os.pread(file, len(_ELF), 0) == _ELF


if __name__ == "__main__":
    # the daemon may have enough, or end
    with suppress(BrokenPipeError, ConnectionResetError):
        main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]), list(map(int, sys.argv[4:])))
