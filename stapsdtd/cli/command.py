"""`-- COMMAND`: runs a program whose first instruction is traced, and ends the trace with it.

    executed, stopped before its first instruction
                    program, loader: /proc/PID/maps
                    libraries:       LOADER --list PROGRAM, the loader's own answer
    subscribed ─► let go: it runs, with the terminal, signals and standard input that a shell would give it

If this process dies before that, the kernel kills the stopped one; after that it goes on untraced.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import signal
import stat
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import click

from stapsdtd.addresses import LOOPBACK_HOSTS
from stapsdtd.cli.expected_files import expected_files
from stapsdtd.cli.held_program import HoldError, hold, let_go
from stapsdtd.cli.render import print_stderr

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stapsdtd.subscribe_options import SubscribeOptions

_SIGNAL = 128
"""To this shells add a signal's number, for an exit code."""

_INTERPRETER_BYTES = 256
"""BINPRM_BUF_SIZE of include/uapi/linux/binfmts.h: so much the kernel looks at."""


class Run(Protocol):
    """What a trace goes on for."""

    @property
    def ends(self) -> str:
        """How the trace ends, for users."""

    @property
    def waits(self) -> str:
        """What it means that no probe matches yet, for users."""

    @property
    def is_command(self) -> bool: ...

    @property
    def is_released(self) -> bool:
        """Whether a command ran, so that how it ended matters, whatever became of the trace."""

    @property
    def nothing_found(self) -> str:
        """What it means that no probe ever matched, for users."""

    @property
    def all_filtered(self) -> str:
        """What it means that all hits were filtered, for users; empty if that is not known."""

    def in_scope(self, options: SubscribeOptions) -> SubscribeOptions:
        """Return the options of the subscription."""

    def release(self, stop: asyncio.Event) -> None:
        """Begin, now that all is armed; stop is set when it ends by itself."""

    async def exit_code(self, failure: str | None) -> int:
        """Wait for the end, and return the exit code. failure: of the trace."""


class UntilInterrupted:
    """A trace without a command."""

    ends = "Ctrl-C stops"
    waits = f"waiting for one to appear; 'stapsdt list' shows existing probes, {ends}"
    is_command = False
    is_released = False
    nothing_found = "no probe matched; name files of programs that end within milliseconds with --file"
    all_filtered = ""

    def in_scope(self, options: SubscribeOptions) -> SubscribeOptions:
        return options

    def release(self, stop: asyncio.Event) -> None:
        pass

    async def exit_code(self, failure: str | None) -> int:
        return 1 if failure else 0


