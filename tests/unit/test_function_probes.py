"""Kernel functions as objects: where their arguments and values are."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.operands import NotEncodableError, encode_value
from stapsdtd.functions.attaching import FENTRY, KPROBE, Attachability, Way
from stapsdtd.functions.model import FunctionArgument, KernelFunction
from stapsdtd.functions.passing import Passed
from stapsdtd.functions.probes import KernelArgument, is_in_kernel, objects_of, place_of
from stapsdtd.functions.selectors import parse
from stapsdtd.model import Capture, Memory, Object, Register, Unavailable
from stapsdtd.plan.values import Value, value_of
from tests.unit.kernel_types import BOTH_WAYS, FakeKernel, kernel_functions


def looked_up(*texts: str) -> tuple[KernelFunction, ...]:
    with kernel_functions(FakeKernel()) as functions:
        return functions.functions("uid 0", [parse(text) for text in texts]).result(20).functions


def objects(*texts: str, ways: tuple[Way, ...] = BOTH_WAYS) -> tuple[Object, ...]:
    return objects_of(looked_up(*texts), ways, "x86-64")


def value(path: str) -> KernelArgument:
    """The value at the entry of by_pointer(struct outer *outer, …)."""
    ((entry, _),) = (each.parsed.sites for each in objects(f"by_pointer({path})"))
    found = entry.arguments[-1]
    assert isinstance(found, KernelArgument)
    assert found.text == path
    return found


def test_entry_and_return() -> None:
    (kernel,) = objects("with_pair", "returns_nothing")
    assert (kernel.path, kernel.is_kernel, kernel.refused) == ("vmlinux", True, {})
    sites = {(site.function, site.name): site for site in kernel.parsed.sites}
    assert {site.provider for site in sites.values()} == {"fbt"}
    first, pair, last = sites["with_pair", "entry"].arguments
    assert (first.operand, first.size, first.signed) == (Register("rdi"), 4, True)
    assert pair.operand == Unavailable("it has 16 bytes in several registers")
    assert last.operand == Register("rcx")
    (result,) = sites["with_pair", "return"].arguments
    assert (result.text, result.operand, result.signed) == ("return", Register("rax"), True)
    assert sites["returns_nothing", "return"].arguments == ()
    assert str(place_of("vmlinux", sites["with_pair", "return"])) == "with_pair"
    assert place_of("ext4", sites["with_pair", "entry"]).definition("g/e") == "p:g/e ext4:with_pair"


def test_values_behind_pointers() -> None:
    assert value("outer").operand == Register("rdi")
    direct, behind = value("outer->anything"), value("outer->next->next->anything")
    assert isinstance(direct.operand, Memory)
    assert (direct.operand.base, direct.then) == ("rdi", ())
    assert isinstance(behind.operand, Memory)
    assert len(behind.then) == 2
    assert behind.then[-1] == direct.operand.displacement
    assert is_in_kernel(direct)
    assert not is_in_kernel(value("outer"))
    assert is_in_kernel(value("outer"), is_text=True)


def test_bit_fields_and_structs() -> None:
    field, record = value("outer->flags.high"), value("outer->either")
    assert (field.bits, field.signed) == (7, True)
    assert record.bits == 0
    assert record.size == 16


def test_operands_of_the_program() -> None:
    row = np.frombuffer(encode_value(Value(0), value("outer->next->next->anything"), "x86-64"), layout.OPERAND)[0]
    assert (row["is_kernel"], row["then_count"]) == (1, 2)
    bits = np.frombuffer(encode_value(Value(0), value("outer->flags.high"), "x86-64"), layout.OPERAND)[0]
    assert (bits["right"], bits["is_signed"]) == (64 - 7, 1)
    long = replace(value("outer->anything"), then=(0,) * (layout.MAX_THEN + 1))
    with pytest.raises(NotEncodableError, match="6 pointers lead to it, and the bpf engine follows at most 5"):
        encode_value(Value(0), long, "x86-64")
    far = replace(value("outer->anything"), then=(1 << 31,))
    with pytest.raises(NotEncodableError, match="it is too far behind a pointer"):
        encode_value(Value(0), far, "x86-64")


def test_text_is_where_an_array_of_char_is() -> None:
    wanted = value_of(Capture(0, True, max_bytes=255), value("outer->next->label"), "x86-64")
    assert wanted == Value(0, True, 8, shown=8)
    row = np.frombuffer(encode_value(wanted, value("outer->next->label"), "x86-64"), layout.OPERAND)[0]
    number = np.frombuffer(encode_value(Value(0), value("outer->next->label"), "x86-64"), layout.OPERAND)[0]
    assert (row["kind"], row["take"], row["limit"]) == (layout.OperandKind.ADDRESS, layout.Take.STRING, 8 + 1)
    assert (number["kind"], number["take"]) == (layout.OperandKind.MEMORY, layout.Take.NUMBER)
    assert row["then_count"] == number["then_count"] == 1


@pytest.mark.parametrize("path", ["outer->pairs", "outer->numbers", "outer->either.pair", "outer->flags"])
def test_what_is_no_text(path: str) -> None:
    """Not even if it is as wide as a pointer."""
    refused = value_of(Capture(0, True), value(path), "x86-64")
    assert refused == Unavailable(f"{path} is neither a pointer nor an array of bytes")


def function(name: str, *ways: str, refused: tuple[str, ...] = (), module: str = "vmlinux") -> KernelFunction:
    result = FunctionArgument("return", "int", 4, Passed(("rax",)))
    return KernelFunction(name, module, "", (), result, Attachability(ways, refused))


@pytest.mark.parametrize(
    ("function", "ways", "reason"),
    [
        (function("vfs_read", KPROBE), BOTH_WAYS, None),
        (function("f", FENTRY, refused=("kprobe: the kernel's blacklist has it",)), BOTH_WAYS, None),
        (function("f", FENTRY), (Way(FENTRY), Way(KPROBE, "the kernel has none")), None),
        (
            function("f", FENTRY, refused=("kprobe: the kernel's blacklist has it",), module="ext4"),
            BOTH_WAYS,
            "blacklist has it",
        ),
        (
            function("f", FENTRY, module="ext4"),
            (Way(FENTRY), Way(KPROBE, "the kernel has none")),
            "kprobe: the kernel has none",
        ),
        (
            function("f"),
            (Way(FENTRY, "refused"), Way(KPROBE, "the kernel has none")),
            "fentry: refused; kprobe: the kernel has none",
        ),
        (function("_raw_spin_lock_irqsave", KPROBE), BOTH_WAYS, "could lock up"),
        (function("__bpf_ringbuf_reserve", KPROBE), BOTH_WAYS, "could lock up"),
    ],
)
def test_what_is_refused(function: KernelFunction, ways: tuple[Way, ...], reason: str | None) -> None:
    (kernel,) = objects_of([function], ways, "x86-64")
    assert len(kernel.refused) == (0 if reason is None else 2)
    assert all(reason is not None and reason in each for each in kernel.refused.values())
