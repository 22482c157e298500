"""A D program with what it means here: which probes, and which of its clauses the server can answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from stapsdtd.cli.d_hits import ProbeIds
from stapsdtd.cli.d_probes import Known, Meant, argument_type, check_found, static_probes, type_names
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.options import KEPT_MS
from stapsdtd.client import Aggregate, Clause, Span
from stapsdtd.query.d.check import check
from stapsdtd.query.d.lower import Plan, planned
from stapsdtd.query.d.needs import Needs, needs_of
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.probes import lenient_selector, meaning, probe_name
from stapsdtd.query.d.text import text_of_clause
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.client import Probe, Site
    from stapsdtd.query.d.checked import Checked
    from stapsdtd.query.d.lower import Lowered, Start
    from stapsdtd.query.d.nodes import Clause as DClause
    from stapsdtd.query.d.nodes import Program

_MAX_LOWERED = 31
"""The server takes 32 clauses, of which one has the hits that are interpreted."""


class ListedProbe(NamedTuple):
    """What DTrace calls a probe: one or several sites of a process. pid: 0 where no process has it yet."""

    provider: str
    pid: int
    module: str
    function: str
    name: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """meant: by `id` of the clause. needs: of the clauses that are interpreted. lowered: those that are not, by tag.
    reasons: why they are, by `id` of the clause.
    """

    checked: Checked
    meant: Mapping[int, Sequence[Meant]]
    interpreted: Sequence[DClause]
    needs: Needs
    lowered: Mapping[str, Lowered]
    reasons: Mapping[int, str]

    def probes(self) -> dict[ListedProbe, list[tuple[Probe, Site]]]:
        """Return the sites of what there is to trace, in every process that has it; 0 for none yet."""
        found: dict[ListedProbe, dict[tuple[str, int], tuple[Probe, Site]]] = {}
        pairs = ((each, probe) for some in self.meant.values() for each in some for probe in each.found)
        for meant, probe in pairs:
            for site, pid in ((site, pid) for site in probe.sites for pid in probe.pids or (0,)):
                if not pid or meant.matches(probe, site, pid):
                    module, function = os.path.basename(probe.path), site.function or ""
                    listed = ListedProbe(probe.provider, pid, module, function, probe_name(probe.name))
                    found.setdefault(listed, {})[probe.path, site.offset] = probe, site
        return {listed: list(sites.values()) for listed, sites in found.items()}

    def clauses(self) -> list[Clause]:
        """Return what to ask the server for."""
        meant = (each for clause in self.interpreted for each in self.meant[id(clause)])
        selectors = dict.fromkeys(f"{lenient_selector(each.selector.text)}({self.needs.captures})" for each in meant)
        hits = [Clause(tag="hits", selectors=list(selectors), fields=self.needs.fields)] if selectors else []
        return hits + [
            Clause(
                tag=tag,
                selectors=self._selectors(each.clause),
                where=each.where,
                aggregate=Aggregate(functions=each.functions, value=each.value, by=each.by, interval_ms=KEPT_MS),
                span=None if each.start is None else self._span(each.start),
            )
            for tag, each in self.lowered.items()
        ]

    def _selectors(self, clause: DClause) -> list[str]:
        return [meant.selector.text for meant in self.meant[id(clause)]]

    def _span(self, start: Start) -> Span:
        return Span(
            start_selectors=self._selectors(start.clause),
            start_where=start.where,
            latest=start.takes_latest,
            filters_choose=True,
        )

    def print_list(self, *, is_verbose: bool) -> None:
        """is_verbose: with the types of the probes' arguments."""
        print(f"{'ID':>5} {'PROVIDER':>10} {'MODULE':>17} {'FUNCTION':>33} NAME")
        ids = ProbeIds()
        for (provider, pid, module, function, name), sites in self.probes().items():
            number = ids.id_of(provider, module, function, name)
            columns = escape(f"{provider}{pid or ''}"), escape(module), escape(function), escape(name)
            print("{:5} {:>10} {:>17} {:>33} {}".format(number, *columns))
            if is_verbose:
                types = list(type_names(sites, catalog()))
                lines = [escape(f"args[{index}]: {each}") for index, each in enumerate(types)] or ["None"]
                print("\n\tArgument Types", *lines, sep="\n\t\t", end="\n\n")

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
                parts += [f"since {_descriptions(each.start.clause)}"] if each.start else []
                print(" ".join(parts))
            if all(meaning(each) is not None for each in clause.descriptions):
                print("  this command runs it")
            elif reason := self.reasons.get(id(clause)):
                print(f"  this command runs it for each hit: {reason}")
            elif id(clause) not in by_clause:
                print("  the server pairs it with the clause that ends it")


def prepare(program: Program, probes: Sequence[Probe]) -> Prepared:
    """Check a program, and find what it means.

    probes: as of `static_probes`. Raises DError, and InvalidArgumentError for descriptions that make no selector.
    """
    known, settings = catalog(), options_of(program.options)
    meant = static_probes(program, probes)
    if not settings.allows_no_match:
        check_found(meant)
    checked = check(program, partial(argument_type, meant=meant, signatures=known))
    plan = planned(checked, Known(meant))
    if sum(map(len, plan.lowered.values())) > _MAX_LOWERED:
        plan = Plan(
            reasons={id(clause): "the program adds up too much for one subscription" for clause in program.clauses}
        )
    interpreted = [clause for clause in program.clauses if id(clause) not in plan.lowered]
    needs = needs_of(checked, interpreted)
    lowered = (each for some in plan.lowered.values() for each in some)
    by_tag = {str(number): each for number, each in enumerate(lowered)}
    return Prepared(checked, meant, interpreted, needs, by_tag, plan.reasons)


def _descriptions(clause: DClause) -> str:
    return ", ".join(map(str, clause.descriptions))
