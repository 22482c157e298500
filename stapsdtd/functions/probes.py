"""Kernel functions as objects with sites, which are armed as those of files are.

    vfs_read(file->f_pos, return)   fbt:vmlinux:vfs_read:entry    arg0 … arg3 its arguments, arg4 file->f_pos
                                    fbt:vmlinux:vfs_read:return   arg0 its result, arg1 return

The provider is named as DTrace's. Values come behind what the prototype has, in the order in which they were asked for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from stapsdtd.functions.attaching import FENTRY, KPROBE, Way
from stapsdtd.functions.model import FunctionArgument, KernelFunction
from stapsdtd.functions.selectors import VMLINUX
from stapsdtd.functions.values import MAX_VALUE_BYTES, ResolvedValue
from stapsdtd.kernel.places import FunctionPlace
from stapsdtd.model import (
    Argument,
    FileOffset,
    Memory,
    Object,
    ObjectKey,
    Operand,
    ParsedObject,
    Register,
    Site,
    Unavailable,
)

PROVIDER = "fbt"
ENTRY, RETURN = "entry", "return"

_NUMBER_BYTES = (1, 2, 4, 8)

_OF_PROGRAMS = re.compile(r"_raw_\w+|(__)?(bpf|htab)_\w+|\w*ringbuf_\w+")
"""What BPF programs call. One that runs at a uprobe holds a ring's lock while it is in some of these, and a hit of a
kprobe there would wait for the same lock (kernel/bpf/ringbuf.c). Two kprobes are kept apart by the kernel, not these.
"""

_WORD_BYTES = 8


class KernelArgument(Argument, frozen=True, gc=False):
    """A value at a kernel function, whose memory is the kernel's. No file can declare one: `sandbox.codec` knows none.

    then: where the operand is memory, that has a pointer; offsets in bytes from it, and so on, to the value itself.
    first_bit, bits: of a bit field, from the lowest bit of its bytes; bits is 0 if it is none. characters: not None for
    arrays, structs and unions.
    """

    then: tuple[int, ...] = ()
    first_bit: int = 0
    bits: int = 0
    characters: int | None = None


def is_in_kernel(argument: Argument, *, is_text: bool = False) -> bool:
    """Report whether the kernel's memory has to be read for an argument or, if it is a text, for that."""
    return isinstance(argument, KernelArgument) and (is_text or isinstance(argument.operand, Memory))


def objects_of(functions: Iterable[KernelFunction], ways: Sequence[Way], architecture: str) -> tuple[Object, ...]:
    """Return an object for each module. ways: of the host, which `functions` were looked up on."""
    by_module: defaultdict[str, list[KernelFunction]] = defaultdict(list)
    for function in functions:
        by_module[function.module].append(function)
    return tuple(_object(module, of_module, ways, architecture) for module, of_module in by_module.items())


def place_of(module: str, site: Site) -> FunctionPlace:
    """Return where a site of an object is. module: the object's path."""
    return FunctionPlace("" if module == VMLINUX else module, site.function or "", site.name == RETURN)


def _object(module: str, functions: Iterable[KernelFunction], ways: Sequence[Way], architecture: str) -> Object:
    refused = {}
    sites: list[Site] = []
    for function in functions:
        reason = _why_refused(function, ways)
        for site in (_entry(function), _return(function)):
            sites.append(site)
            if reason:
                refused[site] = reason
    # no file has device 0
    key = ObjectKey(0, int.from_bytes(module.encode()), 0, 0)
    return Object(key, module, ParsedObject(architecture, None, tuple(sites), ()), is_kernel=True, refused=refused)


def _why_refused(function: KernelFunction, ways: Sequence[Way]) -> str:
    """Return why the function must not or cannot be attached to; empty if it can."""
    if _OF_PROGRAMS.fullmatch(function.name):
        return "the programs at other probes call it, which could lock up the processor"
    # libbpf finds a function to load a program for in vmlinux first
    fitting = (KPROBE,) if function.module != VMLINUX else (FENTRY, KPROBE)
    if set(fitting) & set(function.attachability.ways):
        return ""
    of_host = [f"{way.name}: {way.problem}" for way in ways if way.name in fitting and way.problem]
    return "; ".join([*function.attachability.refused, *of_host]) or f"this host offers no {' or '.join(fitting)}"


def _entry(function: KernelFunction) -> Site:
    arguments = [_argument(each) for each in function.arguments]
    values = [_value(each, function) for each in function.values if each.location.argument is not None]
    return _site(function, ENTRY, [*arguments, *values])


def _return(function: KernelFunction) -> Site:
    # a function that returns nothing has no result
    result = [_argument(function.result)] if function.result.size else []
    values = [_value(each, function) for each in function.values if each.location.argument is None]
    return _site(function, RETURN, [*result, *values])


def _site(function: KernelFunction, name: str, arguments: Sequence[KernelArgument]) -> Site:
    return Site(PROVIDER, name, FileOffset(0), None, function.name, tuple(arguments), nop_bytes=1)


def _argument(argument: FunctionArgument) -> KernelArgument:
    operand: Operand = Unavailable(argument.passed.refused or f"it has {argument.size} bytes in several registers")
    if len(argument.passed.registers) == 1:
        operand = Register(argument.passed.registers[0])
    size = argument.size if argument.size in _NUMBER_BYTES else _WORD_BYTES
    return KernelArgument(argument.name or "unnamed", size, argument.is_signed, False, operand)


def _value(value: ResolvedValue, function: KernelFunction) -> KernelArgument:
    at = value.location
    root = function.result if at.argument is None else function.arguments[at.argument]
    first, *further = at.offsets
    size = next((size for size in _NUMBER_BYTES if size >= value.size), value.size) if at.bits else value.size
    if reason := root.passed.refused or _why_not_fetched(value, size):
        return KernelArgument(value.text, _WORD_BYTES, False, False, Unavailable(reason))
    register, byte = root.passed.registers[first // _WORD_BYTES], first % _WORD_BYTES
    if further and byte:
        reason = "the pointer that leads to it is not at the beginning of a register"
        return KernelArgument(value.text, _WORD_BYTES, False, False, Unavailable(reason))
    operand: Operand = Memory(register, further[0]) if further else Register(register)
    if not further:
        size = next(each for each in _NUMBER_BYTES if each >= size)
    first_bit = at.bit_offset if further else 8 * byte + at.bit_offset
    bits = at.bits or (8 * size if first_bit else 0)
    size = min(size, MAX_VALUE_BYTES)
    # what is in a register has no address to read text from
    characters = (size if value.is_text and further else 0) if value.is_composite else None
    return KernelArgument(
        value.text, size, value.is_signed, False, operand, tuple(further[1:]), first_bit, bits, characters
    )


def _why_not_fetched(value: ResolvedValue, size: int) -> str:
    at = value.location
    if size == 0:
        return f"{value.declared} has no size"
    if at.bits and at.bit_offset + at.bits > 8 * _WORD_BYTES:
        return f"its bits are in {value.size} bytes, more than a word"
    if len(at.offsets) == 1 and size > _WORD_BYTES:
        return "it is passed by value in several registers; name a member of it"
    return ""
