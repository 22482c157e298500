"""Why this host does not take a BPF program, and what helps against that cause."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Self

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs

_BTF = "/sys/kernel/btf/vmlinux"
_TESTED = "loads on 6.1, 6.12 and 6.18 (docs/kernels.md)"


@dataclass(frozen=True, slots=True)
class Host:
    """release: as `uname -r` prints it; is_filtered: a seccomp profile limits this process."""

    release: str
    has_btf: bool
    is_filtered: bool

    @classmethod
    def here(cls) -> Self:
        return cls(os.uname().release, os.path.exists(_BTF), procfs.is_filtered())


def refusal(path: str, error: OSError, log: str, host: Host) -> KernelFeatureError:
    """Return what to raise where libbpf could not load a file. log: the verifier's, empty where it was not asked."""
    said = [line for line in log.splitlines() if line and not line.startswith(("processed ", "verification time"))]
    words = f": {said[-1]}" if said else ""
    reason = f"{os.path.basename(path)} is refused ({error.strerror}{words})"
    return KernelFeatureError("bpf", reason, _remedy(error, bool(said), host))


def _remedy(error: OSError, is_verifiers: bool, host: Host) -> str:
    if error.errno == errno.EPERM:
        advice = "run as root or with CAP_BPF and CAP_PERFMON"
        return f"{advice}, and with a seccomp profile that lets these call bpf()" if host.is_filtered else advice
    if error.errno == errno.ENOSYS:
        return "boot a kernel built with CONFIG_BPF_SYSCALL=y"
    if not host.has_btf:
        return f"boot a kernel built with CONFIG_DEBUG_INFO_BTF=y: {_BTF} is missing"
    if error.errno == errno.ENOMEM:
        return "free memory: the kernel had none left for the program's tables"
    who = f"the verifier of Linux {host.release}" if is_verifiers else f"Linux {host.release}"
    return f"boot another kernel: {who} does not take the program, which {_TESTED}"
