"""What the kernel refuses the daemon, and what mends it: one table for all adapters.

    bpf(BPF_MAP_CREATE) stapsdt_rows: Operation not permitted; it takes CAP_BPF, which this daemon lacks: add it to
    CapabilityBoundingSet with 'systemctl edit stapsdtd', or to a container with --cap-add

An OSError becomes a HostRefusedError where the operation and its object are known: `last_error` of `kernel.libbpf` for
BPF, `host_call` for all others.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from stapsdtd.errors import HostRefusedError

_CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
    "CAP_CHECKPOINT_RESTORE": 40,
}
"""include/uapi/linux/capability.h."""
_SECCOMP_FILTER = 2

_EDIT = "'systemctl edit stapsdtd'"

_UNSUPPORTED = "this kernel does not offer it: 'stapsdt doctor' shows what is used instead, and docs/kernels.md"
_DOCTOR = "see 'stapsdt doctor', and the kernel's messages with 'journalctl -k'"

_REMEDIES: Mapping[int, str] = {
    errno.EMFILE: f"the daemon has no descriptors left: raise LimitNOFILE with {_EDIT}, elsewhere 'ulimit -n'",
    errno.ENFILE: "the host has no open files left: raise them with 'sysctl -w fs.file-max=NUMBER'",
    errno.ENOMEM: f"memory ran out: free some, or raise MemoryMax with {_EDIT}",
    errno.ENOSPC: "no room is left: see 'df -h' and 'df -i' for its file system",
    errno.EDQUOT: "the quota is used up: see 'quota -v'",
    errno.EROFS: f"it is mounted read-only: add it to ReadWritePaths with {_EDIT}, elsewhere 'mount -o remount,rw'",
    errno.EBUSY: "something else uses it: end the other tracer, and try again",
    errno.EAGAIN: "it is busy: try again",
    errno.EINTR: "it was interrupted: try again",
    errno.ESRCH: "the process has ended: start it, and try again",
    errno.ENOENT: "it does not exist, or no more: check its name, and try again",
    errno.ENXIO: "it is gone: try again",
    errno.EIO: "its device or file system fails: see 'journalctl -k'",
    errno.ESTALE: "its server has forgotten it: mount its file system again",
    errno.ENODEV: _UNSUPPORTED,
    errno.ENOSYS: _UNSUPPORTED,
    errno.EINVAL: _UNSUPPORTED,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.E2BIG: "too many at once: trace fewer probes, such as those of one file",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that the kernel may refuse.

    name: a system call as manual pages have it, or a verb. capabilities: that it takes. calls: system calls that a
    filter has to allow. remedies: by errno, where they differ from those of other operations.
    """

    name: str
    capabilities: tuple[str, ...] = ()
    calls: str = ""
    remedies: Mapping[int, str] = field(default_factory=dict)

    def refused(self, subject: str, number: int, reason: str = "") -> HostRefusedError:
        """Return the error to raise. subject: a path, a pid, or what else it was done to. reason: the daemon's own."""
        remedy = self.remedies.get(number, "") if reason else self.remedy(number)
        return HostRefusedError(self.name, subject, number, remedy, reason)

    def of(self, error: OSError, subject: str = "") -> HostRefusedError:
        """Return what an error is of this operation. subject: the file that the error names, if empty."""
        number, reason = error.errno or 0, error.strerror or str(error)
        return self.refused(subject or _named_by(error), number, "" if reason == os.strerror(number) else reason)

    def remedy(self, number: int) -> str:
        """Return what an errno takes to be mended, and the command for it."""
        if number in self.remedies:
            return self.remedies[number]
        if number in {errno.EPERM, errno.EACCES}:
            return self._remedy_of_denial()
        return _REMEDIES.get(number, _DOCTOR)

    def _remedy_of_denial(self) -> str:
        missing = [name for name in self.capabilities if not has_capability(name)]
        if missing:
            return (
                f"it takes {' and '.join(missing)}, which this daemon lacks: add it to CapabilityBoundingSet with "
                f"{_EDIT}, or to a container with --cap-add"
            )
        takes = f"it takes {' and '.join(self.capabilities)}, which this daemon has, so " if self.capabilities else ""
        if _status("Seccomp") == _SECCOMP_FILTER:
            return (
                f"{takes}a seccomp filter may forbid {self.calls or self.name}: allow it in SystemCallFilter with "
                f"{_EDIT}, or in the container's profile"
            )
        return f"{takes}a security module may forbid it: 'journalctl -k | grep -iE \"denied|lockdown\"' shows which"


