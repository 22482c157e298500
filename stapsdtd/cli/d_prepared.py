"""A D program with what it means here: which probes, and which of its clauses the server can answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stapsdtd.cli.d_hits import ProbeIds
from stapsdtd.cli.d_probes import Meant, argument_type, check_found, fits_signed, static_probes
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.client import Aggregate, Clause
from stapsdtd.query.d.check import check
from stapsdtd.query.d.lower import lowered
from stapsdtd.query.d.needs import Needs, needs_of
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.probes import meaning
from stapsdtd.query.d.text import text_of_clause
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.client import Probe, Site
    from stapsdtd.query.d.checked import Checked
    from stapsdtd.query.d.lower import Lowered
    from stapsdtd.query.d.nodes import Clause as DClause
    from stapsdtd.query.d.nodes import Program

_MOST_ARGUMENTS = 12
_MAX_LOWERED = 31
"""The server takes 32 clauses, of which one has the hits that are interpreted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """meant: by `id` of the clause. needs: of the clauses that are interpreted. lowered: those that are not, by tag."""

    checked: Checked
    meant: Mapping[int, Sequence[Meant]]
    interpreted: Sequence[DClause]
    needs: Needs
    lowered: Mapping[str, Lowered]

    def sites(self) -> list[tuple[Probe, Site, int]]:
        """Return what there is to trace, each in every process that has it; 0 for none yet."""
        found = {
            (probe.path, site.offset, pid): (probe, site, pid)
            for each in (each for some in self.meant.values() for each in some)
            for probe in each.found
            for site in probe.sites
            for pid in probe.pids or (0,)
            if not pid or each.matches(probe, site, pid)
        }
        return list(found.values())

    def clauses(self) -> list[Clause]:
        """Return what to ask the server for."""
        selectors: dict[str, str] = {}
        for each in (each for clause in self.interpreted for each in self.meant[id(clause)]):
            count = each.fewest_arguments
            captures = self.needs.captures(_MOST_ARGUMENTS if count is None else count)
            selectors[each.selector.text] = f"{each.selector.text}({captures})"
        hits = [Clause(tag="hits", selectors=list(selectors.values()), fields=self.needs.fields)] if selectors else []
        return hits + [
            Clause(
                tag=tag,
                selectors=[meant.selector.text for meant in self.meant[id(each.clause)]],
                where=each.where,
                aggregate=Aggregate(functions=each.functions, value=each.value, by=each.by),
            )
            for tag, each in self.lowered.items()
        ]

    def print_list(self) -> None:
        print(f"{'ID':>5} {'PROVIDER':>10} {'MODULE':>17} {'FUNCTION':>33} NAME")
        ids = ProbeIds()
        for probe, site, pid in self.sites():
            parts = probe.provider, os.path.basename(probe.path), site.function or "", probe.name
            provider, module, function, name = map(escape, parts)
            number = ids.id_of(*parts)
            print(f"{number:5} {f'{provider}{pid or str()}':>10} {module:>17} {function:>33} {name}")

    def print_plan(self) -> None:
        """Say what the server adds up, and what this command runs."""
        by_clause: dict[int, list[Lowered]] = {}
        for each in self.lowered.values():
            by_clause.setdefault(id(each.clause), []).append(each)
        for clause in self.checked.program.clauses:
            print(text_of_clause(clause))
            for each in by_clause.get(id(clause), ()):
                parts = [f"  the server adds up: {', '.join(each.functions)}"]
                parts += [f"of {each.value}"] if each.value else []
                parts += [f"by {', '.join(each.by)}"] if each.by else []
                parts += [f"where {each.where}"] if each.where else []
                print(" ".join(parts))
            if id(clause) not in by_clause:
                has_hits = any(meaning(each) is None for each in clause.descriptions)
                print("  this command runs it for each hit" if has_hits else "  this command runs it")


def prepare(program: Program, probes: Sequence[Probe], target: int) -> Prepared:
    """Check a program, and find what it means.

    probes: all that there are. target: as of `static_probes`. Raises DError, and InvalidArgumentError for descriptions
    that make no selector.
    """
    known, settings = catalog(), options_of(program.options)
    meant = static_probes(program, probes, target)
    if not settings.allows_no_match:
        check_found(meant)
    checked = check(program, partial(argument_type, meant=meant, signatures=known))
    found = lowered(checked, partial(fits_signed, meant=meant))
    if sum(map(len, found.values())) > _MAX_LOWERED:
        found = {}
    interpreted = [clause for clause in program.clauses if id(clause) not in found]
    needs = needs_of(checked, interpreted)
    by_tag = {str(number): each for number, each in enumerate(each for some in found.values() for each in some)}
    return Prepared(checked, meant, interpreted, needs, by_tag)
