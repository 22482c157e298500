"""Which sites of objects a subscription's clauses choose."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace

from stapsdtd import model
from stapsdtd.catalog.selection import parts
from stapsdtd.catalog.selectors import SelectedSite, Selector, choose, meant
from stapsdtd.model import Object, ObjectKey, Site, SiteCapture
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions.spec import ClauseSpec

_OfClauses = tuple[tuple[SelectedSite, ...], ...]
Found = dict[str, _OfClauses]
"""By an object's names: the sites that each clause chooses under it."""


def names_of(obj: Object, mappings: Mapping[int, model.Mapping], named: NamedFile | None = None) -> list[str]:
    """Return an object's names: a file with several is one object, named by the first that was seen.

    mappings: by pid. named: if the client named the file.
    """
    names = dict.fromkeys([obj.path, *(mapping.path for mapping in mappings.values())])
    if named is not None:
        names[named.path] = None
    return list(names)


class Choices:
    """Of objects by their names, as far as they have been found. `search` may run in another thread."""

    def __init__(self, clauses: Sequence[ClauseSpec]) -> None:
        self._clauses = clauses
        self._found: dict[ObjectKey, Found] = {}

    def matches(self, obj: Object, names: Iterable[str]) -> int:
        """Return how many sites are to be matched, counting each selector, until `of` knows these names."""
        found = self._found.get(obj.key, {})
        return sum(
            len(obj.parsed.sites) * len(meant(_selectors(clause), name, obj.parsed.providers))
            for name in names
            if name not in found
            for clause in self._clauses
        )

    def search(self, obj: Object, names: Collection[str]) -> Generator[None, None, Found]:
        """Choose sites step by step."""
        found: Found = {}
        for name in names:
            chosen: list[tuple[SelectedSite, ...]] = []
            for position, clause in enumerate(self._clauses):
                of_clause: list[SelectedSite] = []
                narrowed = meant(_selectors(clause), name, obj.parsed.providers)
                for sites in parts(obj.parsed.sites if narrowed else (), len(narrowed)):
                    of_clause += _chosen(position, clause, name, sites)
                    yield
                chosen.append(tuple(of_clause))
            found[name] = tuple(chosen)
        return found

    def take(self, key: ObjectKey, found: Found) -> None:
        """Note what `search` has found."""
        self._found.setdefault(key, {}).update(found)

    def of(self, obj: Object, names: Collection[str]) -> list[SelectedSite]:
        """Return the chosen sites of an object: for each clause those under the first name under which there are any.

        What was not searched for yet is, at once.
        """
        found = self._found.get(obj.key, {})
        if missing := [name for name in names if name not in found]:
            self.take(obj.key, finish(self.search(obj, missing)))
            found = self._found[obj.key]
        by_clause = zip(*(found[name] for name in names), strict=True)
        return [each for by_name in by_clause for each in next(filter(None, by_name), ())]

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that nobody has any more."""
        self._found.pop(key, None)


def _selectors(clause: ClauseSpec) -> tuple[Selector, ...]:
    return clause.selectors + (clause.span.selectors if clause.span else ())


def _chosen(position: int, clause: ClauseSpec, name: str, sites: tuple[Site, ...]) -> list[SelectedSite]:
    """Return which of some sites of an object of this name a clause selects, and what is captured at each."""
    selected = choose(clause.selectors, name, sites)
    chosen = [_capturing(each, clause.captured(each.capture), position) for each in selected]
    if clause.span is None:
        return chosen
    ends = {each.capture.site for each in chosen}
    captures = clause.span.span.start_captures
    return chosen + [
        replace(each, capture=SiteCapture(each.capture.site, captures, is_start=True), clause=position)
        for each in choose(clause.span.selectors, name, sites)
        # a site that is both is refused as an end
        if each.capture.site not in ends
    ]


def _capturing(selected: SelectedSite, capture: SiteCapture, position: int) -> SelectedSite:
    if capture.captures == selected.capture.captures and capture.listed is None and position == selected.clause:
        return selected
    return replace(selected, capture=capture, clause=position)
