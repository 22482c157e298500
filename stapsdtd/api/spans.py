"""Checks what a request wants to have paired. Functions raise InvalidArgumentError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, HitField, KeySource
from stapsdtd.api.aggregations import check_no_captures, parse_key
from stapsdtd.catalog import selectors
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.probes import ENTRY, PROVIDER, RETURN
from stapsdtd.model import Capture, StartArgument
from stapsdtd.query.expression import Condition, Field, all_of, conjuncts, walk
from stapsdtd.query.parse import parse
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.query.tree_builder import FindCgroup
from stapsdtd.sessions.spec import SpanSpec
from stapsdtd.spans.span import Span, is_of_pair
from stapsdtd.v1 import stapsdt_pb2 as pb

_STARTS, _KEY = "span.start_selectors", "span.key"
_MAX_OPEN = 10_000
_MAX_PARTS = 8
_OF_THREAD = (HitField.TID,)


def divided(where: Condition | None) -> tuple[Condition | None, Condition | None]:
    """Return what a condition requires of a hit, and of a pair of hits."""
    parts = () if where is None else tuple(conjuncts(where))
    of_pair = tuple(part for part in parts if _is_of_pair(part))
    return (where if not of_pair else all_of(tuple(part for part in parts if part not in of_pair))), all_of(of_pair)


def _is_of_pair(condition: Condition) -> bool:
    return any(part is Field.ELAPSED for part in walk(condition))


def parse_span(
    clause: pb.Clause,
    limits: Limits,
    find_cgroup: FindCgroup,
    in_scope: Callable[[Condition | None], Condition | None],
    *,
    ends: Sequence[selectors.Selector],
    of_pairs: Condition | None,
    aggregation: Aggregation | None,
) -> SpanSpec | None:
    """Return what is to be paired; None if nothing is.

    in_scope: adds what the scope requires. ends: choose the ends. of_pairs: what is required of pairs. aggregation: of
    pairs, if any.
    """
    if not clause.HasField("span"):
        if of_pairs is not None:
            raise InvalidArgumentError("where", "elapsed is the time of a span, and the request has none")
        return None
    wanted = clause.span
    if not wanted.start_selectors:
        raise InvalidArgumentError(_STARTS, "at least one is needed, such as postgresql:query__start")
    starts = _selectors(wanted.start_selectors, limits)
    where = parse(wanted.start_where, find_cgroup, "span.start_where") if wanted.start_where.strip() else None
    if where is not None and _is_of_pair(where):
        raise InvalidArgumentError("span.start_where", "elapsed is not known yet when a span begins")
    if wanted.max_open > _MAX_OPEN:
        raise InvalidArgumentError("span.max_open", f"{wanted.max_open} is more than the {_MAX_OPEN} allowed")
    if wanted.nested and wanted.latest:
        raise InvalidArgumentError("span.latest", "it cannot be combined with nested")
    key = _key(wanted.key, find_cgroup)
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
    return SpanSpec(span, starts, in_scope(where), of_pairs)


def _are_of_calls(starts: Sequence[selectors.Selector], ends: Sequence[selectors.Selector]) -> bool:
    """Report whether spans are calls of kernel functions, all of which begin and end in the same one."""
    of_starts, of_ends = ({(each.module.text, each.function.text) for each in some} for some in (starts, ends))
    are_entries = all((each.provider.text, each.name.text) == (PROVIDER, ENTRY) for each in starts)
    are_returns = all((each.provider.text, each.name.text) == (PROVIDER, RETURN) for each in ends)
    return of_starts == of_ends and are_entries and are_returns


def _selectors(texts: Sequence[str], limits: Limits) -> tuple[selectors.Selector, ...]:
    if len(texts) > limits.max_selectors:
        raise InvalidArgumentError(_STARTS, f"there are {len(texts)}, more than the {limits.max_selectors} allowed")
    return tuple(selectors.parse(text, _STARTS) for text in texts)


def _start_captures(starts: Sequence[selectors.Selector], aggregation: Aggregation | None) -> tuple[Capture, ...]:
    """Return what is to be kept of a start."""
    if aggregation is None:
        lists = {selector.captures or () for selector in starts}
        if len(lists) > 1:
            raise InvalidArgumentError(_STARTS, "the capture lists of all starts must be the same")
        return next(iter(lists))
    check_no_captures(starts, _STARTS)
    subjects = ((each, each.subject) for each in aggregation.captures)
    return tuple(
        replace(each, subject=subject.index) for each, subject in subjects if isinstance(subject, StartArgument)
    )


def _key(texts: Sequence[str], find_cgroup: FindCgroup) -> tuple[KeySource, ...]:
    if len(texts) > _MAX_PARTS:
        raise InvalidArgumentError(_KEY, f"there are {len(texts)} parts; the limit is {_MAX_PARTS}")
    return tuple(_part(text, find_cgroup) for text in texts) or _OF_THREAD


def _part(text: str, find_cgroup: FindCgroup) -> KeySource:
    part = parse_key(text, find_cgroup, _KEY)
    if isinstance(part, ExpressionSource):
        raise InvalidArgumentError(_KEY, f"{text} is computed, and a key is an argument or a field", 0, text)
    if part in SITE_FIELDS or (isinstance(part, Capture) and is_of_pair(part)):
        raise InvalidArgumentError(_KEY, f"{text} is not the same at both ends of a span")
    return part
