"""What the ftrace engine has to fetch and test at a target's sites, or why it cannot."""

from __future__ import annotations

from stapsdtd.capture.engine import Refusal, Target
from stapsdtd.capture.ftrace.decode import EVERYTHING, SiteConsumer
from stapsdtd.model import Capture, Site, SiteCapture, Unavailable
from stapsdtd.plan.fetch import fetch
from stapsdtd.query.actions import Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.compile import compile_for, why_not
from stapsdtd.query.expression import ArgumentValue, Condition, Field, walk

NOT_AGGREGATED = "the ftrace engine adds nothing up"
NOT_PAIRED = "the ftrace engine pairs nothing"

_TESTABLE = frozenset({Field.PID, Field.TID, Field.EXECNAME, Field.CPU, Field.TIMESTAMP})


def consumers_of(target: Target) -> tuple[dict[SiteCapture, SiteConsumer], list[Refusal]]:
    """Return the sites to arm, with all values to fetch and their consumers, and refusals of the others."""
    consumers: dict[SiteCapture, SiteConsumer] = {}
    refusals: list[Refusal] = []
    for wanted in target.sites:
        program = EVERYTHING
        if wanted.predicate is not None:
            reason = _untestable(wanted.predicate, wanted.site, target.object.parsed.architecture)
            if reason is not None:
                refusals.append(Refusal(wanted.site, reason))
                continue
            program = compile_for(wanted.predicate, wanted.site)
        match wanted.action:
            case Emit(captures):
                tested = [each for each in map(Capture, program.arguments) if each not in captures]
                fetched = SiteCapture(wanted.site, (*captures, *tested))
                consumers[fetched] = SiteConsumer(wanted.site_id, len(captures), wanted.scope, program)
            case Aggregate():
                refusals.append(Refusal(wanted.site, NOT_AGGREGATED))
            case BeginSpan() | EndSpan():
                refusals.append(Refusal(wanted.site, NOT_PAIRED))
    return consumers, refusals


def _untestable(predicate: Condition, site: Site, architecture: str) -> str | None:
    """Return why this engine cannot test a predicate at a site, or None if it can."""
    reason = why_not(predicate, site.arguments)
    if reason is not None:
        return reason
    for each in walk(predicate):
        match each:
            case ArgumentValue(index):
                fetched = fetch(Capture(index), site.arguments[index], architecture)
                if isinstance(fetched, Unavailable):
                    return f"cannot filter by arg{index}: {fetched.reason}"
            case Field() if each not in _TESTABLE:
                return f"the ftrace engine cannot filter by {each.value}; the bpf engine can"
    return None
