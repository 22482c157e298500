"""Builds protobuf requests from the arguments of the client's methods."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, TypeAlias

from stapsdtd.client.errors import InvalidAggregateError
from stapsdtd.subscribe_options import Scope
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stapsdtd.subscribe_options import Aggregate, Clause, Span, SubscribeOptions

Selectors: TypeAlias = "str | Iterable[str]"

CHANNEL_OPTIONS = (
    # Proxies from the environment are meant for the web.
    ("grpc.enable_http_proxy", 0),
    # All probes of a host can exceed gRPC's default of 4 MB.
    ("grpc.max_receive_message_length", 256 << 20),
    # Find a restarted server at once; by default gRPC backs off for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name, the connect timeout. Socket activation (systemd/stapsdtd.socket) starts the daemon first.
    ("grpc.min_reconnect_backoff_ms", 20_000),
)

_MAX_SHOWN_CHARACTERS = 80
_WEIGHTS = ("values", "sum", "avg")
"""The functions that say what a deviation weighs, and all but the last one what an average does."""


def shortened(selectors: Iterable[str]) -> str:
    """Return selectors as one text that is short enough for an error message."""
    text = " ".join(selectors)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def list_request(
    selectors: Selectors,
    pids: Iterable[int],
    *,
    containers: Iterable[str],
    cgroups: Iterable[str],
    files: Iterable[str],
    installed: bool = False,
    details: bool = False,
    problems: bool = False,
    moved: bool = False,
    without_probes: bool = False,
) -> pb.ListProbesRequest:
    return pb.ListProbesRequest(
        selectors=_as_iterable(selectors),
        pids=pids,
        containers=containers,
        cgroups=cgroups,
        files=files,
        installed=installed,
        details=details,
        problems=problems,
        moved=moved,
        without_probes=without_probes,
    )


def watch_request(
    selectors: Selectors, pids: Iterable[int], *, containers: Iterable[str], cgroups: Iterable[str]
) -> pb.WatchProbesRequest:
    return pb.WatchProbesRequest(selectors=_as_iterable(selectors), pids=pids, containers=containers, cgroups=cgroups)


def subscribe_request(selectors: Selectors, options: SubscribeOptions, span: Span | None = None) -> pb.SubscribeRequest:
    values = asdict(options)
    scope = pb.Scope(**{field.name: values.pop(field.name) for field in fields(Scope)})
    return pb.SubscribeRequest(selectors=_as_iterable(selectors), scope=scope, span=_span(span), **values)


def clauses_request(clauses: Iterable[Clause], options: SubscribeOptions) -> pb.SubscribeRequest:
    """Raises InvalidAggregateError."""
    request = subscribe_request((), options)
    request.clauses.extend(
        pb.Clause(
            tag=clause.tag,
            selectors=_as_iterable(clause.selectors),
            where=clause.where,
            fields=clause.fields,
            aggregation=None if clause.aggregate is None else _aggregation(clause.aggregate),
            span=_span(clause.span),
            chain=clause.chain,
        )
        for clause in clauses
    )
    return request


def selectors_of(request: pb.SubscribeRequest) -> list[str]:
    """Return the selectors of all clauses."""
    return [*request.selectors, *(selector for clause in request.clauses for selector in clause.selectors)]


def _span(span: Span | None) -> pb.Span | None:
    return None if span is None else pb.Span(**asdict(span))


def aggregate_request(
    selectors: Selectors, aggregate: Aggregate, options: SubscribeOptions, span: Span | None = None
) -> pb.SubscribeRequest:
    """Raises InvalidAggregateError."""
    request = subscribe_request(selectors, options, span)
    request.aggregation.CopyFrom(_aggregation(aggregate))
    return request


def _aggregation(aggregate: Aggregate) -> pb.Aggregation:
    values = asdict(aggregate) | {"functions": map(_function, functions_of(aggregate))}
    return pb.Aggregation(**values)


def functions_of(aggregate: Aggregate) -> tuple[str, ...]:
    """Return the functions to ask for: also those without which later hits could not be added, after a restart."""
    return to_join(aggregate.functions) if aggregate.cumulative else tuple(aggregate.functions)


def to_join(functions: Sequence[str]) -> tuple[str, ...]:
    """Return functions whose rows can be joined: an average alone does not say what it weighs."""
    weights = _WEIGHTS if "stddev" in functions else _WEIGHTS[:-1] if "avg" in functions else ()
    return (*functions, *(each for each in weights if each not in functions))


def _function(text: str) -> pb.AggregateFunction:
    name, _, rest = text.partition("(")
    known = {
        each.removeprefix("FUNCTION_").lower(): number
        for each, number in pb.AggregateFunction.Function.items()
        if number
    }
    parameters = rest.strip().removesuffix(")").split(",") if rest else []
    try:
        return pb.AggregateFunction(function=known[name.strip()], parameters=[int(each, 0) for each in parameters])
    except KeyError:
        raise InvalidAggregateError(f"there is no function {name.strip()}; there are {', '.join(known)}") from None
    except ValueError:
        raise InvalidAggregateError(f"{text}: the parameters must be integers of 64 bits") from None


def stream_request(subscription_id: str, positions: Mapping[str, int]) -> pb.StreamRequest:
    """Always ask for columns: building events from them is faster than decoding events one by one.

    positions: the first number to send of each clause, by tag.
    """
    request = pb.StreamRequest(subscription_id=subscription_id, encoding=pb.StreamRequest.ENCODING_COLUMNS)
    if positions.keys() == {""}:
        request.from_seq = positions[""]
    else:
        request.positions.update(positions)
    return request


def unsubscribe_request(subscription_id: str) -> pb.UnsubscribeRequest:
    return pb.UnsubscribeRequest(subscription_id=subscription_id)


def _as_iterable(selectors: Selectors) -> Iterable[str]:
    # A single string would otherwise be iterated by character.
    return [selectors] if isinstance(selectors, str) else selectors
