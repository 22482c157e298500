"""Opens files that clients name, with their rights.

    paths ──► a process with the client's ids opens them (`opening.py`) ──► descriptors ──► parsed ──► NamedFile
                  └─ no reply for 5 s: its pipe is closed, and it is left to the kernel

A path is followed once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

from stapsdtd.errors import FileRefusedError, LimitReachedError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.host_calls import MAKE_DESCRIPTOR, OPEN_FILE, START_PROCESS, host_call
from stapsdtd.procs import opening
from stapsdtd.procs.named_files import Credentials, NamedFiles
from stapsdtd.procs.objects import OUT_OF_RESOURCES, Parse
from stapsdtd.procs.opened_files import DEFAULT_BOUNDS, FIRST_PID, Bounds, OpenedFiles, ended

COMMAND = (sys.executable, "-I", "-S", opening.__file__)

_THREADS = 32
_MAX_LATE = 4
"""Processes that file systems may hold up before their client can name no more files."""
_MESSAGE_BYTES = 1 << 16
_EXIT_SECONDS = 0.5


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
        self._late: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._is_closed = False

    async def open(self, paths: Sequence[str], credentials: Credentials, *, are_expected: bool = False) -> NamedFiles:
        """Open and parse what absolute paths name: files, globs, and directories for the ELF files in them.

        are_expected: leave out what has no notes or cannot be used, rather than raise an error.

        Raises FileRefusedError and LimitReachedError.
        """
        turn = self._turns.setdefault(credentials.client, asyncio.Lock())
        async with turn:
            open_all = partial(self._open, paths, credentials, are_expected=are_expected)
            work = asyncio.get_running_loop().run_in_executor(self._executor, open_all)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                # the thread is still taken
                await asyncio.wait({work})
                work.exception()
                raise

    def close(self) -> None:
        """End the processes, and so the threads."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _end(process)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _open(self, paths: Sequence[str], credentials: Credentials, *, are_expected: bool) -> NamedFiles:
        """Runs in a thread."""
        try:
            with host_call(OPEN_FILE, paths[0]):
                return self._open_in_process(paths, credentials, are_expected=are_expected)
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            text = f"the server cannot open more files: {error}"
            raise LimitReachedError(text, "processes") from error

    def _open_in_process(self, paths: Sequence[str], credentials: Credentials, *, are_expected: bool) -> NamedFiles:
        filesystems = Filesystems(self._armed_too)
        request = OpenedFiles(self._parse, filesystems, credentials, self._bounds, paths[0], are_expected=are_expected)
        with host_call(MAKE_DESCRIPTOR, "a socket pair"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(ours), closing(theirs), self._process(theirs, credentials):
            theirs.close()
            ours.settimeout(self._bounds.reply_seconds)
            try:
                for path in paths:
                    ours.send((b"?" if are_expected else b"") + os.fsencode(path))
                ours.shutdown(socket.SHUT_WR)
                while request.take(*_received(ours)):
                    pass
            except FileRefusedError as error:
                request.give_up(error, paths)
            except TimeoutError:
                request.give_up(FileRefusedError(request.path, "its file system does not reply"), paths)
            except (BrokenPipeError, ConnectionResetError):
                request.give_up(ended(request.path), paths)
        return NamedFiles(tuple(request.files.values()), frozenset(request.paths), tuple(request.unusable.items()))

    @contextmanager
    def _process(self, connection: socket.socket, credentials: Credentials) -> Iterator[None]:
        client = credentials.client
        with self._lock:
            # those that have ended are reaped
            self._late = [(whose, process) for whose, process in self._late if process.poll() is None]
            if [whose for whose, _ in self._late].count(client) >= _MAX_LATE:
                text = "file systems of files that you named do not reply; try again when they do"
                raise LimitReachedError(text, "late_processes")
        ids = map(str, (credentials.user, *(sorted(credentials.groups) or [os.getegid()])))
        with host_call(START_PROCESS, self._command[0]):
            process = subprocess.Popen(
                [*self._command, str(connection.fileno()), f"/proc/{FIRST_PID}/root", *ids],
                stdin=subprocess.PIPE,
                pass_fds=[connection.fileno()],
                env={},
            )
        with self._lock:
            self._running.add(process)
            if self._is_closed:
                # it was started while close() looked
                _end(process)
        try:
            yield
        finally:
            _end(process)
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                with self._lock:
                    self._late.append((client, process))
            with self._lock:
                self._running.discard(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the kernel kill a process as soon as it can. Any thread may do so, more than once."""
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.close()
    # one that has yet to change its ids does not heed the pipe; one that has cannot be killed without CAP_KILL
    with suppress(PermissionError):
        process.kill()


def _received(connection: socket.socket) -> tuple[bytes, str, int | None]:
    """Return a message's kind, its text and its descriptor. Raises OSError and LimitReachedError."""
    message, descriptors, flags, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        raise LimitReachedError("the server has no descriptors left to open more files", "descriptors")
    return message[:1], os.fsdecode(message[1:]), descriptors[0] if descriptors else None
