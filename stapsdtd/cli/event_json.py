"""Events as JSON, a line each, for `stapsdt trace --json`.

    {"seq": 1, "time_ns": 1700000000123456789, "monotonic_ns": 81234567890123, "pid": 1234, "tid": 1240, "cpu": 2,
     "comm": "postgres", "provider": "postgresql", "name": "query__start",
     "path": "/usr/lib/postgresql/15/bin/postgres", "module": "postgres", "function": "exec_simple_query",
     "offset": 3456789, "args": ["SELECT 1", 42], "uid": 108}

`monotonic_ns` is CLOCK_MONOTONIC of the server's host, and missing if an older server does not tell it.

Where arguments have names, `"named": {"query": "SELECT 1"}` follows args. Spans also have `"start_args"` and
`"elapsed"`, in nanoseconds. `"truncated": ["query"]` names strings of which there was more.

More than a million events a second have to be formatted. So this works on columns, with one call per event of a
template's `%`, and looks up what is the same for many events.
"""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import repeat
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, TypeVar, cast

from stapsdtd.cli.named_values import meaning
from stapsdtd.client import CutText
from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stapsdtd.cli.named_values import ArgumentNames, Named
    from stapsdtd.client import DescribedSite, EventBatch, EventBlock, Value
    from stapsdtd.signatures import Declared

_T = TypeVar("_T")
_WITH_MEANING = {Kind.BOOL, Kind.ENUM, Kind.FLAGS}


def json_lines(batch: EventBatch, names: ArgumentNames | None = None) -> list[str]:
    """Return the events as JSON objects, in order of seq."""
    return batch.in_order(partial(_block_lines, names))


def _block_lines(known: ArgumentNames | None, block: EventBlock) -> Iterable[str]:
    values = list(map(_value_column, block.values))
    named = ""
    named_columns: list[Iterable[object]] = []
    known_of = {site_id: known.at(block.sites[site_id]) for site_id in set(block.site_id)} if known else {}
    if any(known_of.values()):
        # they are read twice
        values = [list(column) for column in values]
        named, named_columns = _named_columns(block, known_of, values)
    names = block.fields
    count = len(values) - len(names)
    own = count - block.sites[block.site_id[0]].of_start if block.count else count
    columns: list[Iterable[object]] = [
        block.seq,
        block.time_ns,
        *([] if block.realtime_offset_ns is None else [cast("Sequence[int]", block.monotonic_ns)]),
        block.pid,
        block.tid,
        block.cpu,
        _mapped(encode_basestring_ascii, block.comm),
        _mapped(lambda site_id: _site(block.sites[site_id]), block.site_id),
        *values[:count],
        *named_columns,
        *values[count:],
    ]
    unavailable = ""
    if block.unavailable is not None:
        columns.append(_unavailable(reasons, count, names) for reasons in block.unavailable)
        unavailable = "%s"
    if block.cut:
        columns.append(_truncated(block, known_of))
        unavailable += "%s"
    arguments = ", ".join(["%s"] * own)
    of_start = f', "start_args": [{", ".join(["%s"] * (count - own))}]' if own < count else ""
    fields = "".join(f", {json.dumps(name)}: ".replace("%", "%%") + "%s" for name in names)
    monotonic = "" if block.realtime_offset_ns is None else ', "monotonic_ns": %s'
    line = (
        f'{{"seq": %s, "time_ns": %s{monotonic}, '
        '"pid": %s, "tid": %s, "cpu": %s, "comm": %s, %s, '
        f'"args": [{arguments}]{of_start}{named}{fields}{unavailable}}}'
    )
    return map(line.__mod__, zip(*columns, strict=True))


def _mapped(function: Callable[[_T], str], items: Sequence[_T]) -> Iterable[str]:
    """Return the function of each item, called once for each of the few distinct ones."""
    results = {item: function(item) for item in set(items)}
    if len(results) == 1:
        (result,) = results.values()
        return repeat(result, len(items))
    return map(results.__getitem__, items)


def _value_column(values: Sequence[Value]) -> Iterable[object]:
    # %s formats integers as fast as a list of them can be read
    kinds = set(map(type, values))
    if kinds == {int}:
        return values
    return map(cast("Callable[[Value], str]", encode_basestring_ascii) if kinds == {str} else _value, values)


def _value(value: Value) -> str:
    """Format a value as JSON: bytes in hexadecimal, `"nan"` and `"inf"` as strings, since JSON lacks such numbers."""
    match value:
        case None:
            return "null"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else f'"{value}"'
        case _:
            return encode_basestring_ascii(value.hex() if isinstance(value, bytes) else value)


def _named_columns(
    block: EventBlock, known_of: Mapping[int, Mapping[int, Named]], values: Sequence[Iterable[object]]
) -> tuple[str, list[Iterable[object]]]:
    """Return what to add to the template, and its columns: one for each name, or one if names differ between sites.

    known_of: what is known of each site's values. values: formatted.
    """
    known, *others = known_of.values()
    if any(other != known for other in others):
        rows = zip(*block.values, strict=True)
        return "%s", [(_named(known_of[site_id], row) for site_id, row in zip(block.site_id, rows, strict=True))]
    template = ", ".join(f'"{named.declared.name}": %s' for named in known.values())
    columns = [
        _mapped(partial(_meaning, named.declared), block.values[position])
        if named.declared.kind in _WITH_MEANING
        else values[position]
        for position, named in known.items()
    ]
    return f', "named": {{{template}}}', columns


def _named(known: Mapping[int, Named], values: Sequence[Value]) -> str:
    pairs = (f'"{named.declared.name}": {_meaning(named.declared, values[at])}' for at, named in known.items())
    return f', "named": {{{", ".join(pairs)}}}' if known else ""


def _meaning(declared: Declared, value: Value) -> str:
    meant = meaning(declared, value)
    return str(meant).lower() if isinstance(meant, bool) else _value(meant)


def _site(described: DescribedSite) -> str:
    probe, site = described.probe, described.site
    record = {
        "provider": probe.provider,
        "name": probe.name,
        "path": probe.path,
        "module": probe.module,
        "function": site.function,
        "offset": site.offset,
    }
    return json.dumps(record)[1:-1]


def _truncated(block: EventBlock, known_of: Mapping[int, Mapping[int, Named]]) -> Iterable[str]:
    """Yield for each event the names of the strings that were cut."""
    columns = {position: block.values[position] for position in block.cut}
    for row, site_id in enumerate(block.site_id):
        cut = [position for position, values in columns.items() if isinstance(values[row], CutText)]
        names = [_name(block.sites[site_id], known_of.get(site_id, {}), position) for position in cut]
        yield f', "truncated": {json.dumps(names)}' if names else ""


def _name(described: DescribedSite, known: Mapping[int, Named], position: int) -> str:
    if named := known.get(position):
        return named.declared.name
    capture = described.captures[position]
    return capture.field or f"{'start.' if capture.of_start else ''}arg{capture.index}"


def _unavailable(reasons: Mapping[int, str], arguments: int, names: Sequence[str]) -> str:
    """Name why values are missing, by the argument's index or the field."""
    by_name = {at if at < arguments else names[at - arguments]: reason for at, reason in reasons.items()}
    return f', "unavailable": {json.dumps(by_name)}' if reasons else ""
