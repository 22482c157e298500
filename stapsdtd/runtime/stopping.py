"""Bound the time that stopping takes, whatever the kernel does.

A thread stuck in a kernel call cannot be killed, not even by SIGKILL: detaching a probe's program waits forever while
another tracer's program sleeps at a hit. After a first deadline the log names the call, and the daemon frees what its
successor needs. After another the process exits; what it still holds goes when the call returns.
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

_REPORT_SECONDS = 8.0
_EXIT_SECONDS = 60.0
_FAILED = 1
_PACKAGE = str(Path(__file__).parents[1])


class StopDeadline:
    """Runs from `begin` until the process exits. release: frees what the next daemon needs; runs in a timer thread."""

    def __init__(
        self,
        release: Callable[[], None],
        exit_: Callable[[int], None] = os._exit,
        report_seconds: float = _REPORT_SECONDS,
        exit_seconds: float = _EXIT_SECONDS,
    ) -> None:
        self._release = release
        self._exit = exit_
        self._seconds = report_seconds, exit_seconds

    def begin(self) -> None:
        for seconds, work in zip(self._seconds, (self._report, self._give_up), strict=True):
            timer = threading.Timer(seconds, work)
            timer.name = "stapsdtd-stopping"
            timer.daemon = True
            timer.start()

    def _report(self) -> None:
        _log.warning("stopping takes more than %g s: %s", self._seconds[0], "; ".join(describe_threads()))
        try:
            self._release()
        except Exception:  # noqa: BLE001 - the process must exit all the same
            _log.exception("cannot free the sockets for the next daemon")

    def _give_up(self) -> None:
        _log.warning("stopping takes more than %g s: %s", self._seconds[1], "; ".join(describe_threads()))
        _log.warning("exiting; run 'stapsdtd --cleanup' once the process is gone to remove what is left")
        logging.shutdown()
        self._exit(_FAILED)


def describe_threads() -> list[str]:
    """Describe the threads that are in an uninterruptible kernel call, or all threads if none is:

    stapsdtd-reaper in disarm (kernel/probe_events.py:81), state D in rcu_tasks_trace, system call 3
    """
    threads = {thread.native_id: thread for thread in threading.enumerate() if not _is_ours(thread)}
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way
    states = {int(tid): _state(tid) for tid in os.listdir("/proc/self/task")}
    chosen = [tid for tid, state in states.items() if state == "D"] or [tid for tid in states if tid in threads]
    return [_describe(tid, states[tid], threads.get(tid), frames) for tid in chosen]


def _is_ours(thread: threading.Thread) -> bool:
    return isinstance(thread, threading.Timer)


def _describe(tid: int, state: str, thread: threading.Thread | None, frames: dict[int, FrameType]) -> str:
    name = thread.name if thread else f"thread {tid}"
    frame = frames.get(thread.ident or 0) if thread else None
    code = next((_location(outer) for outer in _outwards(frame) if outer.f_code.co_filename.startswith(_PACKAGE)), "")
    syscall = _read(tid, "syscall").partition(" ")[0]
    function = next((text for text in (_read(tid, "wchan"), _kernel_function(tid)) if text not in {"", "0"}), "?")
    return f"{name}{code}, state {state} in {function}, system call {syscall or '?'}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _location(frame: FrameType) -> str:
    path = frame.f_code.co_filename.removeprefix(f"{_PACKAGE}/")
    return f" in {frame.f_code.co_name} ({path}:{frame.f_lineno})"


def _state(tid: str) -> str:
    return _read(int(tid), "stat").rpartition(")")[2].strip()[:1]


def _kernel_function(tid: int) -> str:
    """Return the top of the kernel stack, e.g. `[<0>] synchronize_rcu_tasks_trace+0x2a/0x50`. Needs CAP_SYS_ADMIN."""
    return _read(tid, "stack").partition("\n")[0].rpartition(" ")[2].partition("+")[0]


def _read(tid: int, name: str) -> str:
    try:
        return Path(f"/proc/self/task/{tid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""
