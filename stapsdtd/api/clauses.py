"""Checks the clauses of a request. Functions raise InvalidArgumentError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.api.aggregations import parse_aggregation
from stapsdtd.api.chains import parse_chain
from stapsdtd.api.spans import divided, parse_span
from stapsdtd.catalog import selectors
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import BuiltIn
from stapsdtd.query.expression import Cgroup, Condition
from stapsdtd.query.parse import parse, parse_value
from stapsdtd.query.scope import combined
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.query.tree_builder import FindCgroup
from stapsdtd.sessions.fields import ComputedField, Field
from stapsdtd.sessions.spec import ClauseSpec
from stapsdtd.spans.span import is_of_pair
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_CLAUSES = 32
_MAX_TAG_BYTES = 256
_MAX_FIELDS = 32
_BUILT_INS = {each.value: each for each in BuiltIn if each is not BuiltIn.ELAPSED}
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


def parse_selectors(texts: Sequence[str], limits: Limits) -> tuple[selectors.Selector, ...]:
    if len(texts) > limits.max_selectors:
        raise InvalidArgumentError("selectors", f"there are {len(texts)}, more than the {limits.max_selectors} allowed")
    return tuple(map(selectors.parse, texts))


def parse_clauses(
    request: pb.SubscribeRequest, limits: Limits, find_cgroup: FindCgroup, of_scope: OfScope
) -> tuple[ClauseSpec, ...]:
    """Return the clauses of a request, or the one that its own fields are the short form of."""
    if not request.clauses:
        return (_parse(_short_form(request), request.functions, limits, find_cgroup, of_scope),)
    if given := [name for name in _SHORT_FORM if _is_set(request, name)]:
        raise InvalidArgumentError(given[0], "with clauses, it is said in each of them")
    if len(request.clauses) > _MAX_CLAUSES:
        raise InvalidArgumentError("clauses", f"there are {len(request.clauses)}; the limit is {_MAX_CLAUSES}")
    if sum(len(clause.selectors) for clause in request.clauses) > limits.max_selectors:
        raise InvalidArgumentError("clauses", f"together they have more than {limits.max_selectors} selectors")
    tags: set[str] = set()
    parsed: list[ClauseSpec] = []
    for position, clause in enumerate(request.clauses):
        try:
            _check_tag(clause.tag, tags)
            parsed.append(_parse(clause, request.functions, limits, find_cgroup, of_scope))
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
    if tag in others:
        raise InvalidArgumentError("tag", f"another clause is {tag!r}, too")
    if len(tag.encode()) > _MAX_TAG_BYTES:
        raise InvalidArgumentError("tag", f"it is limited to {_MAX_TAG_BYTES} bytes")


def _parse(
    clause: pb.Clause, functions: Sequence[str], limits: Limits, find_cgroup: FindCgroup, of_scope: OfScope
) -> ClauseSpec:
    if not clause.selectors:
        raise InvalidArgumentError("selectors", "at least one is needed, such as postgresql:query__start")
    parsed = parse_selectors(clause.selectors, limits)
    of_hits, of_pairs = divided(parse(clause.where, find_cgroup) if clause.where.strip() else None)
    aggregation = parse_aggregation(clause, parsed, find_cgroup)
    return ClauseSpec(
        parsed,
        clause.where,
        of_scope.and_also(of_hits),
        fields=_parse_fields(clause.fields, find_cgroup, in_span=clause.HasField("span")),
        aggregation=aggregation,
        span=parse_span(
            clause,
            limits,
            find_cgroup,
            of_scope.and_also,
            ends=parsed,
            of_pairs=of_pairs,
            aggregation=aggregation,
        ),
        chain=parse_chain(clause, functions),
        tag=clause.tag,
    )


def _parse_fields(texts: Sequence[str], find_cgroup: FindCgroup, *, in_span: bool) -> tuple[Field, ...]:
    if len(texts) > _MAX_FIELDS:
        raise InvalidArgumentError("fields", f"there are {len(texts)}; the limit is {_MAX_FIELDS}")
    return tuple(_parse_field(text, find_cgroup, in_span=in_span) for text in dict.fromkeys(map(str.strip, texts)))


def _parse_field(text: str, find_cgroup: FindCgroup, *, in_span: bool) -> Field:
    if text in _BUILT_INS:
        return _BUILT_INS[text]
    source = ExpressionSource(parse_value(text, find_cgroup, "fields"))
    if not in_span and any(map(is_of_pair, source.captures)):
        raise InvalidArgumentError("fields", f"{text} is known of spans alone, and the request has none")
    return ComputedField(text, source)
