"""Nops that the kernel rewrites when an uprobe there is hit for the first time; on x86-64 alone.

    Linux                        syscall 336   what is rewritten
    before 6.18                  ENOSYS        nothing
    6.18 to 7.2                  ENXIO         nops of 5 bytes, to: call TRAMPOLINE
    since commit 554ba38456da    EPROTO        nops of 10 bytes, to: lea -0x80(%rsp),%rsp; call TRAMPOLINE

The trampoline makes syscall 336, which runs the handlers and fails elsewhere (arch/x86/kernel/uprobes.c). The call
overwrites what a leaf function keeps below its stack, a forked child lacks the trampoline, a program whose rsp is no
stack pointer dies, and syscall user dispatch catches the syscall. The longer form cures the first two of these, so nops
of 10 bytes are not known to be safe either. A probe at any other nop stays a breakpoint, which touches nothing.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.kernel import nop_trial, procfs
from stapsdtd.kernel.features import Feature

_NAME = "safe nops"
_LENGTHS = frozenset({5, 10})
_BY_ERRNO: Mapping[int | None, frozenset[int]] = {
    errno.ENXIO: frozenset({5}),
    errno.EPROTO: frozenset({10}),
    errno.ENOSYS: frozenset(),
}
_REMEDY = (
    "run as root or with CAP_PERFMON; allow perf_event_open in the seccomp profile and executable memfds "
    "(sysctl vm.memfd_noexec)"
)


@dataclass(frozen=True, slots=True)
class NopRewriting:
    """rewritten: lengths of nops, in bytes, that the kernel turns into calls. unknown: those that it may."""

    rewritten: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()

    def why_not(self, nop_bytes: int) -> str | None:
        """Return why a site whose nop has this length is not to be armed; None where that is safe."""
        if nop_bytes not in self.rewritten | self.unknown:
            return None
        turns = "turns" if nop_bytes in self.rewritten else "may turn"
        return (
            f"this kernel {turns} its {nop_bytes}-byte nop into a call at the first hit, "
            "which corrupts or kills programs; compile it with a 1-byte nop, as systemtap's sys/sdt.h has it"
        )


def probe_nops() -> NopRewriting:
    """Ask what this kernel does, and try it where it does not say that it rewrites any.

    The trial takes some 200 ms, which are spent waiting, and 2 s at the most.
    """
    if platform.machine() != "x86_64":
        return NopRewriting()
    tried: Mapping[int, bool] = {}
    answer = nop_trial.ask()
    if not _BY_ERRNO.get(answer):
        tried, answer = nop_trial.run()
    return judge(tried, answer, is_filtered=procfs.is_filtered())


def judge(tried: Mapping[int, bool], answer: int | None, *, is_filtered: bool) -> NopRewriting:
    """Bring together what a trial showed for each length and the syscall's errno: whatever either accuses is refused.

    is_filtered: a seccomp filter may have answered instead, which refuses what it does not know with ENOSYS.
    """
    told = _BY_ERRNO.get(answer)
    if is_filtered and not told:
        told = None
    rewritten = (told or frozenset()) | {length for length, was_rewritten in tried.items() if was_rewritten}
    unknown = frozenset() if told is not None else _LENGTHS - tried.keys()
    return NopRewriting(rewritten, unknown)


def nop_feature(found: NopRewriting) -> Feature:
    """Tell of what probe_nops() found."""
    if found.unknown:
        lengths = _lengths(found.rewritten | found.unknown)
        detail = f"this kernel may corrupt programs at probes whose nop is {lengths} bytes long: these are refused"
        return Feature(_NAME, False, False, detail, _REMEDY)
    if found.rewritten:
        lengths = _lengths(found.rewritten)
        detail = f"this kernel corrupts programs at probes whose nop is {lengths} bytes long: these are refused"
        return Feature(_NAME, True, False, detail, "")
    return Feature(_NAME, True, False, "this kernel leaves nops as they are", "")


def _lengths(lengths: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(lengths)))