class HeldCommand:
    """A command that is stopped until `release`. Runs in the thread that made it, on an event loop."""

    is_command = True

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises CommandError."""
        self._name = os.path.basename(arguments[0])
        self._undo = ExitStack()
        self._handlers = ExitStack()
        self.is_released = False
        self._names_files = False
        self._ended = asyncio.Event()
        self._status: int | None = None
        _check_rights(arguments[0])
        self._pid = _held(arguments)
        try:
            self._expected = _expected_files(self._pid, arguments[0])
        except BaseException:
            self.close()
            raise

    @property
    def ends(self) -> str:
        return f"stops when {self._name} ends"

    @property
    def waits(self) -> str:
        if self._names_files:
            return "the files of --file have none"
        return f"{self._name} and its libraries have none; --file arms beforehand what it executes or loads later"

    @property
    def nothing_found(self) -> str:
        if self._names_files:
            return "no probe of the files of --file was found"
        return "no probe of what ran was found; name files of programs that end within milliseconds with --file"

    @property
    def all_filtered(self) -> str:
        return f"every hit was filtered: none was of {self._name} or what it started"

    def in_scope(self, options: SubscribeOptions) -> SubscribeOptions:
        # with --file, no others are traced
        self._names_files = bool(options.files)
        expected = () if options.files else self._expected
        return replace(options, pids=(self._pid,), follow=True, expected_files=expected)

    def release(self, stop: asyncio.Event) -> None:
        """Let it run. Until it ends, the keys that interrupt are meant for it; SIGTERM ends the trace alone."""
        loop = asyncio.get_running_loop()

        def terminate() -> None:
            self._handlers.close()
            self._ended.set()
            stop.set()

        for signum in (signal.SIGINT, signal.SIGQUIT):
            # one that is ignored stays so
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._handlers.callback(signal.signal, signum, signal.signal(signum, lambda *_: None))
        on_terminate = signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(terminate))
        self._handlers.callback(signal.signal, signal.SIGTERM, on_terminate)
        pidfd = os.pidfd_open(self._pid)
        self._undo.callback(os.close, pidfd)
        loop.add_reader(pidfd, self._reap, stop)
        self._undo.callback(loop.remove_reader, pidfd)
        self.is_released = True
        let_go(self._pid)

    def _reap(self, stop: asyncio.Event) -> None:
        if self._has_ended():
            # signals are meant for the trace from now on, and the pidfd would stay readable
            self._handlers.close()
            self._undo.close()
            self._ended.set()
            stop.set()

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    async def exit_code(self, failure: str | None) -> int:
        if not self.is_released:
            return 1 if failure else _SIGNAL + signal.SIGINT
        if not self._ended.is_set() and not self._has_ended():
            print_stderr(f"{self._name} goes on untraced; waiting for it")
            await self._ended.wait()
        if self._status is None:
            print_stderr(f"{self._name} goes on untraced, as process {self._pid}")
            return _SIGNAL + signal.SIGTERM
        if os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGTRAP:
            print_stderr(
                f"{self._name} was killed by SIGTRAP: programs that copy their text to other memory, such as huge "
                "pages, copy breakpoints with it; start it without that, or trace it once it has done so"
            )
        return 1 if failure else _code(self._status)

    def close(self) -> None:
        """Kill it unless it was released."""
        self._handlers.close()
        self._undo.close()
        if self._status is None and not self.is_released:
            os.kill(self._pid, signal.SIGKILL)
            _, self._status = os.waitpid(self._pid, 0)


class CommandError(click.ClickException):
    """A command that cannot be traced. Nothing was armed."""


class CommandNotFoundError(CommandError):
    exit_code = 127


class CommandNotExecutableError(CommandError):
    exit_code = 126


@contextmanager
def started(arguments: Sequence[str], server: str) -> Iterator[Run]:
    """Start a command, stopped; nothing if there is none. server: its address. Raises CommandError and UsageError."""
    if not arguments:
        yield UntilInterrupted()
        return
    if server.startswith("tcp:") and server.removeprefix("tcp:").rpartition(":")[0] not in LOOPBACK_HOSTS:
        raise click.UsageError("a command runs on this host, where the server is not; trace it there")
    held = HeldCommand(arguments)
    try:
        yield held
    finally:
        held.close()


def _check_rights(name: str) -> None:
    """Raises CommandError for a program that gains rights when it starts: under ptrace it would not get them."""
    path = shutil.which(name)
    if path is None or os.geteuid() == 0:
        return
    with suppress(OSError):
        status = os.stat(path)
        gains = (status.st_mode & stat.S_ISUID and status.st_uid != os.geteuid()) or (
            status.st_mode & stat.S_ISGID and status.st_gid != os.getegid()
        )
        if gains or "security.capability" in os.listxattr(path):
            raise CommandNotExecutableError(
                f"{name}: runs with other rights than yours, and so cannot be traced: have root run stapsdt"
            )


def _held(arguments: Sequence[str]) -> int:
    """Start a program that stops when it has been executed, and return its pid. Raises CommandError."""
    name, *rest = arguments
    path = shutil.which(name)
    try:
        return _hold(arguments)
    except FileNotFoundError as error:
        if path is None:
            raise CommandNotFoundError(f"{shlex.quote(name)}: command not found") from error
        raise CommandNotExecutableError(f"{name}: its {_interpreter(path)} does not exist") from error
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise CommandNotExecutableError(f"{shlex.quote(name)}: cannot be executed: {error.strerror}") from error
    try:
        # a script without "#!", which shells run themselves
        return _hold(["/bin/sh", path or name, *rest])
    except OSError as error:
        raise CommandNotExecutableError(f"{name}: cannot be executed: {error.strerror}") from error


def _hold(arguments: Sequence[str]) -> int:
    """Raises OSError and CommandError."""
    if not arguments[0]:
        raise FileNotFoundError
    try:
        return hold(arguments)
    except HoldError as error:
        raise CommandError(f"{arguments[0]}: {error}") from error


def _interpreter(script: str) -> str:
    """Return what the kernel runs a file with, for users."""
    with suppress(OSError), open(script, "rb") as file:
        line = file.readline(_INTERPRETER_BYTES)
        if line.startswith(b"#!") and (words := line[2:].split()):
            return f"interpreter {shlex.quote(os.fsdecode(words[0]))}"
    return "loader"


def _expected_files(pid: int, name: str) -> tuple[str, ...]:
    """Raises CommandError."""
    try:
        return tuple(expected_files(pid))
    except PermissionError as error:
        # the kernel hides the memory map of such a program, even from its parent
        raise CommandNotExecutableError(f"{name}: you may not read it, so it cannot be traced") from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise CommandError(f"{name}: was killed before it ran") from error


def _code(status: int) -> int:
    return _SIGNAL + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
