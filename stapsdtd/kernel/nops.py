"""Find out which nops the kernel rewrites at the first hit of a uprobe there; on x86-64 only.

    Linux                        syscall 336   rewritten
    before 6.18                  ENOSYS        nothing
    6.18 to 7.2                  ENXIO         nops of 5 bytes, to: call TRAMPOLINE
    since commit 554ba38456da    EPROTO        nops of 10 bytes, to: lea -0x80(%rsp),%rsp; call TRAMPOLINE

The trampoline makes syscall 336, which runs the handlers and fails elsewhere (arch/x86/kernel/uprobes.c). The call
overwrites the red zone of a leaf function, a forked child lacks the trampoline, a program whose rsp is not a stack
pointer crashes, and syscall user dispatch intercepts the syscall. The longer form fixes only the first two, so 10-byte
nops are not known to be safe either. A probe at any other nop remains a breakpoint, which is harmless.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from stapsdtd.kernel import nop_trial, procfs, uprobe_links
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.nop_arming import arm_by_event, arm_by_link

_NAME = "safe nops"
_LENGTHS = frozenset({5, 10})
_BY_ERRNO: Mapping[int | None, frozenset[int]] = {
    errno.ENXIO: frozenset({5}),
    errno.EPROTO: frozenset({10}),
    errno.ENOSYS: frozenset(),
}
_REMEDY = (
    "run as root or with CAP_BPF and CAP_PERFMON; allow bpf or perf_event_open in the seccomp profile, and executable "
    "memfds (sysctl vm.memfd_noexec)"
)


@dataclass(frozen=True, slots=True)
class NopRewriting:
    """rewritten: lengths, in bytes, of the nops that the kernel turns into calls. unknown: those that it may."""

    rewritten: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()

    def why_not(self, nop_bytes: int) -> str | None:
        """Return why a site whose nop has this length must not be armed; None if that is safe."""
        if nop_bytes not in self.rewritten | self.unknown:
            return None
        turns = "turns" if nop_bytes in self.rewritten else "may turn"
        return (
            f"this kernel {turns} its {nop_bytes}-byte nop into a call at the first hit, "
            "which corrupts or crashes programs; compile it with a 1-byte nop, as systemtap's sys/sdt.h does"
        )


def probe_nops(group: str) -> NopRewriting:
    """Check the syscall, and run the trial unless its errno already shows that the kernel rewrites nops.

    group: of the events in tracefs by which the nops are armed where the kernel has no links to uprobes.

    The trial takes about 200 ms, mostly waiting, and at most 20 s where something hangs.
    """
    if platform.machine() != "x86_64":
        return NopRewriting()
    tried: Mapping[int, bool] = {}
    syscall_errno = nop_trial.syscall_errno()
    if not _BY_ERRNO.get(syscall_errno):
        arm = arm_by_link if uprobe_links.are_supported() else partial(arm_by_event, group)
        tried, syscall_errno = nop_trial.run(arm)
    return judge(tried, syscall_errno, is_filtered=procfs.is_filtered())


def judge(tried: Mapping[int, bool], syscall_errno: int | None, *, is_filtered: bool) -> NopRewriting:
    """Combine the trial's result for each length with the syscall's errno: a length that either implicates is unsafe.

    is_filtered: the errno may be a seccomp filter's, which fails unknown syscalls with ENOSYS.
    """
    by_errno = _BY_ERRNO.get(syscall_errno)
    if is_filtered and not by_errno:
        by_errno = None
    rewritten = (by_errno or frozenset()) | {length for length, was_rewritten in tried.items() if was_rewritten}
    unknown = frozenset() if by_errno is not None else _LENGTHS - tried.keys()
    return NopRewriting(rewritten, unknown)


def nop_feature(rewriting: NopRewriting) -> Feature:
    """Describe the result of probe_nops()."""
    if rewriting.unknown:
        lengths = _lengths(rewriting.rewritten | rewriting.unknown)
        detail = f"this kernel may corrupt programs at probes whose nop is {lengths} bytes long: these are refused"
        return Feature(_NAME, False, False, detail, _REMEDY)
    if rewriting.rewritten:
        lengths = _lengths(rewriting.rewritten)
        detail = f"this kernel corrupts programs at probes whose nop is {lengths} bytes long: these are refused"
        return Feature(_NAME, True, False, detail, "")
    return Feature(_NAME, True, False, "this kernel leaves nops as they are", "")


def _lengths(lengths: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(lengths)))
