"""Kernel functions as probes of D programs, which no listing of probes has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import Pattern
from stapsdtd.cli.d_sources import CompileError
from stapsdtd.cli.function_selectors import ENTRY, PROVIDER, RETURN
from stapsdtd.cli.function_text import why_no_way
from stapsdtd.cli.render import plural
from stapsdtd.client import Argument, InvalidRequestError, Probe, Site, Unavailable
from stapsdtd.globs import matches
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.kernel_functions import descriptions, selector_of
from stapsdtd.query.d.members import Function, has_members, mentions_members, values_of, with_values
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stapsdtd.client import AsyncClient, FunctionListing, KernelArgument, KernelFunction, KernelValue
    from stapsdtd.query.d.members import FindFunctions
    from stapsdtd.query.d.nodes import Description, Program

_WORD_BYTES = 8
_NUMBER_BYTES = frozenset([1, 2, 4, 8])

Failed = Callable[[int, DError], Exception]
"""Takes the number of a program, and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Those that programs describe. programs: without members, which are values of functions. texts: as a subscription
    names them, with these values.
    """

    programs: Sequence[Program]
    texts: tuple[str, ...] = ()
    probes: Sequence[Probe] = ()


async def functions_of(client: AsyncClient, programs: Sequence[Program], failed: Failed) -> Functions:
    """Ask the server for the functions that programs describe.

    failed: what is raised for an error in one of them. Raises that, CompileError if no function can be attached to, and
    ClientError.
    """
    wanted = dict.fromkeys(selector_of(each) for program in programs for each in descriptions(program))
    if not wanted:
        return Functions(programs)
    texts = tuple(wanted)
    listing = await client.kernel_functions(texts)
    _check(listing)
    if any(map(mentions_members, programs)):
        values: dict[str, dict[str, None]] = {text: {} for text in texts}
        for number, program in enumerate(programs):
            with _failing(failed, number):
                _collect(program, listing, values)
        texts = tuple(f"{text}({', '.join(some)})" if some else text for text, some in values.items())
        try:
            listing = await client.kernel_functions(texts)
        except InvalidRequestError as error:
            # of a type that has no such member
            raise CompileError(escape(f"failed to compile: {error}")) from None
        made = []
        for number, program in enumerate(programs):
            with _failing(failed, number):
                made.append(_without_members(program, listing))
        programs = made
    return Functions(programs, texts, _probes_of(listing))


@contextmanager
def _failing(failed: Failed, number: int) -> Iterator[None]:
    try:
        yield
    except DError as error:
        raise failed(number, error) from None


def _collect(program: Program, listing: FunctionListing, values: Mapping[str, dict[str, None]]) -> None:
    """Collect the values that a program's members are, by the function's text. Raises DError."""
    for clause in filter(has_members, program.clauses):
        for description in clause.descriptions:
            if Pattern(description.function).is_glob:
                raise DError("members are those of functions that are named without a glob", description.at)
        for description, value in values_of(clause, _finding(listing)):
            values[selector_of(description)][value] = None


def _without_members(program: Program, listing: FunctionListing) -> Program:
    find = _finding(listing)
    for function in listing:
        for value in function.values:
            if value.size not in _NUMBER_BYTES and not value.bits and not value.is_text:
                raise CompileError(escape(f"{function.name}: {value.text} is a {value.type}; name a member of it"))
    clauses = (with_values(clause, find) if has_members(clause) else clause for clause in program.clauses)
    return replace(program, clauses=tuple(clauses))


def _finding(listing: FunctionListing) -> FindFunctions:
    def find(description: Description) -> list[Function]:
        return [
            Function(
                each.name,
                [argument.name for argument in each.arguments],
                [value.text for value in each.values],
                [value.text for value in each.values if value.is_text],
                each.result.size > 0,
            )
            for each in listing
            if each.name == description.function and matches(each.module, description.module or "*")
        ]

    return find


def _probes_of(listing: FunctionListing) -> list[Probe]:
    """Return a probe for all entries, and one for all returns, of each module."""
    modules: dict[str, list[KernelFunction]] = {}
    for function in listing:
        if function.ways:
            modules.setdefault(function.module, []).append(function)
    return [probe for module, some in modules.items() for probe in _probes(module, some)]


def _check(listing: FunctionListing) -> None:
    if listing.left_out:
        raise CompileError(f"{plural(listing.left_out, 'kernel function')} over the limit match; name fewer")
    if listing.functions and (reason := why_no_way(listing.ways)):
        raise CompileError(reason)
    if listing.functions and not any(function.ways for function in listing):
        first = listing.functions[0]
        raise CompileError(escape(f"{first.name} cannot be attached to: {'; '.join(first.refused)}"))


def _probes(module: str, functions: Sequence[KernelFunction]) -> Iterator[Probe]:
    entries = [_site(function, function.arguments, is_return=False) for function in functions]
    results = [[function.result] if function.result.size else [] for function in functions]
    returns = [_site(function, result, is_return=True) for function, result in zip(functions, results, strict=True)]
    for name, sites in ((ENTRY, entries), (RETURN, returns)):
        yield Probe(PROVIDER, name, module, None, "", (), tuple(sites))


def _site(function: KernelFunction, arguments: Sequence[KernelArgument], *, is_return: bool) -> Site:
    values = [each for each in function.values if (each.argument is None) is is_return]
    return Site(0, 0, None, function.name, (*map(_argument, arguments), *map(_value, values)))


def _value(value: KernelValue) -> Argument:
    size = next((size for size in sorted(_NUMBER_BYTES) if size >= value.size), _WORD_BYTES)
    return Argument(value.text, size, value.signed, False, Unavailable(value.refused))


def _argument(argument: KernelArgument) -> Argument:
    """Return it as the server's own listings of sites would have it."""
    size = argument.size if argument.size in _NUMBER_BYTES else _WORD_BYTES
    # nobody looks where it is
    return Argument(argument.name, size, argument.signed, False, Unavailable(argument.refused))
