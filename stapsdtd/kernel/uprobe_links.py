"""Run a BPF program at many places of a file, in every process, without tracefs (BPF_LINK_CREATE in bpf(2)).

    struct uprobe_multi in union bpf_attr, include/uapi/linux/bpf.h, since Linux 6.6
    u64 path, offsets, ref_ctr_offsets, cookies | u32 count, flags, pid

Each place has a cookie of its own. Closing the link detaches the program from all of them after one grace period, in
which nobody else has to wait: no event_mutex is held.

A link for a single process is not offered, since the kernel would leave the children of that process patched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Mapping, Sequence

from stapsdtd.kernel.libbpf import last_error, load_trial
from stapsdtd.kernel.places import Place

ATTACH_TYPE = 48
"""BPF_TRACE_UPROBE_MULTI, for which a program must have been loaded."""

_SYSCALL = {
    "x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "s390x": 351, "ppc64le": 361,
}  # fmt: skip
_LINK_CREATE = 28
_PROGRAM_TYPE_KPROBE = 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.c_uint32),
        ("target", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_char_p),
        ("offsets", ctypes.c_void_p),
        ("semaphore_offsets", ctypes.c_void_p),
        ("cookies", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class UprobeLink:
    """Places of one file, to be armed for every present and future process."""

    holds_event_mutex = False
    own_program = None

    def __init__(self, program: int, places: Sequence[Place], cookies: Sequence[int]) -> None:
        """program: loaded for ATTACH_TYPE. cookies: what it is told at a hit, for each place."""
        self._program = program
        self._places = places
        self._cookies = cookies
        self._link: int | None = None

    def arm(self, pid: int | None) -> None:
        """pid: None. Raises OSError."""
        if pid is not None:
            raise OSError(errno.EOPNOTSUPP, "a link is for all processes")
        if self._link is None:
            self._link = _link(self._program, self._places, self._cookies)

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int:  # noqa: ARG002 - the kernel misses none
        """Return 0: the kernel runs it for every hit."""
        return 0

    def unpatch(self) -> None:
        """Unpatch the places in all processes, and wait until no hit runs the program any more."""
        link, self._link = self._link, None
        if link is not None:
            os.close(link)

    def unpatch_in(self, pid: int) -> None:
        """Do nothing: it is for all processes."""

    def renew_in(self, pid: int) -> None:
        """Do nothing: it ends with no process."""

    disarm = unpatch
    remove = unpatch


def are_supported() -> bool:
    """Return whether the kernel takes links to uprobes; it then refuses one to a directory for that reason."""
    if platform.machine() not in _SYSCALL:
        return False
    try:
        program = load_trial(_PROGRAM_TYPE_KPROBE, ATTACH_TYPE)
    except OSError:
        return False
    try:
        os.close(_link(program, [Place("/", 0)], [0]))
    except OSError as error:
        return error.errno == errno.EBADF
    finally:
        os.close(program)
    return True


def _link(program: int, places: Sequence[Place], cookies: Sequence[int]) -> int:
    """Return the descriptor of a link, which lasts until it is closed. Raises OSError."""
    numbers = ctypes.c_uint64 * len(places)
    offsets = numbers(*(place.offset for place in places))
    semaphore_offsets = numbers(*(place.semaphore_offset or 0 for place in places))
    cookie_numbers = numbers(*cookies)
    attributes = _Attributes(
        program=program,
        attach_type=ATTACH_TYPE,
        path=os.fsencode(places[0].path),
        offsets=ctypes.addressof(offsets),
        semaphore_offsets=ctypes.addressof(semaphore_offsets),
        cookies=ctypes.addressof(cookie_numbers),
        count=len(places),
    )
    link: int = _libc.syscall(
        _SYSCALL[platform.machine()], _LINK_CREATE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if link < 0:
        raise last_error()
    return link
