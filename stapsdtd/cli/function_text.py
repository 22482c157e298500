"""Kernel functions and values of them as lines of text, and as JSON objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapsdtd.cli.render import abbreviate, plural
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stapsdtd.client import AttachWay, KernelArgument, KernelFunction, KernelValue, UnknownFunction

_SHOWN_ENUMERATORS = 6
_VMLINUX = "vmlinux"


def function_lines(function: KernelFunction) -> Iterator[str]:
    """Yield the prototype, and indented what there is to say of the function.

    ssize_t vfs_read(struct file *file, char *buf, size_t count, loff_t *pos)
      attaches by fentry, kprobe
      file->f_pos  loff_t  8 bytes at file + 64
    """
    yield escape(function.prototype)
    if function.module != _VMLINUX:
        yield f"  of module {escape(function.module)}"
    if function.ways:
        yield f"  attaches by {', '.join(function.ways)}"
    for reason in function.refused:
        yield f"  does not attach: {escape(reason)}"
    for position, argument in enumerate((*function.arguments, function.result)):
        if argument.refused:
            yield f"  {escape(argument.name or f'argument {position}')} cannot be traced: {escape(argument.refused)}"
    texts = max((len(value.text) for value in function.values), default=0)
    types = max((len(value.type) for value in function.values), default=0)
    for value in function.values:
        yield f"  {escape(value.text):<{texts}}  {escape(value.type):<{types}}  {_place(value, function)}".rstrip()
        if value.enumerators:
            names = [f"{name}={number}" for name, number in value.enumerators.items()]
            yield f"    {abbreviate(names, _SHOWN_ENUMERATORS)}"


def _place(value: KernelValue, function: KernelFunction) -> str:
    """Return how much is where: `8 bytes in rdi`, `4 bytes at *(skb + 16) + 236`, `3 bits at skb + 130, from bit 5`."""
    root = function.result if value.argument is None else function.arguments[value.argument]
    size = plural(value.bits, "bit") if value.bits else plural(value.size, "byte") if value.size else "no bytes"
    from_bit = f", from bit {value.bit_offset}" if value.bits else ""
    return f"{size} {_address(value.offsets, root)}{from_bit}"


def _address(offsets: Sequence[int], root: KernelArgument) -> str:
    first, *further = offsets
    base = _plus(root.name, first)
    if not further:
        held = root.registers or ("memory",)
        return f"in {', '.join(held)}" + (f", from byte {first}" if first else "")
    for position, offset in enumerate(further):
        base = _plus(f"*({base})" if position or first else base, offset)
    return f"at {base}"


def _plus(base: str, offset: int) -> str:
    return f"{base} + {offset}" if offset else base


def why_unknown(unknown: UnknownFunction) -> str:
    """Return, in one line, why there is no such function, and what may have been meant."""
    meant = f"; did you mean {', '.join(unknown.near)}?" if unknown.near else ""
    return f"{escape(unknown.function)}: {unknown.reason}{meant}"


def why_no_way(ways: Sequence[AttachWay]) -> str | None:
    """Return, in one line, why nothing can be attached to on the server's host; None if something can be."""
    if any(way.available for way in ways):
        return None
    reasons = "; ".join(f"{way.name}: {way.problem}" for way in ways)
    return f"no kernel function can be attached to on this host ({reasons}); run 'stapsdt doctor' for what mends it"


def function_record(function: KernelFunction) -> dict[str, object]:
    """Return a function's JSON object."""
    record: dict[str, object] = {
        "function": function.name,
        "module": function.module,
        "prototype": function.prototype,
        "args": [_argument_record(argument) for argument in function.arguments],
        "returns": _argument_record(function.result),
        "attaches_by": function.ways,
        "refused": function.refused,
    }
    return record | {"values": [_value_record(value) for value in function.values]} if function.values else record


def _argument_record(argument: KernelArgument) -> dict[str, object]:
    record: dict[str, object] = {
        "name": argument.name,
        "type": argument.type,
        "size": argument.size,
        "registers": argument.registers,
    }
    return record | {"refused": argument.refused} if argument.refused else record


def _value_record(value: KernelValue) -> dict[str, object]:
    record: dict[str, object] = {
        "text": value.text,
        "type": value.type,
        "size": value.size,
        "argument": value.argument,
        "offsets": value.offsets,
    }
    if value.bits:
        record |= {"bit_offset": value.bit_offset, "bits": value.bits}
    if value.enumerators:
        record["enumerators"] = dict(value.enumerators)
    return record | {"refused": value.refused} if value.refused else record
