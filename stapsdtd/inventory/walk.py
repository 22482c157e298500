"""One look at directories: starts `walking.py`, and yields what it finds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from struct import Struct

from stapsdtd.errors import InventoryError
from stapsdtd.inventory import walking
from stapsdtd.kernel.host_calls import MAKE_DESCRIPTOR, START_PROCESS, host_call

COMMAND = (sys.executable, "-I", "-S", walking.__file__)

MAX_NAMES = 1_000_000
"""In and below a directory that is named."""

_MTIME = Struct("<q")
_FINGERPRINT_BYTES = 8
_MESSAGE_BYTES = 1 << 16
_FIRST_ROOT = "/proc/1/root"
_EXIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Directory:
    """is_deep: with all below it. is_any_owner: also what others than root may change."""

    path: str
    is_deep: bool = True
    is_any_owner: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """A directory that is worth watching. mtime_ns: before it was looked at. descriptor: open until the next item."""

    path: str
    mtime_ns: int
    is_any_owner: bool
    descriptor: int


@dataclass(frozen=True, slots=True)
class Known:
    """Files that are known. is_new: that are none to know, and were not known until now."""

    fingerprints: Collection[int]
    is_new: bool


@dataclass(frozen=True, slots=True)
class NewFile:
    """An ELF file that is not known. descriptor: open for reading until the next item."""

    fingerprint: int
    path: str
    descriptor: int


@dataclass(frozen=True, slots=True)
class Exceeding:
    """A directory that was named, and has more names than are looked at: the rest of it is left out."""

    path: str


Found = Watched | Known | NewFile | Exceeding


class Walk:
    """One walk, by one thread; `stop` may be called in any."""

    def __init__(self, *, reply_seconds: float, max_names: int = MAX_NAMES, command: Sequence[str] = COMMAND) -> None:
        """reply_seconds: without a word from a file system. max_names: in and below a directory that is named."""
        self._reply_seconds = reply_seconds
        self._max_names = max_names
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether its process runs, which a file system may keep from ending."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Have `found` fail, even if its process does not end."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def found(
        self,
        directories: Collection[Directory],
        known: bytes,
        left_out: Collection[str] = (),
        *,
        is_idle: bool = False,
    ) -> Generator[Found]:
        """Yield what is in directories, in their order. known: fingerprints. Raises InventoryError and OSError."""
        with host_call(MAKE_DESCRIPTOR, "a socket pair"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(ours), closing(theirs):
            with host_call(START_PROCESS, self._command[0]):
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno()), _FIRST_ROOT, str(self._max_names)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={},
                )
            theirs.close()
            ours.settimeout(self._reply_seconds)
            with self._lock:
                self._connection = ours
            try:
                self._ask(ours, directories, known, left_out, is_idle=is_idle)
                for each in _answers(ours):
                    self._check()
                    yield each
            except TimeoutError:
                raise InventoryError("a file system does not reply") from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise InventoryError("the process that looks for files ended") from error
            finally:
                with self._lock:
                    # its descriptor's number may soon be another file's
                    self._connection = None
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_EXIT_SECONDS)

    def _check(self) -> None:
        """Raises BrokenPipeError if it was stopped."""
        if self._is_stopped:
            raise BrokenPipeError

    def _ask(
        self,
        connection: socket.socket,
        directories: Collection[Directory],
        known: bytes,
        left_out: Collection[str],
        *,
        is_idle: bool,
    ) -> None:
        self._check()
        if is_idle:
            connection.send(b"I")
        with host_call(MAKE_DESCRIPTOR, "a memfd"):
            content = os.memfd_create("stapsdt-known", os.MFD_CLOEXEC)
        with open(content, "wb") as file:
            file.write(known)
            file.flush()
            socket.send_fds(connection, [b"K"], [file.fileno()])
        for path in left_out:
            connection.send(b"X" + os.fsencode(path))
        for each in directories:
            kind = (b"A" if each.is_any_owner else b"T") + (b"r" if each.is_deep else b".")
            connection.send(kind + os.fsencode(each.path))
        connection.shutdown(socket.SHUT_WR)


def _answers(connection: socket.socket) -> Iterator[Found]:
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        kind, content = message[:1], message[1:]
        if kind == b".":
            return
        if kind == b"L":
            yield Exceeding(_text(content))
            continue
        if kind in {b"k", b"n"}:
            yield Known(array("Q", content), is_new=kind == b"n")
            continue
        if kind not in {b"D", b"d", b"F"} or not descriptors:
            raise BrokenPipeError
        number, path = content[:_FINGERPRINT_BYTES], _text(content[_FINGERPRINT_BYTES:])
        try:
            if kind == b"F":
                yield NewFile(int.from_bytes(number, sys.byteorder), path, descriptors[0])
            else:
                yield Watched(path, _MTIME.unpack(number)[0], kind == b"d", descriptors[0])
        finally:
            os.close(descriptors[0])


def _text(path: bytes) -> str:
    """As procfs.shown_path has it."""
    return path.decode(errors="backslashreplace")
