"""Starts a program that stops before its first instruction.

    fork ─► the child waits ─► PTRACE_SEIZE ─► it executes the program ─► PTRACE_EVENT_EXEC

The child is seized before it goes on, with PTRACE_O_EXITKILL: if this process dies, the program does not run. All
signals are blocked in the child until then, since Python's handlers are still set in it. They stay pending.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

_CONT, _DETACH, _SEIZE, _SETSIGMASK = 7, 17, 0x4206, 0x420B
_O_TRACEEXEC, _O_EXITKILL = 0x10, 0x0010_0000
_EVENT_EXEC = 4
"""include/uapi/linux/ptrace.h."""

_MASK_BYTES = 8

_IGNORED = [signum for signum in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(signum) is signal.SIG_IGN]
"""As shells have it for jobs that a script starts in the background. The program is to have it so, too."""


class HoldError(Exception):
    """A process that cannot be stopped."""


def hold(arguments: Sequence[str]) -> int:
    """Execute a program in a child of this thread, and return its pid. It is stopped until `let_go`.

    Raises OSError if the program cannot be executed, and HoldError.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = os.fork()
            if pid == 0:
                ours.close()
                _execute(arguments, theirs)
            theirs.close()
            try:
                _stop_at_exec(pid, ours)
                _set_signal_mask(pid, mask)
            except BaseException:
                # it may have ended, and been waited for
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def let_go(pid: int) -> None:
    """Let it run, if nobody has killed it meanwhile."""
    with suppress(ProcessLookupError):
        _ptrace(_DETACH, pid, 0, 0)


def _execute(arguments: Sequence[str], parent: socket.socket) -> NoReturn:
    """Execute the program when the parent says so, or end with it. Tell it the error, if there is one."""
    try:
        if parent.recv(1):
            # Python ignores them
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)
            for signum in _IGNORED:
                signal.signal(signum, signal.SIG_IGN)
            os.execvp(arguments[0], list(arguments))  # noqa: S606
    except OSError as error:
        parent.send(str(error.errno).encode())
    finally:
        os._exit(127)


def _stop_at_exec(pid: int, child: socket.socket) -> None:
    try:
        _ptrace(_SEIZE, pid, 0, _O_TRACEEXEC | _O_EXITKILL)
    except PermissionError as error:
        raise HoldError("cannot be stopped at its start, since another tracer has it") from error
    # if it was killed, its status tells
    with suppress(BrokenPipeError):
        child.send(b"\0")
    while True:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            break
        event = status >> 16
        if event == _EVENT_EXEC:
            return
        _ptrace(_CONT, pid, 0, 0 if event else os.WSTOPSIG(status))
    if number := child.recv(16):
        raise OSError(int(number), os.strerror(int(number)))
    raise HoldError("was killed before it ran")


def _set_signal_mask(pid: int, blocked: Iterable[int]) -> None:
    mask = ctypes.c_uint64(sum(1 << (signum - 1) for signum in blocked))
    _ptrace(_SETSIGMASK, pid, _MASK_BYTES, ctypes.addressof(mask))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    """Raises OSError."""
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