@cache
def _status(name: str) -> int:
    """Return a hexadecimal number of this process's status, which does not change while it runs."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        return next((int(line.split()[1], 16) for line in lines if line.startswith(f"{name}:")), 0)


def has_capability(name: str) -> bool:
    """Report whether this process has a capability, such as CAP_BPF."""
    return bool(_status("CapEff") >> _CAPABILITIES[name] & 1)


@contextmanager
def host_call(operation: Operation, subject: str = "") -> Iterator[None]:
    """Make errors of the host raised inside tell of the operation, unless they tell of a more exact one."""
    try:
        yield
    except HostRefusedError:
        raise
    except OSError as error:
        raise operation.of(error, subject) from error


def _named_by(error: OSError) -> str:
    return str(error.filename) if error.filename is not None else ""


_OF_BPF = ("CAP_BPF",)
_OF_TRACING = ("CAP_BPF", "CAP_PERFMON")
_NO_LOCKED_MEMORY = f"locked memory ran out: raise LimitMEMLOCK with {_EDIT}, elsewhere 'ulimit -l'"
_TABLE_FULL = (
    "a table of the kernel is full: trace fewer probes, or end other subscriptions ('stapsdt info' shows them)"
)

BPF_MAP_CREATE = Operation(
    "bpf(BPF_MAP_CREATE)",
    _OF_BPF,
    "bpf()",
    {errno.E2BIG: f"memory of BPF maps ran out: raise MemoryMax with {_EDIT}, or lower [limits] in its configuration"},
)
BPF_MAP_UPDATE = Operation("bpf(BPF_MAP_UPDATE_ELEM)", _OF_BPF, "bpf()", {errno.E2BIG: _TABLE_FULL})
BPF_MAP_LOOKUP = Operation("bpf(BPF_MAP_LOOKUP_ELEM)", _OF_BPF, "bpf()")
BPF_MAP_DELETE = Operation("bpf(BPF_MAP_DELETE_ELEM)", _OF_BPF, "bpf()")
BPF_PROG_LOAD = Operation("bpf(BPF_PROG_LOAD)", _OF_TRACING, "bpf()")
BPF_LINK_CREATE = Operation(
    "bpf(BPF_LINK_CREATE)",
    _OF_TRACING,
    "bpf()",
    {
        errno.EBUSY: "another tracer has changed the function: end it, and try again",
        errno.ESRCH: "the process has ended, or the kernel has no such function: see 'stapsdt kernel info'",
    },
)
BPF_ITER_CREATE = Operation("bpf(BPF_ITER_CREATE)", _OF_TRACING, "bpf()")
BPF_LINK_INFO = Operation("bpf(BPF_OBJ_GET_INFO_BY_FD)", _OF_BPF, "bpf()")
BPF_RAW_TRACEPOINT_OPEN = Operation("bpf(BPF_RAW_TRACEPOINT_OPEN)", _OF_TRACING, "bpf()")
BTF_LOOKUP = Operation(
    "look up in the kernel's BTF",
    remedies={errno.ESRCH: "this kernel has no such function", errno.ENOENT: _UNSUPPORTED},
)
PERF_EVENT_OPEN = Operation(
    "perf_event_open",
    ("CAP_PERFMON",),
    "perf_event_open",
    {errno.ENOENT: "boot a kernel built with CONFIG_PERF_EVENTS=y"},
)
BUFFER_MMAP = Operation(
    "mmap", ("CAP_PERFMON",), "mmap", {errno.EPERM: _NO_LOCKED_MEMORY, errno.EAGAIN: _NO_LOCKED_MEMORY}
)

_TRACEFS_IS_ROOTS = "tracefs is root's: run the daemon as root, as its unit does"
TRACEFS = {
    errno.EACCES: _TRACEFS_IS_ROOTS,
    errno.EPERM: "a lockdown or a security module forbids it: see 'journalctl -k | grep -i lockdown'",
    errno.ENODEV: "it has no event number left, of 65,535: remove other tracers' events with 'perf probe --del'",
    errno.ENOENT: "it is not there: mount it with 'mount -t tracefs nodev /sys/kernel/tracing', or trace again",
}
TRACEFS_READ = Operation("read", remedies=TRACEFS)
TRACEFS_WRITE = Operation("write to", remedies=TRACEFS)

_OF_FILES = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
OPEN_FILE = Operation("open", _OF_FILES, "openat and openat2")
READ_FILE = Operation("read", calls="pread64", remedies={errno.EISDIR: "a directory has taken its place"})
STATUS = Operation("statx", _OF_FILES, "statx")
READ_PROC = Operation("read", ("CAP_SYS_PTRACE",), "openat and read")
READ_MEMORY = Operation(
    "process_vm_readv",
    ("CAP_SYS_PTRACE",),
    "process_vm_readv",
    {errno.EFAULT: "the process has no such memory any more"},
)
OPEN_CGROUP = Operation(
    "open_by_handle_at",
    ("CAP_DAC_READ_SEARCH",),
    "open_by_handle_at",
    {errno.ENOENT: "cgroups are not mounted here: mount them with 'mount -t cgroup2 none /sys/fs/cgroup'"},
)
CLOCK_SETS = Operation("notice that it is set:", (), "timerfd_create and timerfd_settime")
INOTIFY = Operation(
    "watch",
    (),
    "inotify_init1 and inotify_add_watch",
    {
        errno.EMFILE: "no inotify instances are left: raise them with 'sysctl -w fs.inotify.max_user_instances=NUMBER'",
        errno.ENOSPC: "no inotify watches are left: raise them with 'sysctl -w fs.inotify.max_user_watches=NUMBER'",
    },
)
START_PROCESS = Operation(
    "start",
    (),
    "clone and execve",
    {
        errno.EAGAIN: f"the daemon has too many tasks: raise TasksMax with {_EDIT}, elsewhere 'ulimit -u'",
        errno.ENOENT: "the program is gone: install stapsdtd anew",
        errno.EACCES: "the program may not be executed: install stapsdtd where no noexec is mounted ('findmnt')",
    },
)
MAKE_DESCRIPTOR = Operation("make")
FOLLOW_PROCESS = Operation("pidfd_open", (), "pidfd_open")

ARM = Operation("arm", _OF_TRACING, "bpf() and perf_event_open")
BEGIN = Operation("begin subscription", _OF_TRACING, "bpf() and perf_event_open")
KEEP_ARMED = Operation("keep armed", _OF_TRACING, "bpf() and perf_event_open")
LISTEN = Operation(
    "listen at",
    remedies={
        errno.EACCES: "its directory is not the daemon's to write to: see its owner with 'ls -ld'",
        errno.ENOENT: "its directory is missing: make it with 'mkdir -p'",
        errno.EADDRINUSE: "another daemon listens there: 'ss -xlp' shows which",
        errno.ELOOP: "a symbolic link is in its place: remove it",
    },
)
KEEP_INVENTORY = Operation(
    "write",
    remedies={errno.EACCES: "its directory is not the daemon's to write to: see [inventory] state, and 'ls -ld'"},
)
ACCEPT = Operation("accept")
PARSE = Operation("parse", remedies={errno.EIO: "report it, with the daemon's log: 'journalctl -u stapsdtd'"})
