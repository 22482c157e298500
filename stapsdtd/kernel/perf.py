"""perf_event_open(2) and its side-band records of every executable mapping on the host, memfds included.

    header u32 type, u16 misc, u16 size
    MMAP2  u32 pid, tid | u64 address, length, file offset | u32 major, minor | u64 inode, generation
           u32 protection, flags | path, up to a NUL

The records come from a dummy software event, through one ring buffer per CPU. A full ring leaves a LOST record.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from typing import NamedTuple

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.host_calls import PERF_EVENT_OPEN
from stapsdtd.kernel.perf_opener import Kind, OpenerAbsentError, PerfDeniedError, PerfOpener, subject_of
from stapsdtd.model import FileOffset, Mapping

_SYSCALL = {
    "x86_64": 298, "i686": 336, "aarch64": 241, "riscv64": 241, "loongarch64": 241, "s390x": 331,
    "ppc64le": 319, "armv7l": 364,
}  # fmt: skip
_TYPE_SOFTWARE, _COUNT_SW_DUMMY = 1, 9
_FLAG_FD_CLOEXEC = 8
_MMAP, _WATERMARK, _MMAP2 = 1 << 8, 1 << 14, 1 << 23
_RECORD_LOST, _RECORD_MMAP2 = 2, 10
_HEADER = struct.Struct("=IHH")
_MMAP2_BODY = struct.Struct("=IIQQQIIQQII")
_PATH_AT = _HEADER.size + _MMAP2_BODY.size
_POSITIONS = struct.Struct("=QQ")
_HEAD_AT, _TAIL_AT = 1024, 1032
_DATA_PAGES = 64

_PARANOID = "/proc/sys/kernel/perf_event_paranoid"
_UPSTREAM_PARANOID = 2
"""The highest value that means something upstream, and the highest that leaves perf events to CAP_PERFMON on Debian."""

ALL_PROCESSES, ALL_CPUS = -1, -1

_FEATURE = "perf events"

_libc = ctypes.CDLL(None, use_errno=True)
_opener = PerfOpener()


class PerfEventAttributes(ctypes.Structure):
    """The first 128 bytes of struct perf_event_attr (PERF_ATTR_SIZE_VER7)."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_watermark", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 9),
    )


def open_perf_event(attributes: PerfEventAttributes, pid: int, cpu: int, kind: Kind = Kind.TRACEPOINT) -> int:
    """Return the event's descriptor. Where the kernel denies it to this process, stapsdtd-opener is asked.

    kind: what the attributes are of, in the opener's words; it makes them itself.

    Raises PerfDeniedError, OSError of other kinds, and KernelFeatureError on an unknown machine.
    """
    try:
        return _open_here(attributes, pid, cpu)
    except PermissionError as error:
        try:
            return _opener.open(kind, pid, cpu, attributes.config if kind is Kind.TRACEPOINT else 0)
        except OpenerAbsentError:
            raise _denied(os.strerror(error.errno or errno.EACCES)) from error


def _open_here(attributes: PerfEventAttributes, pid: int, cpu: int) -> int:
    syscall_number = _SYSCALL.get(platform.machine())
    if syscall_number is None:
        raise KernelFeatureError(_FEATURE, f"unknown machine {platform.machine()}", "report it")
    attributes.size = ctypes.sizeof(attributes)
    descriptor: int = _libc.syscall(syscall_number, ctypes.byref(attributes), pid, cpu, -1, _FLAG_FD_CLOEXEC)
    if descriptor < 0:
        raise PERF_EVENT_OPEN.refused(subject_of(pid), ctypes.get_errno())
    return descriptor


def way_of_opening() -> str:
    """Return what to add to a feature that perf events make."""
    return ", through stapsdtd-opener" if _opener.is_used else ""


def _denied(error: str) -> PerfDeniedError:
    """Say which capability the kernel asks for, and what to do."""
    try:
        with open(_PARANOID, encoding="ascii") as file:
            paranoid = int(file.read())
    except (OSError, ValueError):
        paranoid = _UPSTREAM_PARANOID
    if paranoid > _UPSTREAM_PARANOID:
        return PerfDeniedError(
            f"{error}: with kernel.perf_event_paranoid = {paranoid}, Debian's and Ubuntu's kernels want CAP_SYS_ADMIN",
            "run 'systemctl start stapsdtd-opener.socket', whose service has it, or "
            f"'sysctl kernel.perf_event_paranoid={_UPSTREAM_PARANOID}', with which CAP_PERFMON is enough",
        )
    filtered = ", and with a seccomp profile that allows it" if procfs.is_filtered() else ""
    return PerfDeniedError(f"{error}: it takes CAP_PERFMON", f"run as root or with that capability{filtered}")


