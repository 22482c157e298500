"""Which of a site's hits, and of the pairs that end there, a subscription wants, by the target that names the site."""

from __future__ import annotations

from stapsdtd.capture.bpf.encode import Filter, LinkOf
from stapsdtd.capture.bpf.following import FollowedProcesses
from stapsdtd.capture.engine import Target, TargetSite
from stapsdtd.query.actions import BeginSpan, Emit, EndSpan
from stapsdtd.query.compile import compile_for
from stapsdtd.query.program import Program


def filter_of(target: Target, wanted: TargetSite, chain: int | None = None) -> Filter:
    """Return which of a site's hits are wanted. chain: the subscription's, if it has one.

    Raises ValueError if the predicate does not fit the site.
    """
    program = None if wanted.predicate is None else compile_for(wanted.predicate, wanted.site)
    pids, followed = wanted.scope, None
    if pids is not None:
        followed = next((each.number for each in pids if isinstance(each, FollowedProcesses)), None)
        pids = frozenset(each for each in pids if isinstance(each, int)) if followed is None else None
    excluded = frozenset(target.exclude_pids)
    if not isinstance(wanted.action, Emit):
        # the reader, which filters others' events, cannot take a hit out of a row, nor part a pair
        excluded |= target.exclude_later if pids is None else target.exclude_later & pids
    link = None if chain is None or wanted.link is None else LinkOf(chain, wanted.link)
    return Filter(pids, excluded, program, target.owners, followed, link)


def filter_of_starts(wanted: TargetSite) -> Filter | None:
    """Return which of a site's hits are starts of pairs that are wanted, None for all. Raises as `filter_of`."""
    match wanted.action:
        case BeginSpan(predicate=predicate) if predicate is not None:
            return Filter(None, frozenset(), compile_for(predicate, wanted.site))
        case _:
            return None


def filter_of_pairs(wanted: TargetSite) -> Program | None:
    """Return which pairs that end at a site are wanted, None for all. Raises ValueError as `filter_of`."""
    match wanted.action:
        case EndSpan(predicate=predicate) if predicate is not None:
            return compile_for(predicate, wanted.site)
        case _:
            return None
