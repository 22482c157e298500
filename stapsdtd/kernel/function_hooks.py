"""Try to attach to a kernel function, by each way that there is: fentry programs, and kprobes.

Tried on bpf_fentry_test1 (net/bpf/test_run.c), which the kernel itself calls only in BPF_PROG_TEST_RUN. Closing an
attachment takes a grace period, which another tracer's program can delay for long. So the trials have a thread of their
own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import btf, function_links, function_tables, libbpf, procfs
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.perf import ALL_PROCESSES, PerfEventAttributes, open_perf_event
from stapsdtd.kernel.perf_opener import Kind, PerfDeniedError

NAMES = BTF, TRACEABLE, LOCKDOWN, FENTRY, MULTI, KPROBES = (
    "kernel BTF", "traceable functions", "lockdown", "fentry", "kprobe.multi", "kprobes",
)  # fmt: skip
"""Of features."""
_LOCKDOWN = "/sys/kernel/security/lockdown"
_KERNELS = {
    "fentry": "boot another kernel: fentry needs Linux 5.19 and CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS, on arm64 6.4",
    "kprobe.multi": "boot a kernel built with CONFIG_FPROBE=y; until then, each of many functions takes a kprobe",
}
"""Remedies."""
_KPROBE_TYPE = "/sys/bus/event_source/devices/kprobe/type"
_TARGET = "bpf_fentry_test1"

_WITHOUT_KPROBES = "functions of modules, and returns of more than 64 at once, cannot be traced"

_PROGRAM_TRACING, _PROGRAM_KPROBE = 26, 2
"""BPF_PROG_TYPE_TRACING and _KPROBE (include/uapi/linux/bpf.h)."""


class HookTrials:
    """Begins to try what this host offers for kernel functions. Any thread may ask what was found."""

    def __init__(self, trials: Mapping[str, Callable[[], str]] | None = None) -> None:
        """trials: by name, in place of the kernel's; each returns what it found, or raises KernelFeatureError."""
        trials = _TRIALS if trials is None else trials
        self._found = {name: _pending(name) for name in trials}
        # nobody waits for it longer than they want to
        self._thread = threading.Thread(target=self._try, args=(trials,), name="stapsdtd-hooks", daemon=True)
        self._thread.start()

    def _try(self, trials: Mapping[str, Callable[[], str]]) -> None:
        for name, trial in trials.items():
            self._found[name] = _feature(name, trial)

    def found(self, seconds: float = 0.0) -> list[Feature]:
        """Return what is known after waiting for at most some seconds. Usually all is after 20 ms."""
        self._thread.join(seconds)
        return list(self._found.values())

    def features(self, seconds: float = 0.0) -> list[Feature]:
        """Return what users are told of that."""
        return told(self.found(seconds))


def _feature(name: str, trial: Callable[[], str]) -> Feature:
    try:
        return Feature(name, True, False, trial(), "")
    except KernelFeatureError as error:
        return Feature(name, False, False, error.reason, error.remedy)


def told(found: Sequence[Feature]) -> list[Feature]:
    """Return features, among which kprobes are not missing where both others take their place."""
    available = {feature.name for feature in found if feature.available}
    if not {FENTRY, MULTI} <= available:
        return list(found)
    return [
        replace(each, available=True, detail=f"not needed beside {FENTRY} and {MULTI}; {each.detail}", remedy="")
        if each.name == KPROBES and not each.available
        else each
        for each in found
    ]


def _pending(name: str) -> Feature:
    reason = "the kernel has not let go of a trial yet"
    return Feature(name, False, False, reason, "ask again; if it stays so, end other tracers that hold it up")


def _kernel_btf() -> str:
    modules = btf.modules()
    with btf.Btf(btf.path_of(btf.VMLINUX)):
        return f"types of the kernel and of {len(modules)} modules"


def _filter_functions() -> str:
    if reason := function_tables.why_no_filter_functions():
        raise KernelFeatureError(
            TRACEABLE,
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
            LOCKDOWN, "its mode is confidentiality: BPF programs and kprobes cannot read kernel memory",
            "boot with lockdown=integrity, or without secure boot where the distribution ties both",
        )  # fmt: skip
    return f"{mode}, which does not restrict tracing"


def _try_fentry() -> str:
    try:
        target = libbpf.vmlinux_function(_TARGET, function_links.FENTRY_TYPE)
    except OSError as error:
        raise KernelFeatureError(FENTRY, f"the kernel's BTF has no {_TARGET} to try", btf.REMEDY) from error
    try:
        program = libbpf.load_trial(_PROGRAM_TRACING, function_links.FENTRY_TYPE, target)
    except OSError as error:
        raise _refused(FENTRY, "the kernel refuses to load such a program", error) from error
    try:
        # with a cookie, as functions are told by it
        os.close(function_links.link_call(program, function_links.FENTRY_TYPE, 1))
    except OSError as error:
        raise _refused(FENTRY, "the kernel refuses to attach such a program", error) from error
    finally:
        os.close(program)
    return "BPF programs attach to functions"


def _try_multi() -> str:
    if not function_links.tells_missed_entries(os.uname().release):
        remedy = "boot Linux 6.7 or later; until then, each of many functions takes a kprobe"
        raise KernelFeatureError(MULTI, "the kernel does not tell how many calls such a link missed", remedy)
    try:
        program = libbpf.load_trial(_PROGRAM_KPROBE, function_links.MULTI_TYPE)
    except OSError as error:
        raise _refused(MULTI, "the kernel refuses to load such a program", error) from error
    try:
        os.close(function_links.link_entries(program, [_TARGET], [0]))
    except OSError as error:
        raise _refused(MULTI, "the kernel refuses to attach such a program", error) from error
    finally:
        os.close(program)
    return "BPF programs attach to many functions at once"


def _try_kprobe() -> str:
    try:
        with open(_KPROBE_TYPE, encoding="ascii") as file:
            kind = int(file.read())
    except OSError as error:
        remedy = "boot a kernel built with CONFIG_KPROBE_EVENTS=y"
        raise KernelFeatureError(KPROBES, f"the kernel has none, so {_WITHOUT_KPROBES}", remedy) from error
    name = ctypes.create_string_buffer(_TARGET.encode())
    attributes = PerfEventAttributes(type=kind)
    # config1 is kprobe_func, config2 the offset in it
    attributes.rest[0] = ctypes.addressof(name)
    try:
        os.close(open_perf_event(attributes, ALL_PROCESSES, 0, Kind.KPROBE_TRIAL))
    except PerfDeniedError as error:
        raise KernelFeatureError(KPROBES, error.reason, error.remedy) from error
    except OSError as error:
        raise _refused(KPROBES, f"{_WITHOUT_KPROBES}, since the kernel refuses one", error) from error
    return "perf attaches to functions"


_TRIALS: Mapping[str, Callable[[], str]] = {
    BTF: _kernel_btf,
    TRACEABLE: _filter_functions,
    LOCKDOWN: lockdown,
    FENTRY: _try_fentry,
    MULTI: _try_multi,
    KPROBES: _try_kprobe,
}


def _refused(name: str, what: str, error: OSError) -> KernelFeatureError:
    if error.errno in {errno.EPERM, errno.EACCES}:
        remedy = "run as root or with CAP_BPF and CAP_PERFMON"
        if procfs.is_filtered():
            remedy += ", and with a seccomp profile that allows it"
        remedy += "; if that is so, the host's kernel or a security module of it forbids it"
    else:
        remedy = _KERNELS.get(name, "boot another kernel")
    return KernelFeatureError(name, f"{what} ({error.strerror or os.strerror(error.errno or 0)})", remedy)
