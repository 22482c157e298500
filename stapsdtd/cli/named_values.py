"""Values of events by their arguments' names: strings cut at their length, enums and flags by name.

A string that is not terminated, as the JVM's are, was fetched up to the first NUL behind it or to the limit of its
capture, and its length with it. Here it is cut.
"""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import parse
from stapsdtd.cli.signature_captures import named_probe
from stapsdtd.client import EventBatch
from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.client import CapturedArgument, DescribedSite, EventBlock, Snapshot, Value
    from stapsdtd.signatures import Declared

_ESCAPED_BYTE = re.compile(r"\\x[89a-f][0-9a-f]|.", re.DOTALL)
"""As the client decodes a byte that is not UTF-8, or any character."""
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))


@dataclass(frozen=True, slots=True)
class Named:
    """One value of an event. cut_by: the position of its length. is_length: another value is cut by it."""

    declared: Declared
    cut_by: int | None
    is_length: bool


class ArgumentNames:
    """Knows the values' names at sites that some selectors match, as long as their signatures fit there."""

    def __init__(self, known: Known, selectors: Iterable[str], start: tuple[str, str] | None = None) -> None:
        """start: the probe that begins spans, if its arguments have names."""
        self._known = known
        self._selectors = [parse(text) for text in selectors]
        # of which nothing but its name is known here, so that versions must not differ
        declared = [signature.arguments for signature in known.of(*start)] if start else []
        self._of_start = declared[0] if declared and all(each == declared[0] for each in declared) else None
        self._named: dict[int, Mapping[int, Named]] = {}

    def at(self, described: DescribedSite) -> Mapping[int, Named]:
        """Return what is known of a site's values, by their position."""
        site_id = described.site.site_id
        if site_id not in self._named:
            self._named[site_id] = self._look_up(described)
        return self._named[site_id]

    def _look_up(self, described: DescribedSite) -> Mapping[int, Named]:
        named = self.of_start(described.captures)
        probe = described.probe
        if not any(each.matches_provider(probe.provider) and each.matches_name(probe.name) for each in self._selectors):
            return named
        signature = self._known.fit_in(named_probe(probe), probe, (described.site,)).signature
        self._known.tell_contradictions()
        return _named(signature.arguments if signature else None, described.captures, of_start=False) | named

    def of_start(self, captures: Sequence[CapturedArgument]) -> dict[int, Named]:
        """Return what is known of the values among some that are arguments of a span's start, by their position."""
        return _named(self._of_start, captures, of_start=True)

    def cut(self, batch: EventBatch) -> EventBatch:
        """Return the events with strings cut at their lengths."""
        blocks = tuple(map(self._cut_block, batch.blocks))
        return batch if blocks == batch.blocks else EventBatch(blocks)

    def _cut_block(self, block: EventBlock) -> EventBlock:
        cuts: dict[int, dict[int, int]] = {}
        for site_id in set(block.site_id):
            for position, named in self.at(block.sites[site_id]).items():
                if named.cut_by is not None:
                    cuts.setdefault(position, {})[site_id] = named.cut_by
        if not cuts:
            return block
        columns = list(block.values)
        for position, by_site in cuts.items():
            columns[position] = [
                cut_at(value, block.values[by_site[site_id]][row]) if site_id in by_site else value
                for row, (value, site_id) in enumerate(zip(block.values[position], block.site_id, strict=True))
            ]
        return replace(block, values=tuple(columns))


def _named(
    arguments: tuple[Declared, ...] | None, captured: Sequence[CapturedArgument], *, of_start: bool
) -> dict[int, Named]:
    """Return what is known of the values that are arguments of a site, or of the start of the spans that it ends."""
    captures = {
        at: capture
        for at, capture in enumerate(captured)
        if arguments is not None
        and not capture.field
        and capture.of_start is of_start
        and capture.index < len(arguments)
    }
    declared = {at: (arguments or ())[capture.index] for at, capture in captures.items()}
    positions = {each.name: at for at, each in declared.items()}
    strings = {at for at, capture in captures.items() if capture.is_string}
    lengths = {declared[at].length for at in strings}
    return {
        at: Named(
            replace(each, name=f"start.{each.name}") if of_start else each,
            positions.get(each.length) if at in strings else None,
            each.name in lengths,
        )
        for at, each in declared.items()
    }


def cut_at(value: Value, length: Value) -> Value:
    """Return the first length bytes of a string, as far as it was fetched."""
    if not isinstance(value, str) or not isinstance(length, int) or length < 0:
        return value
    if value.isascii() and "\\x" not in value:
        # one that ends here was not cut by its length
        return value if length > len(value) else value[:length]
    end = room = 0
    for match in _ESCAPED_BYTE.finditer(value):
        room += 1 if len(match[0]) > 1 else len(match[0].encode("utf-8", "surrogatepass"))
        if room > length:
            break
        end = match.end()
    return value if length > room else value[:end]


def meaning(declared: Declared, value: Value) -> Value | bool:
    """Return what a value means: true or false, an enum's name, flags' names; otherwise the value."""
    if not isinstance(value, int):
        return value
    if declared.kind is Kind.BOOL and value in {0, 1}:
        return bool(value)
    if declared.kind is Kind.ENUM:
        return declared.labels.get(value, value)
    if declared.kind is Kind.FLAGS and value > 0:
        rest = value & ~functools.reduce(operator.or_, declared.labels, 0)
        named = [label for bits, label in declared.labels.items() if bits and value & bits == bits]
        return "|".join(named + ([hex(rest)] if rest else []))
    return value


def with_meanings(snapshot: Snapshot, meanings: Sequence[Declared | None]) -> Snapshot:
    """Return a snapshot whose keys are what their values mean. meanings: of each part, as far as they are known."""
    return replace(
        snapshot,
        rows=tuple(
            replace(
                row,
                key=tuple(
                    part if declared is None else meaning(declared, part)
                    for part, declared in zip(row.key, meanings, strict=True)
                ),
            )
            for row in snapshot.rows
        ),
    )


def readable(declared: Declared, value: Value) -> str | None:
    """Return a value as people read it; None if it is read as it is."""
    meant = meaning(declared, value)
    if isinstance(meant, bool):
        return str(meant).lower()
    if isinstance(meant, str) and isinstance(value, int):
        return meant
    if declared.kind is Kind.DURATION and isinstance(value, int) and value > 0:
        time_ns = value * declared.unit_ns
        size, unit = next((size, unit) for size, unit in _UNITS if time_ns >= size)
        return f"{time_ns / size:.6g}{unit}"
    return None
