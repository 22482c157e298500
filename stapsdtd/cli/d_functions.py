"""Kernel functions as probes of D programs, which no listing of probes has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapsdtd.cli.d_sources import CompileError
from stapsdtd.cli.function_selectors import ENTRY, PROVIDER, RETURN
from stapsdtd.cli.function_text import why_no_way
from stapsdtd.cli.render import plural
from stapsdtd.client import Argument, Probe, Site, Unavailable
from stapsdtd.query.d.kernel_functions import descriptions, selector_of
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stapsdtd.client import AsyncClient, FunctionListing, KernelArgument, KernelFunction
    from stapsdtd.query.d.nodes import Program

_WORD_BYTES = 8
_NUMBER_BYTES = frozenset([1, 2, 4, 8])


def functions_of(programs: Iterable[Program]) -> tuple[str, ...]:
    """Return the functions that programs describe, as a subscription names them."""
    return tuple(dict.fromkeys(selector_of(each) for program in programs for each in descriptions(program)))


async def function_probes(client: AsyncClient, functions: Sequence[str]) -> list[Probe]:
    """Return a probe for all entries, and one for all returns, of each module.

    functions: as of `functions_of`. Raises CompileError if no function can be attached to, and ClientError.
    """
    if not functions:
        return []
    listing = await client.kernel_functions(functions)
    _check(listing)
    modules: dict[str, list[KernelFunction]] = {}
    for function in listing:
        if function.ways:
            modules.setdefault(function.module, []).append(function)
    return [probe for module, some in modules.items() for probe in _probes(module, some)]


def is_function(probe: Probe) -> bool:
    """Report whether a probe is at kernel functions. Files have paths."""
    return probe.provider == PROVIDER and "/" not in probe.path


def _check(listing: FunctionListing) -> None:
    if listing.left_out:
        raise CompileError(f"{plural(listing.left_out, 'kernel function')} too many match; name fewer")
    if listing.functions and (reason := why_no_way(listing.ways)):
        raise CompileError(reason)
    if listing.functions and not any(function.ways for function in listing):
        first = listing.functions[0]
        raise CompileError(escape(f"{first.name} cannot be attached to: {'; '.join(first.refused)}"))


def _probes(module: str, functions: Sequence[KernelFunction]) -> Iterator[Probe]:
    entries = [_site(function, function.arguments) for function in functions]
    returns = [_site(function, [function.result] if function.result.size else []) for function in functions]
    for name, sites in ((ENTRY, entries), (RETURN, returns)):
        yield Probe(PROVIDER, name, module, None, "", (), tuple(sites))


def _site(function: KernelFunction, arguments: Iterable[KernelArgument]) -> Site:
    return Site(0, 0, None, function.name, tuple(map(_argument, arguments)))


def _argument(argument: KernelArgument) -> Argument:
    """Return it as the server's own listings of sites would have it."""
    size = argument.size if argument.size in _NUMBER_BYTES else _WORD_BYTES
    # nobody looks where it is
    return Argument(argument.name, size, argument.signed, False, Unavailable(argument.refused))
