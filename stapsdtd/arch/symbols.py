"""Resolve operands that refer to symbols, given the symbols' addresses.

    52+CheckpointStats(%rip)  ──►  Memory("rip", address of CheckpointStats + 52 - address of the site)

At a hit the program counter is the site's address in the process, so the distance is valid wherever it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from stapsdtd.arch.expressions import GOTOFF
from stapsdtd.arch.registry import ARCHITECTURES
from stapsdtd.model import Address, Argument, Memory, Operand, Unavailable, Vaddr

SymbolAddresses = Mapping[str, Vaddr | Unavailable]
"""The address of each symbol, or why it is unknown."""

GLOBAL_OFFSET_TABLE = "_GLOBAL_OFFSET_TABLE_"


def symbols_of(arguments: Iterable[Argument]) -> set[str]:
    """Return the names of the symbols needed to resolve the arguments."""
    operands = (argument.operand for argument in arguments)
    named = {operand.symbol for operand in operands if isinstance(operand, Memory | Address) and operand.symbol}
    table = {GLOBAL_OFFSET_TABLE} if any(symbol.endswith(GOTOFF) for symbol in named) else set()
    return {symbol.removesuffix(GOTOFF) for symbol in named} | table


def with_addresses(
    arguments: tuple[Argument, ...], symbols: SymbolAddresses, site: Vaddr, architecture: str, *, is_fixed: bool
) -> tuple[Argument, ...]:
    """Resolve the symbols in a site's arguments. is_fixed: the object is loaded at its own addresses, unlike a PIE."""
    known = ARCHITECTURES.get(architecture)
    counter = known.program_counter if known else None
    return tuple(
        Argument(
            argument.text,
            argument.size,
            argument.signed,
            argument.is_float,
            _resolve(argument.operand, symbols, site, counter, is_fixed=is_fixed),
        )
        for argument in arguments
    )


def _resolve(
    operand: Operand, symbols: SymbolAddresses, site: Vaddr, counter: str | None, *, is_fixed: bool
) -> Operand:
    if not isinstance(operand, Memory | Address) or operand.symbol is None:
        return operand
    address = symbols[operand.symbol.removesuffix(GOTOFF)]
    if isinstance(address, Unavailable):
        return address
    if isinstance(operand, Memory) and operand.symbol.endswith(GOTOFF):
        table = symbols[GLOBAL_OFFSET_TABLE]
        if isinstance(table, Unavailable):
            return table
        return replace(operand, displacement=_signed(address + operand.displacement - table))
    if counter is None:
        return Unavailable("symbols are not supported on this architecture")
    distance = _signed(address + operand.displacement - site)
    match operand:
        case Address():
            return Address(counter, distance, operand.symbol)
        case Memory(base=None):
            return Memory(counter, distance, operand.index, operand.scale, operand.symbol)
        case Memory(base=base, index=None):
            return Memory(counter, distance, base, 1, operand.symbol)
        case _ if is_fixed:
            return replace(operand, displacement=_signed(address + operand.displacement))
        case _:
            return Unavailable("a symbol with both base and index is not supported")


def _signed(distance: int) -> int:
    """Wrap around as addresses do: a hostile symbol table may contain any address."""
    return (distance + (1 << 63)) % (1 << 64) - (1 << 63)
