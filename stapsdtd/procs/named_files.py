"""Files that clients name, also those that no process maps yet.

    paths ──► a process with the client's ids opens them (`opening.py`) ──► descriptors ──► parsed ──► NamedFile
                  └─ no reply for 5 s: killed, and left to the kernel

A path is followed once. From then on the file is reached by its descriptor alone, whatever the path leads to by then.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from stapsdtd.errors import (
    FileRefusedError,
    LimitReachedError,
    ObjectForeignError,
    ObjectGoneError,
    ObjectPendingError,
    ObjectUnreadableError,
)
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.reach import status_of
from stapsdtd.model import Object, ObjectKey, ParsedObject
from stapsdtd.procs import opening
from stapsdtd.procs.file_keys import key_of_open
from stapsdtd.procs.objects import OUT_OF_RESOURCES, Parse, is_same, open_now

COMMAND = (sys.executable, "-I", "-S", opening.__file__)

_THREADS = 32
_MAX_LATE = 4
"""Processes that file systems may hold up before their client can name no more files."""
_MESSAGE_BYTES = 1 << 16
_PENDING_SECONDS = 0.05
_EXIT_SECONDS = 0.5
_FIRST_PID = 1
_PROCESS_ROOT = re.compile(r"/proc/([0-9]+)/root(?:/|$)")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who names files. client: as known to others; its requests wait for each other.

    uid: None for the rights of this process. groups: one at least, unless uid is None. pid: whose files the parser may
    read in the same sandbox.
    """

    client: str
    uid: int | None
    groups: frozenset[int]
    pid: int

    @property
    def user(self) -> int:
        return os.geteuid() if self.uid is None else self.uid


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NamedFile:
    """A file with notes, open for reading until nobody refers to this any more.

    path: as in maps. viewer: the process that has it there. credentials: of who named it.
    """

    descriptor: int
    path: str
    viewer: int
    key: ObjectKey
    parsed: ParsedObject
    credentials: Credentials

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def notes(self) -> int:
        return len(self.parsed.sites) + len(self.parsed.problems)

    @property
    def is_deleted(self) -> bool:
        return status_of(self.descriptor).st_nlink == 0


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """paths: of the files, and of directories whose files are meant, as in maps."""

    files: tuple[NamedFile, ...]
    paths: frozenset[str]