class Mapped(NamedTuple):
    """A process mapped a file executable. A tuple, since a busy host makes thousands of these per second."""

    pid: int
    dev: int
    inode: int
    path: str
    start: int
    length: int
    file_offset: int

    @property
    def mapping(self) -> Mapping:
        end = self.start + self.length
        return Mapping(self.start, end, FileOffset(self.file_offset), self.dev, self.inode, self.path)


class Lost(NamedTuple):
    """The ring was full; rescan /proc for what was missed."""


class RingBuffer:
    """Bytes that the kernel appends at a head and this process takes from a tail; both only grow.

    memory: a page with both positions (struct perf_event_mmap_page), then the pages of data.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._data_bytes = len(memory) - mmap.PAGESIZE

    def take(self) -> bytes:
        """Return what was appended since the last call."""
        head, tail = _POSITIONS.unpack_from(self._memory, _HEAD_AT)
        if head == tail:
            return b""
        begin = mmap.PAGESIZE + tail % self._data_bytes
        before_wrap = self._memory[begin : begin + head - tail]
        data = before_wrap + self._memory[mmap.PAGESIZE : mmap.PAGESIZE + head - tail - len(before_wrap)]
        struct.pack_into("=Q", self._memory, _TAIL_AT, head)
        return data


def mapping_records(data: bytes) -> list[Mapped | Lost]:
    """Decode side-band records. Anonymous memory and the vdso are left out."""
    records: list[Mapped | Lost] = []
    position = 0
    while position < len(data):
        kind, _misc, size = _HEADER.unpack_from(data, position)
        if kind == _RECORD_MMAP2:
            pid, _tid, start, length, offset, major, minor, inode, *_ = _MMAP2_BODY.unpack_from(
                data, position + _HEADER.size
            )
            if inode:
                path = data[position + _PATH_AT : data.index(0, position + _PATH_AT)]
                dev = os.makedev(major, minor)
                records.append(Mapped(pid, dev, inode, procfs.shown_path(path), start, length, offset))
        elif kind == _RECORD_LOST:
            records.append(Lost())
        position += size
    return records


class MappingRing:
    """The mapping records of one CPU. Raises KernelFeatureError if perf_event_open is denied."""

    def __init__(self, cpu: int) -> None:
        attributes = PerfEventAttributes(
            type=_TYPE_SOFTWARE,
            config=_COUNT_SW_DUMMY,
            flags=_MMAP | _MMAP2 | _WATERMARK,
            wakeup_watermark=1,
        )
        try:
            self._descriptor = open_perf_event(attributes, ALL_PROCESSES, cpu, Kind.MAPPINGS)
        except PerfDeniedError as error:
            raise KernelFeatureError(_FEATURE, error.reason, error.remedy) from error
        except OSError as error:
            remedy = "boot a kernel built with CONFIG_PERF_EVENTS=y"
            raise KernelFeatureError(_FEATURE, str(error.strerror), remedy) from error
        try:
            self._memory = mmap.mmap(self._descriptor, mmap.PAGESIZE * (1 + _DATA_PAGES))
        except OSError as error:
            os.close(self._descriptor)
            raise KernelFeatureError(_FEATURE, f"mmap of a ring: {error.strerror}", "raise LimitMEMLOCK=") from error
        self._ring = RingBuffer(self._memory)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[Mapped | Lost]:
        """Return pending records without waiting."""
        return mapping_records(self._ring.take())

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)


def online_cpus() -> list[int]:
    """Return the CPUs that are online."""
    return _cpus("online")


def possible_cpus() -> list[int]:
    """Return the CPUs that may ever be online, for which per-CPU tables are sized."""
    return _cpus("possible")


def _cpus(which: str) -> list[int]:
    with open(f"/sys/devices/system/cpu/{which}", encoding="ascii") as file:
        return parse_cpus(file.read())


def parse_cpus(text: str) -> list[int]:
    """Parse a list of CPUs such as `0-3,6`."""
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]
