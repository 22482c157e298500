"""Checks what a request wants to have paired. Functions raise InvalidArgumentError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, HitField, KeySource
from stapsdtd.api.aggregations import check_no_captures, parse_key
from stapsdtd.api.texts import RequestTexts
from stapsdtd.catalog import selectors
from stapsdtd.catalog.selector_text import head_of
from stapsdtd.config.request_limits import MAX_KEYS
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.probes import ENTRY, PROVIDER, RETURN
from stapsdtd.model import Capture, StartArgument
from stapsdtd.query.expression import Condition, Field, all_of, conjuncts, walk
from stapsdtd.query.parse import Expressions
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.spans.span import Span, is_of_pair
from stapsdtd.v1 import stapsdt_pb2 as pb

_STARTS, _KEY = "span.start_selectors", "span.key"
_MAX_OPEN = 10_000
_OF_THREAD = (HitField.TID,)


def divided(where: Condition) -> tuple[Condition | None, Condition | None]:
    """Return what a condition requires of a hit, and of a pair of hits."""
    of_hits: list[Condition] = []
    of_pairs: list[Condition] = []
    for part in conjuncts(where):
        (of_pairs if is_of_pairs(part) else of_hits).append(part)
    return (all_of(tuple(of_hits)) if of_pairs else where), all_of(tuple(of_pairs))


def is_of_pairs(condition: Condition) -> bool:
    return any(part is Field.ELAPSED for part in walk(condition))


def parse_span(
    wanted: pb.Span,
    texts: RequestTexts,
    *,
    ends: Sequence[selectors.Selector],
    aggregation: Aggregation | None,
) -> tuple[Span, tuple[selectors.Selector, ...]]:
    """Return what is to be paired, and what chooses the starts. ends: choose the ends. aggregation: of pairs."""
    if not wanted.start_selectors:
        raise InvalidArgumentError(_STARTS, "at least one is needed, such as postgresql:query__start")
    starts = texts.selectors(wanted.start_selectors, _STARTS)
    if wanted.max_open > _MAX_OPEN:
        raise InvalidArgumentError("span.max_open", f"{wanted.max_open} is more than the {_MAX_OPEN} allowed")
    if wanted.nested and wanted.latest:
        raise InvalidArgumentError("span.latest", "it cannot be combined with nested")
    key = _key(wanted.key, texts.expressions)
    span = Span(
        key,
        _start_captures(starts, aggregation),
        timeout_ns=wanted.timeout_ms * 1_000_000,
        is_nested=wanted.nested,
        max_open=wanted.max_open or _MAX_OPEN,
        takes_latest=wanted.latest,
        is_of_calls=key == _OF_THREAD and not wanted.latest and _are_of_calls(starts, ends),
        is_added=aggregation is not None,
    )
    return span, starts


def _are_of_calls(starts: Sequence[selectors.Selector], ends: Sequence[selectors.Selector]) -> bool:
    """Report whether spans are calls of kernel functions, all of which begin and end in the same one."""
    of_starts, of_ends = ({(each.module.text, each.function.text) for each in some} for some in (starts, ends))
    are_entries = all((each.provider.text, each.name.text) == (PROVIDER, ENTRY) for each in starts)
    are_returns = all((each.provider.text, each.name.text) == (PROVIDER, RETURN) for each in ends)
    return of_starts == of_ends and are_entries and are_returns


def _start_captures(starts: Sequence[selectors.Selector], aggregation: Aggregation | None) -> tuple[Capture, ...]:
    """Return what is to be kept of a start."""
    if aggregation is None:
        lists = {selector.captures or () for selector in starts}
        if len(lists) > 1:
            other = next(each.text for each in starts if each.captures != starts[0].captures)
            reason = "the capture lists of all starts must be the same"
            raise InvalidArgumentError(_STARTS, reason, len(head_of(other)), other)
        return next(iter(lists))
    check_no_captures(starts, _STARTS)
    subjects = ((each, each.subject) for each in aggregation.captures)
    return tuple(
        replace(each, subject=subject.index) for each, subject in subjects if isinstance(subject, StartArgument)
    )


def _key(texts: Sequence[str], expressions: Expressions) -> tuple[KeySource, ...]:
    if len(texts) > MAX_KEYS:
        raise InvalidArgumentError(_KEY, f"there are {len(texts)} parts; the limit is {MAX_KEYS}")
    return tuple(_part(text, expressions) for text in texts) or _OF_THREAD


def _part(text: str, expressions: Expressions) -> KeySource:
    part = parse_key(text, expressions, _KEY)
    if isinstance(part, ExpressionSource):
        raise InvalidArgumentError(_KEY, f"{text} is computed, and a key is an argument or a field", 0, text)
    if part in SITE_FIELDS or (isinstance(part, Capture) and is_of_pair(part)):
        raise InvalidArgumentError(_KEY, f"{text} is not the same at both ends of a span", 0, text)
    return part
