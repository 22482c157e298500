from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.plan.attachments import EVENTS_ALONE, Choice, Means, Scope, changes

PAGE = 0x1000
OFFSETS = (0x10, 0x20, 0x1010, 0x2010, 0x2020)

Demands = Mapping[int, Scope]
"""Of one subscription: for which processes it wants each site, by its offset."""


@dataclass(eq=False)
class Site:
    site_offset: int
    scopes: dict[int, Scope] = field(default_factory=dict)
    unit: str = "file"
    has_offset: bool = True

    @property
    def is_wanted(self) -> bool:
        return bool(self.scopes)

    @property
    def scope(self) -> Scope:
        scopes = self.scopes.values()
        return None if None in scopes else frozenset[int]().union(*(scope or () for scope in scopes))


@dataclass(eq=False)
class Group:
    sites: list[Site]
    scope: Scope
    is_stale: bool = False


class Host:
    """Does what it is told to do. can_widen: whether the kernel lets groups reach further processes."""

    def __init__(self, *, can_widen: bool = True) -> None:
        self.sites = [Site(offset) for offset in OFFSETS]
        self.groups: list[Group] = []
        self._can_widen = can_widen

    def want(self, subscription: int, demands: Demands) -> None:
        """Have this be all that a subscription wants."""
        for site in self.sites:
            site.scopes.pop(subscription, None)
            if site.site_offset in demands:
                site.scopes[subscription] = demands[site.site_offset]
        before = self.patched()
        ungrouped = [site for site in self.sites if not any(site in group.sites for group in self.groups)]
        needed = changes(self.groups, ungrouped)
        if not self._can_widen:
            needed = changes(self.groups, ungrouped, [group for group, _ in needed.widen])
            assert not needed.widen
        for group, pids in needed.widen:
            assert group.scope is not None
            assert pids.isdisjoint(group.scope)
            group.scope |= pids
        self.groups += [Group(list(wanted.sites), wanted.scope) for wanted in needed.attach]
        # until the old groups go, both are there, and no hit that was wanted is missed
        for site in self.sites:
            if site.is_wanted and site.site_offset in before:
                assert reaches(self.scopes_of(site), site.scope)
        self.groups = [group for group in self.groups if group not in needed.detach]

    def scopes_of(self, site: Site) -> list[Scope]:
        return [group.scope for group in self.groups if site in group.sites]

    def patched(self) -> dict[int, Scope]:
        """For which processes each site is patched, by its offset; once at most."""
        patched: dict[int, Scope] = {}
        for group in self.groups:
            lows = [site.site_offset % PAGE for site in group.sites]
            assert len(set(lows)) == len(lows) > 0
            for site in group.sites:
                assert site.site_offset not in patched
                patched[site.site_offset] = group.scope
        return patched


def reaches(scopes: Iterable[Scope], wanted: Scope) -> bool:
    return any(scope is None or (wanted is not None and wanted <= scope) for scope in scopes)


def scopes() -> st.SearchStrategy[Scope]:
    return st.one_of(st.none(), st.frozensets(st.sampled_from([1, 2, 3]), min_size=1))


def demands() -> st.SearchStrategy[Demands]:
    return st.dictionaries(st.sampled_from(OFFSETS), scopes())


@given(st.lists(st.tuples(st.integers(0, 3), demands()), max_size=12), st.booleans())
def test_exactly_what_is_wanted_is_patched(steps: Sequence[tuple[int, Demands]], can_widen: bool) -> None:
    host = Host(can_widen=can_widen)
    for subscription, wanted in steps:
        host.want(subscription, wanted)
        assert host.patched() == {site.site_offset: site.scope for site in host.sites if site.is_wanted}


@given(st.dictionaries(st.integers(0, 4), demands()), st.data())
def test_any_order_ends_in_the_same_state(last: Mapping[int, Demands], data: st.DataObject) -> None:
    ends = []
    for _ in range(2):
        host = Host()
        earlier = data.draw(st.lists(st.tuples(st.sampled_from(sorted(last) or [0]), demands()), max_size=4))
        for subscription, wanted in earlier:
            host.want(subscription, wanted)
        host.want(0, {})
        for subscription in data.draw(st.permutations(sorted(last))):
            host.want(subscription, last[subscription])
        ends.append(host.patched())
    assert ends[0] == ends[1]


def test_nothing_changes_where_everything_is_as_wanted() -> None:
    host = Host()
    host.want(1, {0x10: None, 0x20: None})
    (group,) = host.groups
    needed = changes([group], [site for site in host.sites if not site.is_wanted])
    assert (needed.widen, needed.attach, needed.detach) == ([], [], [])


def test_group_is_widened_by_what_it_lacks() -> None:
    host = Host()
    host.want(1, {0x10: frozenset({1})})
    host.want(2, {0x10: frozenset({1, 2})})
    (group,) = host.groups
    assert (group.scope, [site.site_offset for site in group.sites]) == (frozenset({1, 2}), [0x10])


def test_group_that_is_stale_is_replaced_by_its_like() -> None:
    host = Host()
    host.want(1, {0x10: frozenset({1}), 0x20: frozenset({1})})
    (group,) = host.groups
    group.is_stale = True
    ungrouped: list[Site] = []
    needed = changes([group], ungrouped)
    assert (needed.widen, needed.detach) == ([], [group])
    assert [(attach.sites, attach.scope) for attach in needed.attach] == [(tuple(group.sites), frozenset({1}))]


@pytest.mark.parametrize(
    ("choice", "scope", "groups"),
    [
        (EVENTS_ALONE, None, 2),
        (EVENTS_ALONE, frozenset({1}), 2),
        (Choice(Means.LINK, Means.EVENT), None, 1),
        (Choice(Means.LINK, Means.EVENT), frozenset({1}), 2),
        (Choice(Means.LINK, Means.LINK), frozenset({1}), 1),
        (Choice(Means.LINK, Means.SHARED_LINK), frozenset({1}), 1),
    ],
)
def test_only_events_need_page_offsets_that_differ(choice: Choice, scope: Scope, groups: int) -> None:
    sites = [Site(0x10, {1: scope}), Site(0x1010, {1: scope})]
    assert len(changes([Group([], None)], sites, choice=choice).attach) == groups


def test_sites_that_stay_get_a_group_without_those_that_go() -> None:
    host = Host()
    host.want(1, {0x10: None, 0x20: None})
    before = host.groups[0]
    host.want(1, {0x20: None})
    (after,) = host.groups
    assert after is not before
    assert host.patched() == {0x20: None}


@pytest.mark.parametrize("choice", [EVENTS_ALONE, Choice(Means.LINK, Means.LINK)])
def test_sites_of_different_files_are_attached_apart(choice: Choice) -> None:
    one, other, gone = (Site(0x10, {1: None}, "one"), Site(0x20, {1: None}, "other"), Site(0x30, {}, "other"))
    needed = changes([Group([other, gone], None)], [one], choice=choice)
    assert [each.sites for each in needed.attach] == [(one,), (other,)]


def test_what_has_no_offset_is_attached_together() -> None:
    functions = [Site(0, {1: None}, has_offset=False) for _ in range(3)]
    needed = changes([Group([], None)], functions)
    assert [attach.sites for attach in needed.attach] == [tuple(functions)]
