"""Which sites of objects a subscription's clauses choose."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence

from stapsdtd import model
from stapsdtd.catalog.selector_set import Chosen, SelectorSet
from stapsdtd.catalog.selectors import SelectedSite, normalized
from stapsdtd.model import Object, ObjectKey, SiteCapture
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions.spec import ClauseSpec

_OfClauses = tuple[tuple[SelectedSite, ...], ...]
Found = dict[str, _OfClauses]
"""By an object's names: the sites that each clause chooses under it."""

_FEW = 64
"""Matches that are made only to find out whether more are to be."""
_SITES_PER_STEP = 256


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

    def __init__(
        self, clauses: Sequence[ClauseSpec], excluded_probes: Collection[tuple[str, str]] = frozenset()
    ) -> None:
        """excluded_probes: see `SubscriptionSpec`."""
        self._clauses = [_Clause(position, clause, excluded_probes) for position, clause in enumerate(clauses)]
        self._found: dict[ObjectKey, Found] = {}

    def may_choose(self, obj: Object) -> bool:
        """Report, at little cost, whether any site of an object may be chosen."""
        return any(clause.may_choose(obj) for clause in self._clauses)

    def matches(self, obj: Object, names: Iterable[str]) -> int:
        """Return how many sites are to be matched, counting each selector that is a glob, until `of` knows these
        names.
        """
        found = self._found.get(obj.key, {})
        return sum(clause.matches(obj, name) for name in names if name not in found for clause in self._clauses)

    def search(self, obj: Object, names: Collection[str]) -> Generator[None, None, Found]:
        """Choose sites step by step."""
        found: Found = dict.fromkeys(names, ())
        for name in found:
            for clause in self._clauses:
                found[name] += ((yield from clause.search(obj, name)),)
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


class _Clause:
    """Its selectors, those of the starts of its span after those of events or ends."""

    def __init__(self, position: int, spec: ClauseSpec, excluded_probes: Collection[tuple[str, str]]) -> None:
        self._position = position
        self._excluded_probes = excluded_probes
        self._spec = spec
        self._selectors = SelectorSet(spec.selectors + (spec.span.selectors if spec.span else ()))
        self._of_ends = (1 << len(spec.selectors)) - 1

    def may_choose(self, obj: Object) -> bool:
        return self._selectors.may_mean(obj.parsed.all_providers)

    def matches(self, obj: Object, name: str) -> int:
        """See `Choices.matches`."""
        effort, providers = self._selectors.effort, obj.parsed.all_providers
        matches = (len(obj.parsed.sites) + len(obj.parsed.refused)) * effort
        if matches > _FEW and len(providers) * effort <= _FEW:
            (meant,) = finish(self._selectors.meant([(name, providers)]))
            return matches if meant else 0
        return matches

    def search(self, obj: Object, name: str) -> Generator[None, None, tuple[SelectedSite, ...]]:
        """Choose sites of an object of this name, and what is captured at each; also notes that are to be refused."""
        (meant,) = yield from self._selectors.meant([(name, obj.parsed.all_providers)])
        chosen = yield from self._selectors.choose(meant, obj.parsed.sites)
        chosen += yield from self._selectors.choose(meant, obj.parsed.refused)
        if self._excluded_probes:
            chosen = [each for each in chosen if not self._is_excluded(each.site)]
        ends: list[SelectedSite] = []
        starts: list[SelectedSite] = []
        for number, each in enumerate(chosen, 1):
            end, start = each.among(self._of_ends), each.among(~self._of_ends)
            if end is not None:
                ends.append(self._end(end, is_both=start is not None))
            elif start is not None:
                starts.append(self._start(start))
            if number % _SITES_PER_STEP == 0:
                yield
        return (*ends, *starts)

    def _is_excluded(self, site: model.Site) -> bool:
        return (normalized(site.provider), normalized(site.name)) in self._excluded_probes

    def _end(self, chosen: Chosen, *, is_both: bool) -> SelectedSite:
        capture = self._spec.captured(self._selectors.captured(chosen))
        return SelectedSite(capture, self._selectors.pids(chosen), self._position, is_both)

    def _start(self, chosen: Chosen) -> SelectedSite:
        captures = self._spec.span.span.start_captures if self._spec.span else ()
        capture = SiteCapture(chosen.site, captures, is_start=True)
        return SelectedSite(capture, self._selectors.pids(chosen), self._position)
