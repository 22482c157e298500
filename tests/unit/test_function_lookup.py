"""Looking kernel functions up, in a kernel that a test makes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stapsdtd.errors import InvalidArgumentError, KernelFeatureError, LimitReachedError
from stapsdtd.functions import lookup
from stapsdtd.functions.attaching import Way
from stapsdtd.functions.kernel import ways_of
from stapsdtd.functions.model import Found, FoundNames, Unfound
from stapsdtd.functions.selectors import parse
from stapsdtd.functions.symbols import Wanted
from stapsdtd.kernel.btf import Btf
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.function_tables import Symbol
from tests.unit.kernel_types import BOTH_WAYS, NO_WAYS, FakeKernel, btf_path, kernel_functions
from tests.unit.test_kernel_btf import module_btf


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    fake = FakeKernel()
    yield fake
    assert_closed(fake.opened)


def assert_closed(opened: Sequence[Btf]) -> None:
    for each in opened:
        with pytest.raises(ValueError, match="closed"):
            _ = each.handle


def found(kernel: FakeKernel, *texts: str, ways: tuple[Way, ...] = BOTH_WAYS) -> Found:
    with kernel_functions(kernel, ways) as functions:
        return functions.functions("uid 0", [parse(text) for text in texts]).result(20)


def names(kernel: FakeKernel, *texts: str) -> FoundNames:
    with kernel_functions(kernel) as functions:
        return functions.names("uid 0", [parse(text) for text in texts]).result(20)


def test_function(kernel: FakeKernel) -> None:
    (function,) = found(kernel, "with_pair").functions
    assert (function.name, function.module) == ("with_pair", "vmlinux")
    assert function.prototype == "int with_pair(int a, struct pair pair, int b)"
    first, pair, _ = function.arguments
    assert (first.name, first.declared, first.size, first.passed.registers) == ("a", "int", 4, ("rdi",))
    assert (pair.declared, pair.size, pair.passed.registers) == ("struct pair", 16, ("rsi", "rdx"))
    assert (function.result.name, function.result.declared, function.result.size) == ("return", "int", 4)
    assert function.attachability.ways == ("fentry", "kprobe")


def test_globs_are_in_order(kernel: FakeKernel) -> None:
    functions = found(kernel, "with_[a-o]*", "returns_*").functions
    assert [function.name for function in functions] == [
        "returns_float", "returns_large", "returns_nothing", "returns_pair",
        "with_empty", "with_float", "with_large", "with_many", "with_mixed", "with_odd",
    ]  # fmt: skip


def test_ways_follow_the_prototype(kernel: FakeKernel) -> None:
    by_name = {function.name: function.attachability for function in found(kernel, "*").functions}
    assert by_name["variadic"].refused == ("fentry: it takes a variable number of arguments",)
    assert by_name["returns_pair"].refused == ("fentry: it returns a struct or union",)
    assert by_name["with_many"].refused == ("fentry: pair, g, h, i not in registers",)
    assert {ways for each in by_name.values() if (ways := each.ways) and each.refused} == {("kprobe",)}


def test_values_are_resolved(kernel: FakeKernel) -> None:
    (function,) = found(kernel, "with_pair(pair.second, return)").functions
    assert [value.text for value in function.values] == ["pair.second", "return"]
    with pytest.raises(InvalidArgumentError, match="has no member third"):
        found(kernel, "with_pair(pair.third)")


def test_values_of_several_selectors_come_once(kernel: FakeKernel) -> None:
    texts = "with_pair(a, pair.first)", "vmlinux:with_pair(pair.first, b)"
    (function,) = found(kernel, *texts).functions
    assert [value.text for value in function.values] == ["a", "pair.first", "b"]


def test_selectors_that_name_a_symbol() -> None:
    selectors = [parse(text) for text in ("vfs_read", "ext4:vfs_read", "vfs_*", "vmlinux:*", "vfs_write")]
    wanted = Wanted(selectors)
    assert [each.text for each in wanted.naming(Symbol("vmlinux", "vfs_read"))] == ["vfs_read", "vfs_*", "vmlinux:*"]
    assert [each.text for each in wanted.naming(Symbol("ext4", "vfs_open"))] == ["vfs_*"]
    assert not wanted.has_symbol(Symbol("ext4", "do_open"))


def test_why_not_attachable(kernel: FakeKernel) -> None:
    kernel.symbols_ += [Symbol("vmlinux", "with_odd"), Symbol("vmlinux", "with_wide.isra.0")]
    kernel.symbols_.remove(Symbol("vmlinux", "with_wide"))
    kernel.traceable_ = [symbol for symbol in kernel.symbols_ if symbol.name != "with_pair"]
    kernel.blacklisted_ = frozenset({"with_empty"})
    refused = {function.name: function.attachability.refused for function in found(kernel, "with_*").functions}
    assert "2 functions have this name" in refused["with_odd"][0]
    assert "the compiler made with_wide.isra.0 of it" in refused["with_wide"][0]
    assert "notrace" in refused["with_pair"][0]
    assert "kprobe: the kernel's blacklist has it" in refused["with_empty"]


def test_unknown_whether_ftrace_can_patch_it(kernel: FakeKernel) -> None:
    kernel.traceable_ = None
    assert found(kernel, "with_pair").functions[0].attachability.ways == ("fentry", "kprobe")
    assert found(kernel, "with_pair", ways=NO_WAYS).functions[0].attachability.ways == ()


@pytest.mark.parametrize(
    ("text", "symbols", "unfound"),
    [
        (
            "with_pear",
            [],
            Unfound("with_pear", "there is no such function, or it is inlined wherever it is called", ("with_pair",)),
        ),
        ("zzz", [], Unfound("zzz", "there is no such function, or it is inlined wherever it is called")),
        ("memcpy_asm", ["memcpy_asm"], Unfound("memcpy_asm", "BTF of vmlinux has no type of it")),
        (
            "split",
            ["split.part.1", "split.isra.0"],
            Unfound("split", "the compiler made split.isra.0, split.part.1 of it, whose arguments BTF does not tell"),
        ),
        ("zz_*", [], Unfound("zz_*", "no function of the kernel's BTF matches")),
        ("nf_nat:with_pair", [], Unfound("nf_nat:with_pair", "it is a function of vmlinux")),
    ],
)  # fmt: skip
def test_what_there_is_not(kernel: FakeKernel, text: str, symbols: list[str], unfound: Unfound) -> None:
    kernel.symbols_ += [Symbol("vmlinux", name) for name in symbols]
    answer = found(kernel, text, "with_odd")
    assert (answer.unfound, [function.name for function in answer.functions]) == ((unfound,), ["with_odd"])


def test_suggestions_are_few(kernel: FakeKernel) -> None:
    """Each takes a look at all symbols, and there may be 256 names."""
    assert all(unfound.near for unfound in found(kernel, *(f"with_pai{letter}" for letter in "abcd")).unfound)
    assert not any(unfound.near for unfound in found(kernel, *(f"with_pai{letter}" for letter in "abcde")).unfound)


def test_several_globs(kernel: FakeKernel) -> None:
    functions = found(kernel, "[!s]*_p*r", "w*i*d*", "[v]ar*").functions
    assert [each.name for each in functions] == ["by_pointer", "returns_pair", "variadic", "with_mixed", "with_odd",
        "with_pair", "with_wide"]  # fmt: skip


def test_functions_of_modules(kernel: FakeKernel, tmp_path: Path) -> None:
    with Btf(str(btf_path())) as base:
        kernel.modules_ = {
            "nf_nat": module_btf(base, tmp_path / "nf_nat", "nf_get", "nf_put"),
            "ext4": module_btf(base, tmp_path / "ext4", "nf_get", "with_pair"),
        }
    kernel.symbols_ += [Symbol("nf_nat", "nf_get"), Symbol("nf_nat", "nf_put")]
    kernel.symbols_ += [Symbol("ext4", "nf_get"), Symbol("ext4", "with_pair")]
    kernel.traceable_ = [*kernel.symbols_]
    where = [(function.module, function.name) for function in found(kernel, "nf_*", "with_pair").functions]
    assert where == [
        ("vmlinux", "with_pair"), ("ext4", "with_pair"), ("ext4", "nf_get"), ("nf_nat", "nf_get"), ("nf_nat", "nf_put"),
    ]  # fmt: skip
    (function,) = found(kernel, "nf_nat:nf_get(outer->numbers[1])").functions
    assert (function.module, function.values[0].size, function.attachability.refused) == ("nf_nat", 4, ())
    assert function.prototype.startswith("int nf_get(struct outer *outer, ")


def test_module_whose_btf_does_not_fit_is_left_out(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"not BTF")
    kernel.modules_ = {"bad": tmp_path / "bad"}
    kernel.symbols_.append(Symbol("bad", "with_pair"))
    kernel.opened.clear()
    assert [function.module for function in found(kernel, "with_pair").functions] == ["vmlinux"]


def test_bounded(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named is never left out for what a glob matches."""
    monkeypatch.setattr(lookup, "MAX_FUNCTIONS", 3)
    answer = found(kernel, "by_*", "with_wide", "with_*")
    assert [function.name for function in answer.functions] == ["with_wide", "by_pointer", "with_empty"]
    assert answer.left_out == 6
    assert answer.unfound == ()
    assert names(kernel, "with_*") == FoundNames(("with_empty", "with_float", "with_large"), 5)


