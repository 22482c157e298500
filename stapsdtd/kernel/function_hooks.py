"""Try to attach to a kernel function, by each way that there is: fentry programs, and kprobes.

Tried on bpf_fentry_test1 (net/bpf/test_run.c), which the kernel itself calls only in BPF_PROG_TEST_RUN. Closing an
attachment takes a grace period, which another tracer's program can delay for long. So the trials have a thread of their
own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Mapping

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import btf, function_tables, libbpf, procfs
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.perf import ALL_PROCESSES, PerfEventAttributes, open_perf_event

FENTRY, KPROBES = "fentry", "kprobes"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_KPROBE_TYPE = "/sys/bus/event_source/devices/kprobe/type"
_TARGET = b"bpf_fentry_test1"
_SECONDS = 2.0

_PROGRAM_TRACING, _TRACE_FENTRY = 26, 24
"""BPF_PROG_TYPE_TRACING and BPF_TRACE_FENTRY (include/uapi/linux/bpf.h)."""
_RETURN_0 = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""r0 = 0; exit"""


class _LoadOptions(ctypes.Structure):
    """The first members of struct bpf_prog_load_opts, whose size libbpf learns from sz."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("attempts", ctypes.c_int),
        ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_ifindex", ctypes.c_uint32),
        ("kern_version", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
        ("attach_prog_fd", ctypes.c_uint32),
        ("attach_btf_obj_fd", ctypes.c_uint32),
    )


def probe_hooks(seconds: float = _SECONDS) -> list[Feature]:
    """Return what this host offers for kernel functions. Takes as long as two grace periods, and at most `seconds`."""
    return [
        _feature("kernel BTF", _kernel_btf),
        _feature("traceable functions", _filter_functions),
        _feature("lockdown", lockdown),
        *tried({FENTRY: _try_fentry, KPROBES: _try_kprobe}, seconds),
    ]


def tried(trials: Mapping[str, Callable[[], str]], seconds: float) -> list[Feature]:
    """Make trials, one after the other, and return the features that they are of.

    trials: by name; each returns what it found, or raises KernelFeatureError. Those without a result after `seconds`
    are given up, in a thread that may never end.
    """
    found = {name: _late(name, seconds) for name in trials}

    def try_all() -> None:
        for name, trial in trials.items():
            found[name] = _feature(name, trial)

    thread = threading.Thread(target=try_all, name="stapsdtd-hooks", daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found.values())


def _feature(name: str, trial: Callable[[], str]) -> Feature:
    try:
        return Feature(name, True, False, trial(), "")
    except KernelFeatureError as error:
        return Feature(name, False, False, error.reason, error.remedy)


def _late(name: str, seconds: float) -> Feature:
    reason = f"the kernel has not let go of a trial within {seconds:g} s"
    return Feature(name, False, False, reason, "end other tracers that hold it up, and restart stapsdtd")


def _kernel_btf() -> str:
    modules = btf.modules()
    with btf.Btf(btf.path_of(btf.VMLINUX)):
        return f"types of the kernel and of {len(modules)} modules"


def _filter_functions() -> str:
    if reason := function_tables.why_no_filter_functions():
        raise KernelFeatureError(
            "traceable functions",
            f"which ones ftrace can patch is unknown: {reason}",
            "run as root, on a kernel with CONFIG_DYNAMIC_FTRACE; until then, notrace functions look like others",
        )
    return "available_filter_functions tells which can be attached to"


def lockdown(path: str = _LOCKDOWN) -> str:
    """Return what the kernel's lockdown is. Raises KernelFeatureError if it forbids to read kernel memory.

    The file has the modes, the current one in brackets: `none [integrity] confidentiality`.
    """
    try:
        with open(path, encoding="ascii") as file:
            mode = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return f"none that {path} tells of"
    if mode == "confidentiality":
        raise KernelFeatureError(
            "lockdown", "its mode is confidentiality: BPF programs and kprobes cannot read kernel memory",
            "boot with lockdown=integrity, or without secure boot where the distribution ties both",
        )  # fmt: skip
    return f"{mode}, which does not restrict tracing"


def _try_fentry() -> str:
    library = libbpf.library()
    library.libbpf_find_vmlinux_btf_id.argtypes = (ctypes.c_char_p, ctypes.c_int)
    target = library.libbpf_find_vmlinux_btf_id(_TARGET, _TRACE_FENTRY)
    if target <= 0:
        raise KernelFeatureError(FENTRY, f"the kernel's BTF has no {_TARGET.decode()} to try", btf.REMEDY)
    options = _LoadOptions(sz=ctypes.sizeof(_LoadOptions), expected_attach_type=_TRACE_FENTRY, attach_btf_id=target)
    library.bpf_prog_load.argtypes = (
        ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p,
    )  # fmt: skip
    program = library.bpf_prog_load(
        _PROGRAM_TRACING, b"stapsdt_try", b"GPL", _RETURN_0, len(_RETURN_0) // 8, ctypes.byref(options)
    )
    if program < 0:
        raise _refused(FENTRY, "the kernel refuses to load such a program", libbpf.last_error())
    try:
        os.close(libbpf.attach_to_tracepoint(program))
    except OSError as error:
        raise _refused(FENTRY, "the kernel refuses to attach such a program", error) from error
    finally:
        os.close(program)
    return "BPF programs attach to functions"


def _try_kprobe() -> str:
    try:
        with open(_KPROBE_TYPE, encoding="ascii") as file:
            kind = int(file.read())
    except OSError as error:
        remedy = "boot a kernel built with CONFIG_KPROBE_EVENTS=y"
        raise KernelFeatureError(KPROBES, "the kernel has none", remedy) from error
    name = ctypes.create_string_buffer(_TARGET)
    attributes = PerfEventAttributes(type=kind)
    # config1 is kprobe_func, config2 the offset in it
    attributes.rest[0] = ctypes.addressof(name)
    try:
        os.close(open_perf_event(attributes, ALL_PROCESSES, 0))
    except OSError as error:
        raise _refused(KPROBES, "the kernel refuses one", error) from error
    return "perf attaches to functions"


def _refused(name: str, what: str, error: OSError) -> KernelFeatureError:
    if error.errno in {errno.EPERM, errno.EACCES}:
        remedy = "run as root or with CAP_BPF and CAP_PERFMON"
        if procfs.is_filtered():
            remedy += ", and with a seccomp profile that allows it"
        remedy += "; if that is so, the host's kernel or a security module of it forbids it"
    else:
        remedy = "boot another kernel: fentry needs CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS, on arm64 Linux 6.4"
    return KernelFeatureError(name, f"{what} ({error.strerror or os.strerror(error.errno or 0)})", remedy)
