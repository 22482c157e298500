from __future__ import annotations

import errno
import os

import pytest

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.bpf_refusal import Host, refusal
from tests.unit.test_bpf_layout import OBJECT

HOST = Host("6.1.0-56-amd64", has_btf=True, is_filtered=False)
WITHOUT_BTF = Host("5.10.0", has_btf=False, is_filtered=False)
FILTERED = Host("6.12.1", has_btf=True, is_filtered=True)
REJECTS_IT = "rejects the program, which loads on 6.1, 6.12 and 6.18 (docs/kernels.md)"
# what the verifier of Linux 6.1 wrote about a loop whose head is fallen into
VERIFIER_LOG = """\
back-edge from insn 1030 to 1031
processed 0 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0
"""


@pytest.mark.parametrize(
    ("number", "log", "host", "remedy"),
    [
        (errno.EPERM, "", HOST, "run as root or with CAP_BPF and CAP_PERFMON"),
        (
            errno.EPERM,
            "",
            FILTERED,
            "run as root or with CAP_BPF and CAP_PERFMON, and with a seccomp profile that allows bpf()",
        ),
        (errno.ENOSYS, "", HOST, "boot a kernel built with CONFIG_BPF_SYSCALL=y"),
        (
            errno.ESRCH,
            "",
            WITHOUT_BTF,
            "boot a kernel built with CONFIG_DEBUG_INFO_BTF=y: /sys/kernel/btf/vmlinux is missing",
        ),
        (errno.ENOMEM, "", HOST, "free some memory: the kernel could not allocate the program's tables"),
        (
            errno.EINVAL,
            VERIFIER_LOG,
            HOST,
            f"boot another kernel: the verifier of Linux 6.1.0-56-amd64 {REJECTS_IT}",
        ),
        (
            errno.EINVAL,
            "",
            HOST,
            f"boot another kernel: Linux 6.1.0-56-amd64 {REJECTS_IT}",
        ),
    ],
)
def test_remedy_fits_the_cause(number: int, log: str, host: Host, remedy: str) -> None:
    error = refusal("/somewhere/stapsdt.bpf.o", OSError(number, os.strerror(number)), log, host)
    assert error.remedy == remedy


@pytest.mark.parametrize("expected", [{".rodata.fingerprint": bytes(8)}, {".rodata.none": b""}])
def test_object_of_another_build_is_refused_before_it_is_loaded(expected: dict[str, bytes]) -> None:
    with pytest.raises(KernelFeatureError) as refused:
        BpfObject(str(OBJECT), {}, {}, expected)
    assert refused.value.reason == "stapsdt.bpf.o was built for another version of stapsdtd"
    assert "./dev setup" in refused.value.remedy


def test_reason_ends_with_the_verifiers_last_words() -> None:
    error = refusal("/somewhere/stapsdt.bpf.o", OSError(errno.EINVAL, "Invalid argument"), VERIFIER_LOG, HOST)
    assert error.reason == "stapsdt.bpf.o is rejected (Invalid argument: back-edge from insn 1030 to 1031)"


def test_this_host_is_described() -> None:
    here = Host.here()
    assert here.release == os.uname().release
    assert here.has_btf == os.path.exists("/sys/kernel/btf/vmlinux")
