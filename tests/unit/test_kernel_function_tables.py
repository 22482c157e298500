"""The kernel's tables of its functions, as they look."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.function_hooks import FENTRY, KPROBES, MULTI, HookTrials, lockdown, told
from stapsdtd.kernel.function_tables import Symbol, blacklisted, code_symbols, functions
from stapsdtd.kernel.tracefs import Tracefs

KALLSYMS = """\
0000000000000000 A fixed_percpu_data
ffffffff81001000 T vfs_read
ffffffff81002000 t vfs_read.cold
ffffffff81003000 W arch_thing
ffffffff82000000 d some_data
ffffffffc0402010 t nf_ct_get\t[nf_conntrack]
ffffffffc0403000 t bpf_prog_6deef7357e7b4530\t[bpf]
ffffffffc0404000 t ftrace_trampoline\t[__builtin__ftrace]
"""


def test_symbols_of_code(tmp_path: Path) -> None:
    path = tmp_path / "kallsyms"
    path.write_text(KALLSYMS)
    assert list(code_symbols(str(path))) == [
        Symbol("vmlinux", "vfs_read"),
        Symbol("vmlinux", "vfs_read.cold"),
        Symbol("vmlinux", "arch_thing"),
        Symbol("nf_conntrack", "nf_ct_get"),
    ]
    assert list(code_symbols(str(path), only_modules=True)) == [Symbol("nf_conntrack", "nf_ct_get")]


FILTER_FUNCTIONS = """\
vfs_read
nf_ct_get [nf_conntrack]
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_what_ftrace_can_patch_stands_in_for_hidden_symbols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """A unit's ProtectKernelTunables= makes kallsyms an empty file, or one that cannot be opened."""
    path = tmp_path / "kallsyms"
    if is_there:
        path.touch()
    (tmp_path / "available_filter_functions").write_text(FILTER_FUNCTIONS)
    monkeypatch.setattr(Tracefs, "locate", lambda: Tracefs(str(tmp_path)))
    assert list(functions(str(path))) == [Symbol("vmlinux", "vfs_read"), Symbol("nf_conntrack", "nf_ct_get")]
    assert list(functions(str(path), only_modules=True)) == [Symbol("nf_conntrack", "nf_ct_get")]
    path.write_text(KALLSYMS)
    assert list(functions(str(path))) == list(code_symbols(str(path)))
    assert list(functions(str(path), only_modules=True)) == [Symbol("nf_conntrack", "nf_ct_get")]


def feature(name: str, *, available: bool) -> Feature:
    return Feature(name, available, False, "the reason", "" if available else "a remedy")


@pytest.mark.parametrize(
    ("has_fentry", "has_multi", "is_missing"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_kprobes_are_not_missing_where_the_others_take_their_place(
    has_fentry: bool, has_multi: bool, is_missing: bool
) -> None:
    found = [
        feature(FENTRY, available=has_fentry),
        feature(MULTI, available=has_multi),
        feature(KPROBES, available=False),
    ]
    *others, kprobes = told(found)
    assert others == found[:2]
    assert (kprobes.available, bool(kprobes.remedy)) == (not is_missing, is_missing)
    assert "the reason" in kprobes.detail


def test_blacklist(tmp_path: Path) -> None:
    path = tmp_path / "blacklist"
    path.write_text("0xffffffff81001000-0xffffffff8100101e\tdo_int3\n0xffffffff81002000-0xffffffff81002010\tfixup\n")
    assert blacklisted(str(path)) == {"do_int3", "fixup"}
    assert blacklisted(str(tmp_path / "none")) == frozenset()


def test_lockdown(tmp_path: Path) -> None:
    path = tmp_path / "lockdown"
    assert "none that" in lockdown(str(path))
    path.write_text("none [integrity] confidentiality\n")
    assert lockdown(str(path)) == "integrity, which does not restrict tracing"
    path.write_text("none integrity [confidentiality]\n")
    with pytest.raises(KernelFeatureError, match="cannot read kernel memory"):
        lockdown(str(path))


def test_nobody_waits_for_a_trial_that_the_kernel_holds_up() -> None:
    let_go = threading.Event()

    def hang() -> str:
        assert let_go.wait(20)
        return "late"

    def refuse() -> str:
        raise KernelFeatureError("kprobes", "refused", "be root")

    trials = HookTrials({"a": lambda: "found", "b": hang, "c": refuse})
    _, late, behind = trials.features(0.2)
    assert (late.available, late.detail) == (False, "the kernel has not let go of a trial yet")
    assert behind.detail == late.detail
    let_go.set()
    fine, late, refused = trials.features(20)
    assert (fine.available, fine.detail) == (True, "found")
    assert (late.available, late.required) == (True, False)
    assert (refused.available, refused.detail, refused.remedy) == (False, "refused", "be root")
