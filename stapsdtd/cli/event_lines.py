"""Events as lines of columns, for people.

    14:03:07.123456  postgres          1234/1240   2  postgresql:query__start  "SELECT 1" 42
    14:03:07.123461  postgres               1234   0  postgresql:sort__done@tuplesort_end:0x3f6e21  0 7
    14:03:07.123466  java                   4711   1  hotspot:class__loaded  class="java/lang/Object" shared=true

Sites of one probe are told apart by the function and the offset in the file, or by the file if there are several.
Arguments have names where the selector left it to their signature, or used these names. Where the terminal is too
narrow, columns are left out, the least important one first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from stapsdtd.cli.named_values import Named, readable
from stapsdtd.cli.render import Clock, format_value, is_address, paint
from stapsdtd.client.messages import ALL_AVAILABLE
from stapsdtd.runtime.text import escape
from stapsdtd.signatures import Declared, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stapsdtd.cli.named_values import ArgumentNames
    from stapsdtd.client import DescribedSite, EventBatch, EventBlock, SiteStatus, Value

_GAP = "  "
_ELAPSED = Named(Declared("elapsed", Kind.DURATION, "duration(ns)", unit_ns=1), None, is_length=False)
_FEWEST_FOR_VALUES = 24
"""Characters of a line that values longer than the terminal get at least."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """How a site's events are shown. hexadecimal: the positions of numbers shown so. labels: of values, by position.

    named: what is known of values. A length is left out, since the string that it belongs to shows it.
    """

    probe: str
    hexadecimal: frozenset[int]
    labels: Mapping[int, str]
    named: Mapping[int, Named]

    def values(self, values: Iterable[Value], unavailable: Mapping[int, str]) -> str:
        return " ".join(
            [
                self.labels.get(position, "") + self._value(position, value, unavailable)
                for position, value in enumerate(values)
                if position not in self.named or not self.named[position].is_length
            ]
        )

    def _value(self, position: int, value: Value, unavailable: Mapping[int, str]) -> str:
        named = self.named.get(position)
        meant = readable(named.declared, value) if named and position not in self.hexadecimal else None
        if meant is not None:
            return escape(meant)
        return format_value(value, unavailable.get(position, ""), is_hexadecimal=position in self.hexadecimal)


class EventLines:
    def __init__(self, names: ArgumentNames | None = None, *, color: bool) -> None:
        self._names = names
        self._color = color
        self._clock = Clock()
        self._places: dict[tuple[str, str], set[tuple[str, int]]] = {}
        self._shown: dict[int, _Shown] = {}
        self._probe_width = 0
        self._width: int | None = None
        self._left_out = 0

    def add_sites(self, sites: Iterable[SiteStatus]) -> None:
        """Take note of sites that may fire."""
        for site in sites:
            self._places.setdefault((site.provider, site.name), set()).add((site.path, site.offset))
        self._shown.clear()

    def format(self, batch: EventBatch, width: int | None) -> list[str]:
        """Return a line for each event, in order of seq. width: the terminal's, None for as wide as need be."""
        if width != self._width:
            self._width, self._left_out = width, 0
        return batch.in_order(self._block)

    def _block(self, block: EventBlock) -> Iterator[str]:
        rows = zip(
            block.time_ns,
            block.comm,
            block.pid,
            block.tid,
            block.cpu,
            block.site_id,
            zip(*block.values, strict=True) if block.values else repeat((), block.count),
            block.unavailable or repeat(ALL_AVAILABLE, block.count),
            strict=True,
        )
        for time_ns, comm, pid, tid, cpu, site_id, values, unavailable in rows:
            shown = self._shown.get(site_id) or self._show(block.sites[site_id])
            # in the order in which they are left out
            columns = [
                f"{cpu:>3}",
                f"{escape(comm):<15}",
                f"{pid if tid == pid else f'{pid}/{tid}':>13}",
                self._clock.format(time_ns),
            ]
            yield self._line(columns, shown.probe, shown.values(values, unavailable))

    def _line(self, columns: list[str], probe: str, values: str) -> str:
        self._probe_width = max(self._probe_width, len(probe))
        if self._width is not None:
            self._leave_out(columns, self._width - self._probe_width - 2 * len(_GAP), len(values))
        cpu, comm, thread, clock = ("" if index < self._left_out else cell for index, cell in enumerate(columns))
        name = f"{probe:<{self._probe_width}}"
        cells = (paint(clock, "dim", color=self._color), comm, thread, cpu, paint(name, "cyan", color=self._color))
        return _GAP.join([*filter(None, cells), values]).rstrip()

    def _leave_out(self, columns: list[str], room: int, length: int) -> None:
        """Leave out more columns, the time excepted, if the values fit into the line only without them.

        room: for the values and the columns, each with a gap.
        """
        fewest = len(columns[-1])
        needed = length if length + fewest <= room else _FEWEST_FOR_VALUES
        while (
            self._left_out < len(columns) - 1
            and sum(len(cell) + len(_GAP) for cell in columns[self._left_out :]) - len(_GAP) + needed > room
        ):
            self._left_out += 1

    def _show(self, described: DescribedSite) -> _Shown:
        probe, site = described.probe, described.site
        named = {at: _ELAPSED for at, capture in enumerate(described.captures) if capture.field == "elapsed"}
        named |= self._names.at(described) if self._names else {}
        hexadecimal = (
            position
            for position in range(len(described.captures))
            if _is_hexadecimal(described, position, named.get(position))
        )
        labels = {at: _label(capture.field) for at, capture in enumerate(described.captures) if capture.field}
        labels |= {at: f"{each.declared.name}=" for at, each in named.items()}
        name = f"{probe.provider}:{probe.name}{self._place(described)}"
        return self._shown.setdefault(site.site_id, _Shown(escape(name), frozenset(hexadecimal), labels, named))

    def _place(self, described: DescribedSite) -> str:
        """Return what tells the site from others of its probe: `@postgres`, `@exec_simple_query:0x1234`, or nothing."""
        probe, site = described.probe, described.site
        places = self._places.get((probe.provider, probe.name), set())
        paths = {path for path, _ in places} | {probe.path}
        parts = []
        if len(paths) > 1:
            is_unique = sum(os.path.basename(path) == os.path.basename(probe.path) for path in paths) == 1
            parts.append(probe.module if is_unique else probe.path)
        if any(path == probe.path and offset != site.offset for path, offset in places):
            parts += [*([site.function] if site.function else []), f"{site.offset:#x}"]
        return f"@{':'.join(parts)}" if parts else ""


def _label(field: str) -> str:
    return f"{field}=" if field.isidentifier() else f"({field})="


def _is_hexadecimal(described: DescribedSite, position: int, named: Named | None) -> bool:
    capture, arguments = described.captures[position], described.site.arguments
    if capture.is_hex:
        return True
    if named is not None:
        # a string that a glob of unknown probes has not fetched is an address, too
        return named.declared.kind in {Kind.POINTER, Kind.STRING}
    is_own = not capture.field and not capture.of_start
    return is_own and capture.index < len(arguments) and is_address(arguments[capture.index])
