"""Which probes a D program's clauses mean."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import Selector, parse
from stapsdtd.cli.function_selectors import is_function
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.probes import meaning, selector_of
from stapsdtd.query.d.values import Integer, String
from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stapsdtd.client import Probe, Site
    from stapsdtd.query.d.nodes import Clause, Description, Program
    from stapsdtd.query.d.values import Type
    from stapsdtd.signatures.catalog import Catalog

_SIZES = frozenset([1, 2, 4, 8])


@dataclass(frozen=True, slots=True)
class Meant:
    """A description of static probes. found: those that there are now."""

    description: Description
    selector: Selector
    found: tuple[Probe, ...]

    def matches(self, probe: Probe, site: Site, pid: int) -> bool:
        """Report whether a hit of a site in a process is one of these probes'."""
        if not (self._is_of_file(probe) and self.selector.function.matches(site.function or "")):
            return False
        named = self.selector.provider_of_pid
        return self.selector.provider.matches(_normalized(probe.provider)) or (
            named is not None and named[1] == pid and named[0].matches(_normalized(probe.provider))
        )

    def _is_of_file(self, probe: Probe) -> bool:
        return self.selector.matches_name(probe.name) and self.selector.matches_module(probe.path)


def _normalized(provider: str) -> str:
    return provider.replace("-", "__")


def static_probes(program: Program, probes: Iterable[Probe]) -> dict[int, tuple[Meant, ...]]:
    """Return what the descriptions of each clause mean, by `id` of the clause.

    probes: all that there are, with the processes that have them or are about to.
    """
    known = tuple(probes)
    return {
        id(clause): tuple(_meant(each, known) for each in clause.descriptions if meaning(each) is None)
        for clause in program.clauses
    }


def check_found(meant: Mapping[int, Sequence[Meant]]) -> None:
    """Raises DError if there are no probes for a description."""
    for some in meant.values():
        for each in some:
            if not each.found:
                raise DError(f"probe description {each.description} does not match any probes", each.description.at)


def _meant(description: Description, probes: Sequence[Probe]) -> Meant:
    selector = parse(selector_of(description))
    meant = Meant(description, selector, ())
    found = tuple(
        probe
        for probe in probes
        if any(meant.matches(probe, site, pid) for site in probe.sites for pid in probe.pids or (0,))
    )
    return Meant(description, selector, found)


def argument_type(clause: Clause, index: int, meant: Mapping[int, Sequence[Meant]], signatures: Catalog) -> Type | None:
    """Return the type of args[index] in a clause: by signatures, or by the sizes in the notes."""
    sites = ((probe, site) for each in meant[id(clause)] for probe in each.found for site in probe.sites)
    return _common_type(sites, index, signatures)


def _common_type(sites: Iterable[tuple[Probe, Site]], index: int, signatures: Catalog) -> Type | None:
    """Return what args[index] is at all sites that have it; None if none has."""
    types = {_type_of(probe, site, index, signatures) for probe, site in sites} - {None}
    return types.pop() if len(types) == 1 else Integer(64, is_signed=True) if types else None


def type_names(sites: Sequence[tuple[Probe, Site]], signatures: Catalog) -> Iterator[str]:
    """Yield the types of the arguments that sites of one probe have, in C's words."""
    for index in range(max(len(site.arguments) for _, site in sites)):
        floats = {
            site.arguments[index].size
            for _, site in sites
            if index < len(site.arguments) and site.arguments[index].is_float
        }
        match _common_type(sites, index, signatures):
            case Integer(bits, is_signed) if not floats:
                yield f"{'' if is_signed else 'u'}int{bits}_t"
            case String():
                yield "string"
            case _:
                yield "float" if floats == {4} else "double"


@dataclass(frozen=True, slots=True)
class Known:
    """Implements `query.d.lower_expressions.Sites` for the sites that there are. Of those that may come later nobody
    knows: the server refuses what it cannot add up.
    """

    meant: Mapping[int, Sequence[Meant]]

    def _sites(self, clause: Clause) -> list[tuple[Probe, Site]]:
        return [(probe, site) for each in self.meant[id(clause)] for probe in each.found for site in probe.sites]

    def fits(self, clause: Clause, index: int, bits: int) -> bool:
        sites = self._sites(clause)
        return bool(sites) and all(
            index < len(site.arguments)
            and not site.arguments[index].is_float
            and site.arguments[index].size in _SIZES
            and site.arguments[index].size * 8 <= bits - (not site.arguments[index].signed)
            for _, site in sites
        )

    def are_apart(self, clause: Clause, other: Clause) -> bool:
        one, another = (set(starmap(_place, self._sites(each))) for each in (clause, other))
        return bool(one and another) and one.isdisjoint(another)


def _place(probe: Probe, site: Site) -> tuple[str, int | str]:
    """Return what two descriptions of one place have in common."""
    return probe.path, f"{site.function}:{probe.name}" if is_function(probe) else site.offset


def _type_of(probe: Probe, site: Site, index: int, signatures: Catalog) -> Type | None:
    if index >= len(site.arguments):
        return None
    named = _normalized(probe.provider), _normalized(probe.name)
    signature = signatures.fit(*named, [site], probe.architecture).signature
    if signature is not None and signature.arguments and signature.arguments[index].kind is Kind.STRING:
        return String()
    argument = site.arguments[index]
    bits = argument.size * 8 if argument.size in _SIZES else 64
    return Integer(bits, is_signed=argument.signed)
