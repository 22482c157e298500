"""Explain why this host rejects a BPF program, and suggest a remedy for that cause."""

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
    """release: as printed by `uname -r`; is_filtered: a seccomp profile restricts this process."""

    release: str
    has_btf: bool
    is_filtered: bool

    @classmethod
    def here(cls) -> Self:
        return cls(os.uname().release, os.path.exists(_BTF), procfs.is_filtered())


def refusal(path: str, error: OSError, log: str, host: Host) -> KernelFeatureError:
    """Return the error to raise if libbpf cannot load the file at path.

    log: the verifier's, empty if the verifier was not reached.
    """
    messages = [line for line in log.splitlines() if line and not line.startswith(("processed ", "verification time"))]
    details = f": {messages[-1]}" if messages else ""
    reason = f"{os.path.basename(path)} is rejected ({error.strerror}{details})"
    return KernelFeatureError("bpf", reason, _remedy(error, bool(messages), host))


def stale(path: str) -> KernelFeatureError:
    """Return the error to raise if a file was built of other sources than those that are to use it."""
    reason = f"{os.path.basename(path)} was built for another version of stapsdtd"
    return KernelFeatureError("bpf", reason, "build it anew: run ./dev setup in a checkout, or install stapsdtd anew")


def _remedy(error: OSError, by_verifier: bool, host: Host) -> str:
    if error.errno == errno.EPERM:
        advice = "run as root or with CAP_BPF and CAP_PERFMON"
        return f"{advice}, and with a seccomp profile that allows bpf()" if host.is_filtered else advice
    if error.errno == errno.ENOSYS:
        return "boot a kernel built with CONFIG_BPF_SYSCALL=y"
    if not host.has_btf:
        return f"boot a kernel built with CONFIG_DEBUG_INFO_BTF=y: {_BTF} is missing"
    if error.errno == errno.ENOMEM:
        return "free some memory: the kernel could not allocate the program's tables"
    rejecter = f"the verifier of Linux {host.release}" if by_verifier else f"Linux {host.release}"
    return f"boot another kernel: {rejecter} rejects the program, which {_TESTED}"
