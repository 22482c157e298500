"""Why a kernel function cannot be attached to, or not by each of the ways that there are.

fentry  a call that ftrace patches into the function's beginning, and its end; BTF types the arguments
kprobe  a breakpoint, or that same call; arguments are in the registers

A third one, kprobe.multi, is for many functions at once, in place of a kprobe each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FENTRY, KPROBE, MULTI = "fentry", "kprobe", "kprobe.multi"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A way to attach. problem: why this host offers none of its kind; empty if it does."""

    name: str
    problem: str = ""
    remedy: str = ""

    @property
    def is_available(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Symbols:
    """What the kernel's tables have of a function.

    copies: how many symbols have its name. is_traceable: whether ftrace can patch it; None if that cannot be known.
    is_blacklisted: whether kprobes refuse it. variants: what the compiler made of it, such as `vfs_read.isra.0`.
    """

    copies: int
    is_traceable: bool | None
    is_blacklisted: bool = False
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """What matters of a prototype. untraceable: names of the arguments that no register holds."""

    is_variadic: bool = False
    returns_record: bool = False
    untraceable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attachability:
    """ways: names of those that this host has and that fit. refused: what the function itself has against them."""

    ways: tuple[str, ...]
    refused: tuple[str, ...]


def attachability(symbols: Symbols, shape: Shape, ways: Sequence[Way]) -> Attachability:
    """ways: of this host."""
    if against_all := _against_all(symbols):
        return Attachability((), (against_all,))
    against = {FENTRY: _against_fentry(shape), KPROBE: _against_kprobes(symbols)}
    usable = tuple(way.name for way in ways if way.is_available and not against[way.name])
    return Attachability(usable, tuple(f"{name}: {reason}" for name, reason in against.items() if reason))


def _against_all(symbols: Symbols) -> str:
    if symbols.copies == 0 and symbols.variants:
        return f"the compiler made {', '.join(sorted(symbols.variants)[:_SHOWN])} of it, which may have other arguments"
    if symbols.copies == 0:
        return "the running kernel has no code of it, which was freed after the start or left out by the linker"
    if symbols.copies > 1:
        return f"{symbols.copies} functions have this name, and which one is meant cannot be said"
    if symbols.is_traceable is False:
        return "ftrace cannot patch it: it is marked notrace, or its code was freed after the start"
    return ""


def _against_fentry(shape: Shape) -> str:
    """As btf_distill_func_proto (kernel/bpf/btf.c) and the trampolines of each machine have it."""
    if shape.is_variadic:
        return "it takes a variable number of arguments"
    if shape.returns_record:
        return "it returns a struct or union"
    if shape.untraceable:
        return f"{', '.join(shape.untraceable)} not in registers"
    return ""


def _against_kprobes(symbols: Symbols) -> str:
    return "the kernel's blacklist has it" if symbols.is_blacklisted else ""
