"""Run a BPF program at many places of a file, without tracefs and without perf (BPF_LINK_CREATE in bpf(2)).

    struct uprobe_multi in union bpf_attr, include/uapi/linux/bpf.h, since Linux 6.6
    u64 path, offsets, ref_ctr_offsets, cookies | u32 count, flags, pid

Each place has a cookie of its own. Closing the link detaches the program from all of them after one grace period, in
which nobody else has to wait: no event_mutex is held.

A link is for all processes or for one, which the kernel knows by its main thread: it patches memory that is the main
thread's (uprobe_multi_link_filter in kernel/trace/bpf_trace.c) and runs the program for all threads of its process
(uprobe_prog_run). Linux 6.6 to 6.9 run it for the main thread alone, unless a stable release mended that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.host_calls import BPF_LINK_CREATE
from stapsdtd.kernel.libbpf import last_error, load_trial
from stapsdtd.kernel.places import Place

ATTACH_TYPE = 48
"""BPF_TRACE_UPROBE_MULTI, for which a program must have been loaded."""

_SYSCALL = {
    "x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "s390x": 351, "ppc64le": 361,
}  # fmt: skip
_LINK_CREATE = 28
PROGRAM_TYPE = 2

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


_COUNTING = "counting.bpf.o"
"""bpf/counting.bpf.c."""

_CLOSING_THREADS = 32
"""Each of them waits for a grace period, which those of all closes at a time share."""


class NoMainThreadError(OSError):
    """The main thread of a process has ended before others, so a link for that process alone would patch nothing."""

    def __init__(self, pid: int) -> None:
        super().__init__(errno.EOPNOTSUPP, f"the main thread of process {pid} has ended: no link can be for it alone")


class UprobeLink:
    """Places of one file, to be armed for single processes or for every present and future process."""

    holds_event_mutex = False
    own_program = None

    def __init__(self, program: int, places: Sequence[Place], cookies: Sequence[int]) -> None:
        """program: loaded for ATTACH_TYPE. cookies: what it is told at a hit, for each place."""
        self._program = program
        self._places = places
        self._cookies = cookies
        self._links: dict[int | None, int] = {}

    def arm(self, pid: int | None) -> None:
        """Patch the places in one process or, if pid is None, in all: then no process may be armed by its pid.

        Raises OSError; ESRCH if there is no such process, NoMainThreadError.
        """
        if pid in self._links or None in self._links:
            return
        if pid is not None and procfs.memory_holder(pid) != pid:
            raise NoMainThreadError(pid)
        self._links[pid] = _link(self._program, self._places, self._cookies, pid)

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int:  # noqa: ARG002 - the kernel misses none
        """Return 0: the kernel runs it for every hit."""
        return 0

    def unpatch(self) -> None:
        """Unpatch the places in all processes, and wait until no hit runs the program any more."""
        links = []
        while self._links:
            try:
                links.append(self._links.popitem()[1])
            except KeyError:
                # another thread took the last one
                break
        _close(links)

    def unpatch_in(self, pid: int) -> None:
        """Unpatch the places in one process and its children, if it was armed by its pid."""
        if (link := self._links.pop(pid, None)) is not None:
            os.close(link)

    def renew_in(self, pid: int) -> bool:
        """Return False if it patches a process by its pid, which has another main thread or none: another link is to
        be armed in place of this one. Both together would run the program twice for each hit.
        """
        return pid not in self._links

    disarm = unpatch
    remove = unpatch


def are_supported() -> bool:
    """Return whether the kernel takes links to uprobes; it then refuses one to a directory for that reason."""
    if platform.machine() not in _SYSCALL:
        return False
    try:
        program = load_trial(PROGRAM_TYPE, ATTACH_TYPE)
    except OSError:
        return False
    try:
        os.close(_link(program, [Place("/", 0)], [0], None))
    except OSError as error:
        return error.errno == errno.EBADF
    finally:
        os.close(program)
    return True


def are_for_processes() -> bool:
    """Return whether a link for a process runs the program for all of its threads: for this process, a function of the
    C library, and a thread that is not the main one. Takes some 50 ms.
    """
    try:
        with ThreadPoolExecutor(1, "stapsdtd-trial") as thread:
            return thread.submit(_counts_other_threads).result()
    except (KernelFeatureError, OSError):
        return False


def _counts_other_threads() -> bool:
    """Raises KernelFeatureError and OSError."""
    place = _place_of(ctypes.cast(_libc.getppid, ctypes.c_void_p).value or 0)
    with as_file(files("stapsdtd.kernel.objects") / _COUNTING) as path:
        counting = BpfObject(str(path), {}, {}, attach_types={"count": ATTACH_TYPE})
    try:
        with counting.table(".bss") as counts:
            link = _link(counting.program("count"), [place], [0], os.getpid())
            try:
                _libc.getppid()
            finally:
                os.close(link)
            return any(counts[:8])
    finally:
        counting.close()


def _place_of(address: int) -> Place:
    """Return where in a file the code at an address of this process is."""
    for mapping in procfs.executable_mappings(os.getpid()):
        if mapping.start <= address < mapping.end:
            return Place(next(procfs.ways_to(os.getpid(), mapping)), address - mapping.start + mapping.file_offset)
    raise BPF_LINK_CREATE.refused(f"{address:#x}", errno.EFAULT, "no file is mapped there")


def wait_for_hits(program: int) -> None:
    """Return when uprobe hits that had begun have run all of their programs. program: loaded for ATTACH_TYPE.

    Since Linux 6.12 a hit walks the list of programs while others are attached and detached, and whoever detaches one
    waits for all walks on the host (uprobe_unregister_sync in kernel/events/uprobes.c). So this attaches one to a file
    that nobody maps, and detaches it. Before, attaching waited for hits (register_rwsem). Raises OSError.
    """
    with open(os.memfd_create("stapsdtd", os.MFD_CLOEXEC), "wb") as file:
        file.truncate(mmap.PAGESIZE)
        os.close(_link(program, [Place(f"/proc/self/fd/{file.fileno()}", 0)], [0], None))


def _close(links: Iterable[int]) -> None:
    """Close links, which takes a grace period for each, many at once."""
    match list(links):
        case []:
            pass
        case [link]:
            os.close(link)
        case many:
            with ThreadPoolExecutor(min(len(many), _CLOSING_THREADS), "stapsdtd-links") as pool:
                list(pool.map(os.close, many))


def _link(program: int, places: Sequence[Place], cookies: Sequence[int], pid: int | None) -> int:
    """Return the descriptor of a link, which lasts until it is closed. pid: None for all processes. Raises OSError."""
    offsets = array("Q", [place.offset for place in places])
    semaphore_offsets = array("Q", [place.semaphore_offset or 0 for place in places])
    cookie_numbers = array("Q", cookies)
    attributes = _Attributes(
        program=program,
        attach_type=ATTACH_TYPE,
        path=os.fsencode(places[0].path),
        offsets=offsets.buffer_info()[0],
        semaphore_offsets=semaphore_offsets.buffer_info()[0],
        cookies=cookie_numbers.buffer_info()[0],
        count=len(places),
        pid=pid or 0,
    )
    link: int = _libc.syscall(
        _SYSCALL[platform.machine()], _LINK_CREATE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if link < 0:
        raise last_error(BPF_LINK_CREATE, f"{len(places)} places of {places[0].path}")
    return link
