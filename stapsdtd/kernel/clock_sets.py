"""timerfd_create(2), which the standard library lacks before Python 3.13: report when the wall clock is set.

The kernel cancels a timer with TFD_TIMER_CANCEL_ON_SET when the clock is set, a leap second is inserted, or the host
resumes (`timerfd_clock_was_set` and `timerfd_resume` in fs/timerfd.c).
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress

from stapsdtd.kernel.host_calls import CLOCK_SETS

_TFD_TIMER_ABSTIME, _TFD_TIMER_CANCEL_ON_SET = 1, 2
_NEVER_SECONDS = (1 << 8 * ctypes.sizeof(ctypes.c_long) - 1) - 1
"""The latest time there is."""

_libc = ctypes.CDLL(None, use_errno=True)


class _ITimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_seconds", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class ClockSets:
    """Readable when the clock has been set. Raises OSError."""

    def __init__(self) -> None:
        self._descriptor = _checked(_libc.timerfd_create(time.CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC))
        timer = _ITimerSpec(value_seconds=_NEVER_SECONDS)
        flags = _TFD_TIMER_ABSTIME | _TFD_TIMER_CANCEL_ON_SET
        _checked(_libc.timerfd_settime(self._descriptor, flags, ctypes.byref(timer), None))

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> None:
        """Wait for the next time."""
        # ECANCELED: it was set; EAGAIN: it was not
        with suppress(OSError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise CLOCK_SETS.refused("the clock", ctypes.get_errno())
    return result
