"""Checks the clauses of a request. Functions raise InvalidArgumentError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.api.aggregations import parse_aggregation
from stapsdtd.api.chains import parse_chain
from stapsdtd.api.spans import divided, is_of_pairs, parse_span
from stapsdtd.api.texts import RequestTexts
from stapsdtd.catalog.selectors import Selector
from stapsdtd.config.request_limits import MAX_CLAUSES, MAX_FIELDS, MAX_TAG_BYTES
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import BuiltIn
from stapsdtd.query import expression
from stapsdtd.query.expression import Cgroup, Condition
from stapsdtd.query.parse import column_of
from stapsdtd.query.scope import combined
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.sessions.fields import ComputedField, Field
from stapsdtd.sessions.spec import ClauseSpec, SpanSpec
from stapsdtd.spans.span import is_of_pair
from stapsdtd.v1 import stapsdt_pb2 as pb

_BUILT_INS = {each.value: each for each in BuiltIn if each is not BuiltIn.ELAPSED}
_Required = tuple[Condition | None, Condition | None]
"""What is required of a hit, by the scope too, and of the pair that it is part of."""
_SHORT_FORM = ("selectors", "where", "fields", "aggregation", "span")


@dataclass(frozen=True, slots=True)
class OfScope:
    """What a scope requires of each hit."""

    uids: Sequence[int]
    execnames: Sequence[bytes]
    cgroups: Sequence[Cgroup]
    containers: Sequence[Cgroup]

    def and_also(self, where: Condition | None) -> Condition | None:
        return combined(where, self.uids, self.execnames, self.cgroups, self.containers)


def parse_clauses(request: pb.SubscribeRequest, texts: RequestTexts, of_scope: OfScope) -> tuple[ClauseSpec, ...]:
    """Return the clauses of a request, or the one that its own fields are the short form of."""
    parser = _ClauseParser(texts, of_scope, request.functions)
    if not request.clauses:
        return (parser.parse(_short_form(request)),)
    if given := [name for name in _SHORT_FORM if _is_set(request, name)]:
        raise InvalidArgumentError(given[0], "with clauses, it is said in each of them")
    if len(request.clauses) > MAX_CLAUSES:
        raise InvalidArgumentError("clauses", f"there are {len(request.clauses)}; the limit is {MAX_CLAUSES}")
    tags: set[str] = set()
    parsed: list[ClauseSpec] = []
    for position, clause in enumerate(request.clauses):
        try:
            _check_tag(clause.tag, tags)
            parsed.append(parser.parse(clause))
        except InvalidArgumentError as error:
            raise error.within(f"clauses[{position}]") from None
        tags.add(clause.tag)
    return tuple(parsed)


def _is_set(request: pb.SubscribeRequest, name: str) -> bool:
    return any(field.name == name for field, _ in request.ListFields())


def _short_form(request: pb.SubscribeRequest) -> pb.Clause:
    return pb.Clause(
        selectors=request.selectors,
        where=request.where,
        fields=request.fields,
        aggregation=request.aggregation if request.HasField("aggregation") else None,
        span=request.span if request.HasField("span") else None,
    )


def _check_tag(tag: str, others: set[str]) -> None:
    if len(tag.encode()) > MAX_TAG_BYTES:
        raise InvalidArgumentError("tag", f"it is limited to {MAX_TAG_BYTES} bytes")
    if tag in others:
        raise InvalidArgumentError("tag", f"another clause is {tag!r}, too")


class _ClauseParser:
    """Of one request. What clauses have in common is made of its text once."""

    def __init__(self, texts: RequestTexts, of_scope: OfScope, functions: Sequence[str]) -> None:
        self._texts = texts
        self._of_scope = of_scope
        self._functions = functions
        self._of_all = of_scope.and_also(None)

    def parse(self, clause: pb.Clause) -> ClauseSpec:
        if not clause.selectors:
            raise InvalidArgumentError("selectors", "at least one is needed, such as postgresql:query__start")
        parsed = self._texts.selectors(clause.selectors)
        aggregation = parse_aggregation(clause, parsed, self._texts.expressions)
        if clause.HasField("span"):
            of_hits, span = self._span(clause, parsed, aggregation)
        else:
            self._check_no_pairs("where", clause.where, "elapsed is the time of a span, and the request has none")
            (of_hits, _), span = self._required("where", clause.where, self._of_hits), None
        return ClauseSpec(
            parsed,
            clause.where,
            of_hits,
            fields=self._fields(clause.fields, in_span=span is not None),
            aggregation=aggregation,
            span=span,
            chain=parse_chain(clause, self._functions),
            tag=clause.tag,
        )

    def _span(
        self, clause: pb.Clause, ends: Sequence[Selector], aggregation: Aggregation | None
    ) -> tuple[Condition | None, SpanSpec]:
        """Return what is required of a hit to be an end, and the span.

        A filter does not change which start an end belongs to, unless it is to say which hits are starts and ends, as a
        D program does. An entry of a kernel function belongs to its return anyway.
        """
        span, starts = parse_span(clause.span, self._texts, ends=ends, aggregation=aggregation)
        chooses = clause.span.filters_choose
        of_end, pair_predicate = self._required("where", clause.where, self._divided if chooses else self._of_pair)
        of_starts = self._of_hits if chooses or span.is_of_calls else self._of_pair
        start_where = clause.span.start_where
        self._check_no_pairs("span.start_where", start_where, "elapsed is not known yet when a span begins")
        of_start, start_predicate = self._required("span.start_where", start_where, of_starts)
        report_open_ns = clause.span.report_open_ms * 1_000_000
        return of_end, SpanSpec(span, starts, of_start, start_predicate, pair_predicate, report_open_ns)

    def _required(self, field: str, text: str, requirements: Callable[[Condition], _Required]) -> _Required:
        """Return what a condition and the scope require. requirements: of the condition; see `_Required`."""
        return self._texts.expressions.condition(text, field, requirements) if text.strip() else (self._of_all, None)

    def _check_no_pairs(self, field: str, text: str, reason: str) -> None:
        if text.strip() and self._texts.expressions.condition(text, field, is_of_pairs):
            raise InvalidArgumentError(field, reason, column_of(expression.Field.ELAPSED.value, text), text)

    def _of_hits(self, where: Condition) -> _Required:
        return self._of_scope.and_also(where), None

    def _divided(self, where: Condition) -> _Required:
        of_hits, of_pairs = divided(where)
        return self._of_scope.and_also(of_hits), of_pairs

    def _of_pair(self, where: Condition) -> _Required:
        # for its limit
        self._of_scope.and_also(where)
        return self._of_all, where

    def _fields(self, texts: Sequence[str], *, in_span: bool) -> tuple[Field, ...]:
        if len(texts) > MAX_FIELDS:
            raise InvalidArgumentError("fields", f"there are {len(texts)}; the limit is {MAX_FIELDS}")
        return tuple(self._field(text, in_span=in_span) for text in dict.fromkeys(map(str.strip, texts)))

    def _field(self, text: str, *, in_span: bool) -> Field:
        if text in _BUILT_INS:
            return _BUILT_INS[text]
        source = self._texts.expressions.value(text, "fields", ExpressionSource)
        if not in_span and any(map(is_of_pair, source.captures)):
            raise InvalidArgumentError("fields", f"{text} is known of spans alone, and the request has none", 0, text)
        return ComputedField(text, source)