def open_named(obj: Object, file: NamedFile, parse: Parse, filesystems: Filesystems) -> int:
    """Open a named file anew, if it still is the object.

    Raises ObjectGoneError, ObjectPendingError if that is known later, and ObjectForeignError as `open_object` does.
    """
    if reason := filesystems.why_not(file.descriptor, file.viewer):
        raise ObjectForeignError(reason)
    descriptor = open_now(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        key = key_of_open(descriptor, file.viewer, file.path)
        credentials = file.credentials
        if is_same(descriptor, key, obj, partial(parse, pid=credentials.pid, owner=credentials.user)):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise ObjectGoneError(obj.path)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a request: files with notes, and notes in all of them, which take some 500 bytes each.

    reply_seconds: without a word from a file system. parse_seconds: for a file. all_seconds: for everything.
    """

    files: int = 1000
    notes: int = 200_000
    reply_seconds: float = 5.0
    parse_seconds: float = 10.0
    all_seconds: float = 30.0


DEFAULT_BOUNDS = Bounds()


class FileOpener:
    """Opens files for many clients at a time, and for each of them one request after the other.

    Runs on an event loop, and in threads of its own.
    """

    def __init__(
        self,
        parse: Parse,
        armed_too: Collection[str] = (),
        *,
        bounds: Bounds = DEFAULT_BOUNDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """parse: may be called in any thread. armed_too: as for `Filesystems`. command: runs `opening.py`."""
        self._parse = parse
        self._armed_too = armed_too
        self._bounds = bounds
        self._command = command
        self._executor = ThreadPoolExecutor(_THREADS, "stapsdtd-files")
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._late: defaultdict[str, list[subprocess.Popen[bytes]]] = defaultdict(list)

    async def open(self, paths: Sequence[str], credentials: Credentials) -> NamedFiles:
        """Open and parse what absolute paths name: files, globs, and directories for the ELF files in them.

        Raises FileRefusedError and LimitReachedError.
        """
        turn = self._turns.setdefault(credentials.client, asyncio.Lock())
        async with turn:
            work = asyncio.get_running_loop().run_in_executor(self._executor, self._open, paths, credentials)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                # the thread is still taken
                await asyncio.wait({work})
                work.exception()
                raise

    def close(self) -> None:
        """Kill the processes, so that the threads end."""
        with self._lock:
            for process in self._running:
                process.kill()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _open(self, paths: Sequence[str], credentials: Credentials) -> NamedFiles:
        """Runs in a thread."""
        try:
            return self._open_in_process(paths, credentials)
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            raise LimitReachedError(f"the server cannot open more files: {error.strerror}") from error

    def _open_in_process(self, paths: Sequence[str], credentials: Credentials) -> NamedFiles:
        request = _Request(self._parse, Filesystems(self._armed_too), credentials, self._bounds, paths[0])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(ours), closing(theirs), self._process(theirs, credentials):
            theirs.close()
            ours.settimeout(self._bounds.reply_seconds)
            try:
                for path in paths:
                    ours.send(os.fsencode(path))
                ours.shutdown(socket.SHUT_WR)
                while request.take(*_received(ours)):
                    pass
            except TimeoutError:
                raise FileRefusedError(request.path, "its file system does not reply") from None
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _ended(request.path) from error
        return NamedFiles(tuple(request.files.values()), frozenset(request.paths))

    @contextmanager
    def _process(self, connection: socket.socket, credentials: Credentials) -> Iterator[None]:
        client = credentials.client
        with self._lock:
            late = [process for process in self._late.pop(client, []) if process.poll() is None]
            if late:
                self._late[client] = late
            if len(late) >= _MAX_LATE:
                raise LimitReachedError("file systems of files that you named do not reply; try again when they do")
        ids = map(str, (credentials.user, *(sorted(credentials.groups) or [os.getegid()])))
        process = subprocess.Popen(
            [*self._command, str(connection.fileno()), f"/proc/{_FIRST_PID}/root", *ids],
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            env={},
        )
        with self._lock:
            self._running.add(process)
        try:
            yield
        finally:
            process.kill()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                with self._lock:
                    self._late[client].append(process)
            with self._lock:
                self._running.discard(process)


def _received(connection: socket.socket) -> tuple[bytes, str, int | None]:
    """Return a message's kind, its text and its descriptor. Raises OSError and LimitReachedError."""
    message, descriptors, flags, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        raise LimitReachedError("the server has no descriptors left to open more files")
    return message[:1], os.fsdecode(message[1:]), descriptors[0] if descriptors else None


def _ended(path: str) -> FileRefusedError:
    return FileRefusedError(path, "cannot be opened: the process that opens files ended; try again")


class _UselessError(Exception):
    """Why a file is of no use, though others in its directory may be."""


def _check_unchanged(before: ObjectKey, after: ObjectKey) -> None:
    """Raises _UselessError."""
    if before != after:
        raise _UselessError("was written to while it was read; try again")


@dataclass(slots=True)
class _Request:
    """What was opened so far, each file once. path: that is being opened. why_none: why it has given no file yet."""

    parse: Parse
    filesystems: Filesystems
    credentials: Credentials
    bounds: Bounds
    path: str
    files: dict[tuple[int, int], NamedFile] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    why_none: str = ""
    notes: int = 0
    began: float = field(default_factory=time.monotonic)

    def take(self, kind: bytes, text: str, descriptor: int | None) -> bool:
        """Take a message. Report whether more are to come. Raises FileRefusedError, and OSError."""
        if descriptor is None:
            return self._take_text(kind, text)
        try:
            self._check_time()
            if kind == b"D":
                self.paths.add(procfs.shown_link(f"/proc/self/fd/{descriptor}"))
            else:
                self._take_file(descriptor, is_named=kind == b"N")
        finally:
            os.close(descriptor)
        return True

    def _take_text(self, kind: bytes, text: str) -> bool:
        if kind in {b"P", b"."} and self.why_none:
            raise FileRefusedError(self.path, self.why_none)
        if kind == b"P":
            self.path, self.why_none = text, "no ELF file there has a stapsdt note"
        elif kind == b"E":
            raise FileRefusedError(self.path, text)
        elif kind == b"+":
            self._check_time()
        elif kind != b".":
            raise _ended(self.path)
        return kind != b"."

    def _check_time(self) -> None:
        """Raises FileRefusedError."""
        if time.monotonic() - self.began > self.bounds.all_seconds:
            raise FileRefusedError(self.path, f"takes longer than {self.bounds.all_seconds:g} s to read")

    def _take_file(self, held: int, *, is_named: bool) -> None:
        try:
            self._keep(held)
        except _UselessError as error:
            if is_named:
                raise FileRefusedError(self.path, str(error)) from error
        else:
            self.why_none = ""

    def _keep(self, held: int) -> None:
        """Parse a file that is held by O_PATH, and keep it open.

        Raises FileRefusedError, LimitReachedError and _UselessError.
        """
        match = _PROCESS_ROOT.match(self.path)
        viewer = int(match[1]) if match else _FIRST_PID
        shown = procfs.shown_link(f"/proc/self/fd/{held}")
        status = status_of(held)
        if status.st_nlink == 0:
            raise _UselessError("has been deleted")
        if reason := self.filesystems.why_not(held, viewer):
            raise FileRefusedError(self.path, reason)
        key = key_of_open(held, viewer, shown)
        file = key.dev, key.inode
        if file in self.files:
            return
        descriptor = open_now(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            parsed = self._parsed(descriptor)
            _check_unchanged(key, key_of_open(descriptor, viewer, shown))
            self._check_bounds(parsed)
        except BaseException:
            os.close(descriptor)
            raise
        self.paths.add(shown)
        self.files[file] = NamedFile(descriptor, shown, viewer, key, parsed, self.credentials)

    def _parsed(self, descriptor: int) -> ParsedObject:
        """Raises _UselessError."""
        deadline = time.monotonic() + self.bounds.parse_seconds
        while True:
            try:
                parsed = self.parse(descriptor, self.credentials.pid, self.credentials.user)
            except ObjectUnreadableError as error:
                raise _UselessError(f"cannot be parsed: {error}") from error
            except ObjectPendingError:
                if time.monotonic() > deadline:
                    raise _UselessError("takes long to parse; try again") from None
                time.sleep(_PENDING_SECONDS)
                continue
            if not parsed.sites and not parsed.problems:
                raise _UselessError("has no stapsdt note")
            return parsed

    def _check_bounds(self, parsed: ParsedObject) -> None:
        """Raises LimitReachedError."""
        self.notes += len(parsed.sites) + len(parsed.problems)
        if len(self.files) >= self.bounds.files:
            raise LimitReachedError(f"{self.path}: too many files: more than {self.bounds.files} have stapsdt notes")
        if self.notes > self.bounds.notes:
            raise LimitReachedError(f"{self.path}: too many probes: more than {self.bounds.notes} stapsdt notes")
