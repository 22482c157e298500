"""Checks what a request wants to have computed. Functions raise InvalidArgumentError."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, Function, HitField, KeySource
from stapsdtd.aggregate.buckets import FINE, POWERS_OF_TWO, Buckets, linear, log_linear
from stapsdtd.catalog.selector_text import head_of
from stapsdtd.catalog.selectors import Selector, parse_capture
from stapsdtd.config.request_limits import MAX_KEYS
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import Capture
from stapsdtd.query.expression import Expression
from stapsdtd.query.parse import Expressions, check_length
from stapsdtd.query.sources import ExpressionSource, key_source, value_source
from stapsdtd.spans.span import is_of_pair, of_start
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_KEYS = 10_000
_MIN_INTERVAL_MS = 10
_KEY_WORDS = 33
"""Of 8 bytes, which the kernel has for a key; see `capture.bpf.layout`."""
_MOST_KEY_BYTES, _LEAST_KEY_BYTES = 255, 64
"""Of a string that is a key and says no length."""
_ADDED_BYTES = 2
"""A NUL, and one that tells whether there is more."""
_BY, _VALUE = "aggregation.by", "aggregation.value"
_OF_START = re.compile(r"\s*start\s*\.")
_SHORT_FORM = re.compile(r"\s*arg\d+\s*:.*", re.DOTALL)
"""As in a capture list, `arg0:str`. An expression has a colon only behind a question mark."""

_FUNCTIONS = {
    pb.AggregateFunction.FUNCTION_COUNT: Function.COUNT,
    pb.AggregateFunction.FUNCTION_SUM: Function.SUM,
    pb.AggregateFunction.FUNCTION_MIN: Function.MIN,
    pb.AggregateFunction.FUNCTION_MAX: Function.MAX,
    pb.AggregateFunction.FUNCTION_AVG: Function.AVG,
    pb.AggregateFunction.FUNCTION_STDDEV: Function.STDDEV,
    pb.AggregateFunction.FUNCTION_VALUES: Function.VALUES,
}
_HISTOGRAMS: dict[int, tuple[int, Callable[[Sequence[int]], Buckets]]] = {
    pb.AggregateFunction.FUNCTION_QUANTIZE: (0, lambda _: POWERS_OF_TWO),
    pb.AggregateFunction.FUNCTION_LQUANTIZE: (3, lambda given: linear(*given)),
    pb.AggregateFunction.FUNCTION_LLQUANTIZE: (4, lambda given: log_linear(*given)),
    pb.AggregateFunction.FUNCTION_PERCENTILES: (0, lambda _: FINE),
}


def parse_aggregation(clause: pb.Clause, selectors: Sequence[Selector], expressions: Expressions) -> Aggregation | None:
    """Return what is to be computed; None if events are wanted."""
    if not clause.HasField("aggregation"):
        return None
    wanted = clause.aggregation
    check_no_captures(selectors, "selectors")
    if clause.fields:
        raise InvalidArgumentError("fields", "an aggregation has no events that could have them; use by")
    functions, buckets = _functions(wanted.functions)
    needs_value = functions != (Function.COUNT,)
    if needs_value != bool(wanted.value):
        reason = "say of which value, such as arg0" if needs_value else "count needs none"
        raise InvalidArgumentError(_VALUE, reason)
    if wanted.max_keys > _MAX_KEYS:
        raise InvalidArgumentError("aggregation.max_keys", f"{wanted.max_keys} is more than the {_MAX_KEYS} allowed")
    if 0 < wanted.interval_ms < _MIN_INTERVAL_MS:
        raise InvalidArgumentError("aggregation.interval_ms", f"it must be at least {_MIN_INTERVAL_MS}")
    return Aggregation(
        functions,
        _keys(wanted.by, expressions, in_span=clause.HasField("span")),
        _value(wanted.value, expressions, in_span=clause.HasField("span")) if needs_value else None,
        buckets,
        max_keys=wanted.max_keys or _MAX_KEYS,
        is_cumulative=wanted.cumulative,
        interval_ms=wanted.interval_ms,
    )


def check_no_captures(selectors: Sequence[Selector], field: str) -> None:
    for selector in selectors:
        if selector.captures is not None:
            reason, text = "an aggregation has no use for a capture list", selector.text
            raise InvalidArgumentError(field, f"{text}: {reason}", len(head_of(text)), text)


def _functions(wanted: Sequence[pb.AggregateFunction]) -> tuple[tuple[Function, ...], Buckets | None]:
    field = "aggregation.functions"
    if not wanted:
        raise InvalidArgumentError(field, "at least one is needed")
    functions: list[Function] = []
    buckets: Buckets | None = None
    for each in wanted:
        if each.function in _FUNCTIONS:
            function, count = _FUNCTIONS[each.function], 0
        elif each.function in _HISTOGRAMS:
            function, (count, _) = Function.HISTOGRAM, _HISTOGRAMS[each.function]
        else:
            raise InvalidArgumentError(field, f"there is no function {each.function}", value=each)
        name = pb.AggregateFunction.Function.Name(each.function).removeprefix("FUNCTION_").lower()
        if len(each.parameters) != count:
            reason = f"{name} has {count} parameters, not {len(each.parameters)}"
            raise InvalidArgumentError(field, reason, value=each)
        if function in functions:
            kind = "one histogram" if function is Function.HISTOGRAM else f"one {name}"
            raise InvalidArgumentError(field, f"only {kind} is possible", value=each)
        functions.append(function)
        if function is Function.HISTOGRAM:
            try:
                buckets = _HISTOGRAMS[each.function][1](each.parameters)
            except ValueError as error:
                raise InvalidArgumentError(field, f"{name}: {error}", value=each) from None
    return tuple(functions), buckets


def _keys(texts: Sequence[str], expressions: Expressions, *, in_span: bool) -> tuple[KeySource | ExpressionSource, ...]:
    if len(texts) > MAX_KEYS:
        raise InvalidArgumentError(_BY, f"there are {len(texts)} keys; the limit is {MAX_KEYS}")
    keys = tuple(parse_key(text, expressions, _BY) for text in texts)
    for key, text in zip(keys, texts, strict=True):
        _check_pair(key, text, _BY, in_span=in_span)
    return _with_lengths(keys)


def _with_lengths(keys: tuple[KeySource | ExpressionSource, ...]) -> tuple[KeySource | ExpressionSource, ...]:
    """Have strings that say no length share the room that the others leave."""
    sharing = [key for key in keys if isinstance(key, Capture) and key.is_string and key.max_bytes is None]
    if not sharing:
        return keys
    words = (_KEY_WORDS - sum(map(_words, keys))) // len(sharing)
    most = min(max(8 * words - _ADDED_BYTES, _LEAST_KEY_BYTES), _MOST_KEY_BYTES)
    return tuple(replace(key, max_bytes=most) if isinstance(key, Capture) and key in sharing else key for key in keys)


def _words(key: KeySource | ExpressionSource) -> int:
    """Return how many words of the kernel's key a part takes, 0 for a string that says no length."""
    if isinstance(key, HitField):
        return 0 if key in SITE_FIELDS else 2 if key is HitField.EXECNAME else 1
    if not isinstance(key, Capture) or not key.is_pointed_to:
        return 1
    return -(-(key.max_bytes + _ADDED_BYTES * key.is_string) // 8) if key.max_bytes else 0


def _check_pair(source: KeySource | ExpressionSource, text: str, field: str, *, in_span: bool) -> None:
    captures = [] if isinstance(source, HitField) else [source] if isinstance(source, Capture) else source.captures
    if not in_span and any(map(is_of_pair, captures)):
        raise InvalidArgumentError(field, f"{text} is known of spans alone, and the request has none", 0, text)


def parse_key(text: str, expressions: Expressions, field: str) -> KeySource | ExpressionSource:
    """Parse a part of a key. field: of the request."""
    check_length(text, field)
    if before := _OF_START.match(text):
        return of_start(_capture(text, before.end(), field))
    if not _SHORT_FORM.fullmatch(text):
        return expressions.value(text, field, _key)
    return _capture(text, 0, field)


def _key(expression: Expression) -> KeySource | ExpressionSource:
    return key_source(expression, _MOST_KEY_BYTES)


def _value(text: str, expressions: Expressions, *, in_span: bool) -> Capture | ExpressionSource:
    check_length(text, _VALUE)
    before = _OF_START.match(text)
    if before or _SHORT_FORM.fullmatch(text):
        capture = _capture(text, before.end() if before else 0, _VALUE)
        if capture.is_pointed_to:
            kind = "a string" if capture.is_string else "bytes"
            raise InvalidArgumentError(_VALUE, f"{text.strip()} is {kind}, and a number is needed", 0, text)
        value: Capture | ExpressionSource = of_start(capture) if before else capture
    else:
        value = expressions.number(text, _VALUE, value_source)
    _check_pair(value, text, _VALUE, in_span=in_span)
    return value


def _capture(text: str, begin: int, field: str) -> Capture:
    """begin: where in the text it is."""
    try:
        return parse_capture(text[begin:])
    except ValueError as error:
        raise InvalidArgumentError(field, str(error), begin, text) from None
