"""Operands that name a symbol, once the object's symbol tables were looked at.

    52+CheckpointStats(%rip)  ──►  Memory("rip", address of CheckpointStats + 52 - address of the site)

At the hit the program counter is the site's own address in the process, so the distance holds wherever it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stapsdtd.arch.expressions import GOTOFF
from stapsdtd.model import Address, Argument, Memory, Operand, Unavailable, Vaddr

_PROGRAM_COUNTERS = {
    "x86-64": "rip", "i386": "eip", "aarch64": "pc", "arm": "r15", "riscv64": "pc", "s390x": "pswa", "ppc64le": "nip",
    "loongarch64": "csr_era",
}  # fmt: skip
"""As struct pt_regs of the architecture names it."""

Found = Mapping[str, Vaddr | Unavailable]
"""What is known of each symbol that is named."""


GLOBAL_OFFSET_TABLE = "_GLOBAL_OFFSET_TABLE_"


def symbols_of(arguments: Iterable[Argument]) -> set[str]:
    operands = (argument.operand for argument in arguments)
    named = {operand.symbol for operand in operands if isinstance(operand, Memory | Address) and operand.symbol}
    table = {GLOBAL_OFFSET_TABLE} if any(symbol.endswith(GOTOFF) for symbol in named) else set()
    return {symbol.removesuffix(GOTOFF) for symbol in named} | table


def with_addresses(
    arguments: tuple[Argument, ...], found: Found, site: Vaddr, architecture: str, *, is_fixed: bool
) -> tuple[Argument, ...]:
    """is_fixed: the object is loaded where its own addresses say, as programs that are not PIE are."""
    counter = _PROGRAM_COUNTERS.get(architecture)
    return tuple(
        replace(argument, operand=_located(argument.operand, found, site, counter, is_fixed=is_fixed))
        for argument in arguments
    )


def _located(operand: Operand, found: Found, site: Vaddr, counter: str | None, *, is_fixed: bool) -> Operand:
    if not isinstance(operand, Memory | Address) or operand.symbol is None:
        return operand
    address = found[operand.symbol.removesuffix(GOTOFF)]
    if isinstance(address, Unavailable):
        return address
    if isinstance(operand, Memory) and operand.symbol.endswith(GOTOFF):
        table = found[GLOBAL_OFFSET_TABLE]
        if isinstance(table, Unavailable):
            return table
        return replace(operand, displacement=_signed(address + operand.displacement - table))
    if counter is None:
        return Unavailable("a symbol's distance from the site cannot be told on this architecture")
    distance = _signed(address + operand.displacement - site)
    match operand:
        case Address():
            return replace(operand, base=counter, displacement=distance)
        case Memory(base=None):
            return replace(operand, base=counter, displacement=distance)
        case Memory(base=base, index=None):
            return replace(operand, base=counter, displacement=distance, index=base, scale=1)
        case _ if is_fixed:
            return replace(operand, displacement=_signed(address + operand.displacement))
        case _:
            return Unavailable("a symbol, a base and an index are more than can be added")


def _signed(distance: int) -> int:
    """As addresses wrap: a hostile symbol table may have any."""
    return (distance + (1 << 63)) % (1 << 64) - (1 << 63)
