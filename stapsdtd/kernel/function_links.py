"""Run a BPF program at kernel functions, without tracefs. See `probe_events` for kprobes.

fentry, fexit   at one function each, for which the program was loaded. Since Linux 5.19, which gives it a cookie.
kprobe.multi    at the entries of many. Since Linux 6.7, which tells how many calls it missed. Not at returns: until
                Linux 6.14, two calls per function and CPU may await theirs (fprobe_init_rethook of fprobe.c).

Each link has a program of its own, so that what the kernel counts for that is the link's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence

from stapsdtd.kernel.bpf_links import CookieOptions, MultiOptions, create_link
from stapsdtd.kernel.host_calls import BPF_LINK_CREATE, BPF_LINK_INFO
from stapsdtd.kernel.libbpf import last_error, library
from stapsdtd.kernel.own_programs import OwnProgram

FENTRY_TYPE, FEXIT_TYPE, MULTI_TYPE = 24, 25, 42
"""BPF_TRACE_FENTRY, BPF_TRACE_FEXIT and BPF_TRACE_KPROBE_MULTI (include/uapi/linux/bpf.h)."""

_MULTI_SINCE = (6, 7)


class _LinkInfo(ctypes.Structure):
    """struct bpf_link_info with its kprobe_multi member, up to what was missed."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("program", ctypes.c_uint32),
        ("addresses", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("missed", ctypes.c_uint64),
    ]


class FunctionLink:
    """A program at one or more kernel functions, for every process."""

    holds_event_mutex = False

    def __init__(
        self,
        program: OwnProgram,
        link: Callable[[int], int],
        wait_for_hits: Callable[[], None],
        missed_by: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """program: released with this. link: attaches it, and returns the link's descriptor. wait_for_hits: returns
        when no program runs that ran when it was called. missed_by: how many calls a link missed. is_gone: whether
        it was removed.
        """
        self.own_program = program
        self._attach = link
        self._wait_for_hits = wait_for_hits
        self._missed_by = missed_by
        self._link: int | None = None
        self._by_link = 0
        # `missed` is called while another thread removes it
        self._lock = threading.Lock()
        self.is_gone = False

    def arm(self, pid: int | None) -> None:
        """pid: None. Raises OSError."""
        if pid is not None:
            raise BPF_LINK_CREATE.refused("a kernel function for one process", errno.EOPNOTSUPP)
        if self._link is None:
            self._link = self._attach(self.own_program.descriptor)

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int:  # noqa: ARG002 - it is none of these
        """Return how many calls the link missed, besides those that its program skipped."""
        with self._lock:
            if self._link is not None:
                self._by_link = self._missed_by(self._link)
            return self._by_link

    def unpatch(self) -> None:
        """Detach the program. It may still run for calls that have begun."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                os.close(link)

    def unpatch_in(self, pid: int) -> None:
        """Do nothing: it is for all processes."""

    def renew_in(self, pid: int) -> bool:  # noqa: ARG002 - it ends with no process
        """Do nothing: it ends with no process. Return True."""
        return True

    def disarm(self) -> None:
        """Detach the program, and wait until it does not run any more."""
        self.unpatch()
        self._wait_for_hits()

    def remove(self) -> None:
        """Detach the program, and let the kernel free it."""
        self.unpatch()
        if not self.is_gone:
            self.is_gone = True
            self.own_program.release()


def link_call(program: int, attach_type: int, cookie: int) -> int:
    """Run a program at the function that it was loaded for. Return the link's descriptor. Raises OSError."""
    options = CookieOptions(cookie=cookie)
    return create_link(program, 0, attach_type, options, "the function that its program was loaded for")


def link_entries(program: int, functions: Sequence[str], cookies: Sequence[int]) -> int:
    """Run a program at the entries of functions, which are not of modules. Return the link's descriptor.

    Raises OSError if ftrace cannot patch one of them.
    """
    symbols = (ctypes.c_char_p * len(functions))(*(name.encode() for name in functions))
    numbers = array("Q", cookies)
    options = MultiOptions(
        count=len(functions),
        symbols=ctypes.addressof(symbols),
        cookies=numbers.buffer_info()[0],
    )
    named = functions[0] if len(functions) == 1 else f"{functions[0]} and {len(functions) - 1} other functions"
    return create_link(program, 0, MULTI_TYPE, options, named)


def missed_entries(link: int) -> int:
    """Return how many calls a link to many functions could not hit. Raises OSError."""
    info, size = _LinkInfo(), ctypes.c_uint32(ctypes.sizeof(_LinkInfo))
    if library().bpf_obj_get_info_by_fd(link, ctypes.byref(info), ctypes.byref(size)):
        raise last_error(BPF_LINK_INFO, "a link to kernel functions")
    return int(info.missed)


def tells_missed_entries(release: str) -> bool:
    """release: as printed by `uname -r`. An older kernel has links to many functions, too."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= _MULTI_SINCE