def test_names(kernel: FakeKernel) -> None:
    assert names(kernel, "returns_*", "zzz").names == (
        "returns_float", "returns_large", "returns_nothing", "returns_pair",
    )  # fmt: skip


def test_kernel_without_btf(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(module: str, base: Btf | None) -> Btf:  # noqa: ARG001 - as FakeKernel.open_btf
        raise KernelFeatureError("kernel BTF", "none", "boot another")

    monkeypatch.setattr(kernel, "open_btf", none)
    with pytest.raises(KernelFeatureError):
        found(kernel, "with_pair")


def test_nothing_is_kept(kernel: FakeKernel) -> None:
    found(kernel, "*")
    gc.collect()
    assert len(kernel.opened) == 1
    assert_closed(kernel.opened)


def test_one_client_cannot_fill_the_queue(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def symbols(*, only_modules: bool) -> Iterator[Symbol]:  # noqa: ARG001 - as FakeKernel.symbols
        begun.set()
        assert may_go_on.wait(20)
        return iter(kernel.symbols_)

    monkeypatch.setattr(kernel, "symbols", symbols)
    selectors = [parse("with_pair")]
    with kernel_functions(kernel) as functions:
        lookups = [functions.names("uid 1000", selectors)]
        assert begun.wait(20)
        lookups += [functions.names("uid 1000", selectors) for _ in range(8)]
        with pytest.raises(LimitReachedError, match="uid 1000 has 8 lookups of kernel functions waiting"):
            functions.names("uid 1000", selectors)
        lookups.append(functions.names("uid 1001", selectors))
        may_go_on.set()
        assert {each.result(20) for each in lookups} == {FoundNames(("with_pair",))}


def test_ways_of_features() -> None:
    features = (
        Feature("tracefs", True, True, "", ""),
        Feature("fentry", False, False, "refused", "be root"),
        Feature("kprobes", True, False, "perf attaches", ""),
    )
    assert ways_of(features) == (Way("fentry", "refused", "be root"), Way("kprobe"))
