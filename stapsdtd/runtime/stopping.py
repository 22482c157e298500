"""Stopping takes only so long, whatever the kernel does.

A thread inside a kernel call that does not return can be ended by nobody, SIGKILL included: closing a probe's program
waits for ever where another tracer's program sleeps at a hit. After a while the log names the call, and what the next
daemon needs is let go of; later the process ends with what it has left, which that call's return takes away.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)

_TELL_SECONDS = 8.0
_LEAVE_SECONDS = 60.0
_FAILED = 1
_PACKAGE = str(Path(__file__).parent)


class StopDeadline:
    """From `begin` until the process ends. let_go: what is done for the next daemon's sake, in another thread."""

    def __init__(
        self,
        let_go: Callable[[], None],
        leave: Callable[[int], None] = os._exit,
        tell_seconds: float = _TELL_SECONDS,
        leave_seconds: float = _LEAVE_SECONDS,
    ) -> None:
        self._let_go = let_go
        self._leave = leave
        self._seconds = tell_seconds, leave_seconds

    def begin(self) -> None:
        for seconds, work in zip(self._seconds, (self._tell, self._give_up), strict=True):
            timer = threading.Timer(seconds, work)
            timer.name = "stapsdtd-stopping"
            timer.daemon = True
            timer.start()

    def _tell(self) -> None:
        _log.warning("stopping takes more than %g s: %s", self._seconds[0], "; ".join(what_threads_do()))
        try:
            self._let_go()
        except Exception:  # noqa: BLE001 - the process is to end all the same
            _log.exception("the sockets are not free yet")

    def _give_up(self) -> None:
        _log.warning("stopping takes more than %g s: %s", self._seconds[1], "; ".join(what_threads_do()))
        _log.warning("the process ends; 'stapsdtd --cleanup' removes what is left when it is gone")
        logging.shutdown()
        self._leave(_FAILED)


def what_threads_do() -> list[str]:
    """Name each thread in an uninterruptible kernel call, or where there is none each thread: what it does, and where.

    stapsdtd-reaper in disarm (kernel/probe_events.py:81), state D in rcu_tasks_trace, system call 3
    """
    threads = {thread.native_id: thread for thread in threading.enumerate() if not _is_ours(thread)}
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way
    states = {int(number): _state(number) for number in os.listdir("/proc/self/task")}
    chosen = [number for number, state in states.items() if state == "D"] or [
        number for number in states if number in threads
    ]
    return [_described(number, states[number], threads.get(number), frames) for number in chosen]


def _is_ours(thread: threading.Thread) -> bool:
    return isinstance(thread, threading.Timer)


def _described(number: int, state: str, thread: threading.Thread | None, frames: dict[int, FrameType]) -> str:
    name = thread.name if thread else f"thread {number}"
    frame = frames.get(thread.ident or 0) if thread else None
    place = next((_place(each) for each in _outwards(frame) if each.f_code.co_filename.startswith(_PACKAGE)), "")
    call = _read(number, "syscall").partition(" ")[0]
    where = next((text for text in (_read(number, "wchan"), _innermost(number)) if text not in {"", "0"}), "?")
    return f"{name}{place}, state {state} in {where}, system call {call or '?'}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename.removeprefix(f"{_PACKAGE}/")
    return f" in {frame.f_code.co_name} ({path}:{frame.f_lineno})"


def _state(number: str) -> str:
    return _read(int(number), "stat").rpartition(")")[2].strip()[:1]


def _innermost(number: int) -> str:
    """Of its kernel stack, which takes CAP_SYS_ADMIN: `[<0>] synchronize_rcu_tasks_trace+0x2a/0x50`."""
    return _read(number, "stack").partition("\n")[0].rpartition(" ")[2].partition("+")[0]


def _read(number: int, name: str) -> str:
    try:
        return Path(f"/proc/self/task/{number}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""
