"""Divide a filter at a site: what an engine tests at the hit, and what the daemon evaluates of the event.

arg0 > 5  &&  str(arg1) ~ "SELECT*"
tested        evaluated, for which events have str(arg1) behind what the client asked for
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from stapsdtd.model import Argument, BuiltIn, Capture, Site, SiteCapture
from stapsdtd.query.at_site import at_site
from stapsdtd.query.compile import untestable, why_not
from stapsdtd.query.expression import Condition, all_of, conjuncts
from stapsdtd.query.needs import needs, why_not_at
from stapsdtd.runtime.slices import Turn

WhyNotCaptured = Callable[[Capture, Argument | BuiltIn], str | None]
"""Returns why an engine cannot capture something; None if it can."""


@dataclass(frozen=True, slots=True)
class SiteFilter:
    """tested, evaluated: None if there is nothing to require. captures: of events, those that the client wants first.
    width: how many these are.
    """

    site: Site
    tested: Condition | None
    evaluated: Condition | None
    captures: tuple[Capture, ...]
    width: int

    @classmethod
    def of(cls, condition: Condition | None, wanted: SiteCapture, *, in_engine: bool = True) -> SiteFilter:
        """in_engine: whether an engine tests what it can."""
        site, captures = wanted.site, wanted.captures
        condition = None if condition is None else at_site(condition, site)
        if condition is None:
            return cls(site, None, None, captures, len(captures))
        tested, evaluated, more = _divided_at(condition, site.arguments, in_engine)
        captured = captures + tuple(each for each in more if each not in captures)
        return cls(site, tested, evaluated, captured, len(captures))

    @property
    def wanted(self) -> SiteCapture:
        """What is captured for other reasons than the filter."""
        return SiteCapture(self.site, self.captures[: self.width])

    def why_not(self, why_not_captured: WhyNotCaptured) -> str | None:
        """Return why the daemon cannot evaluate its part; None if it can. What is tested is the engine's to refuse."""
        if self.evaluated is None:
            return None
        if reason := why_not_at(self.evaluated, self.site.arguments):
            return reason
        for capture in self.captures[self.width :]:
            if reason := why_not_at_hit(capture, self.site, why_not_captured):
                return f"cannot filter by {subject_text(capture)}: {reason}"
        return None


def evaluated_late(condition: Condition | None, sites: Collection[Site]) -> Generator[None, None, dict[Condition, str]]:
    """Return, in steps, which parts of a filter no engine tests, at least at one of the sites, and why."""
    if condition is None:
        return {}
    reasons = {} if sites else dict(divided(condition)[1])
    seen: set[tuple[Condition, tuple[Argument, ...]]] = set()
    turn = Turn()
    for site in sites:
        left = at_site(condition, site)
        if left is not None and (left, site.arguments) not in seen:
            seen.add((left, site.arguments))
            whole, late = divided(left)
            reasons |= late
            for each in whole:
                if each not in reasons and not _is_tested(each, site.arguments):
                    reasons[each] = why_not(each, site.arguments) or ""
        if turn.is_over:
            yield
            turn.begin()
    return reasons


@lru_cache(maxsize=1 << 8)
def divided(condition: Condition) -> tuple[tuple[Condition, ...], Mapping[Condition, str]]:
    """Return what holds together if a condition does, and which parts of it no program tests, whatever the site, and
    why. Kept, since each clause and each site that has the condition asks for it.
    """
    whole = tuple(conjuncts(condition))
    return whole, MappingProxyType(untestable(whole))


@lru_cache(maxsize=1 << 8)
def _divided_at(
    condition: Condition,
    arguments: tuple[Argument, ...],
    in_engine: bool,
) -> tuple[Condition | None, Condition | None, tuple[Capture, ...]]:
    """Return what is tested and what is evaluated at sites with these arguments, and what has to be captured for that.

    Kept, since a file may have thousands of such sites, and each stage of arming asks.
    """
    whole, late = divided(condition)
    kept, left = list[Condition](), list[Condition]()
    for each in whole:
        (kept if in_engine and each not in late and _is_tested(each, arguments) else left).append(each)
    evaluated = all_of(tuple(left))
    tested = condition if evaluated is None else all_of(tuple(kept))
    return tested, evaluated, () if evaluated is None else needs(evaluated)


def _is_tested(condition: Condition, arguments: tuple[Argument, ...]) -> bool:
    """Report whether the engine tests a condition; also one that nobody can evaluate, so that it tells why."""
    return why_not(condition, arguments) is None or why_not_at(condition, arguments) is not None


def why_not_at_hit(capture: Capture, site: Site, why_not_captured: WhyNotCaptured) -> str | None:
    """Return why something that is of a hit, rather than a pair, cannot be captured at a site, or None if it can."""
    match capture.subject:
        case int(index):
            return why_not_captured(capture, site.arguments[index])
        case BuiltIn() as built_in if built_in is not BuiltIn.ELAPSED:
            return why_not_captured(capture, built_in)
        case _:
            return None


def subject_text(capture: Capture) -> str:
    if isinstance(capture.subject, BuiltIn):
        return capture.subject.value
    if capture.is_buffer:
        return f"buf(arg{capture.subject}, {capture.max_bytes})"
    return f"str(arg{capture.subject})" if capture.is_string else f"arg{capture.subject}"
