"""Events as lines of columns, for people.

    14:03:07.123456  postgres          1234/1240   2  postgresql:query__start  "SELECT 1" 42
    14:03:07.123461  postgres               1234   0  postgresql:sort__done@tuplesort_end:0x3f6e21  0 7
    14:03:07.123466  java                   4711   1  hotspot:class__loaded  class="java/lang/Object" shared=true

Sites of one probe are told apart by the function and the offset in the file, or by the file if there are several.
Arguments have names where the selector left it to their signature, or used these names. Where the terminal is too
narrow, the CPU and the program's name are left out, and long values are cut.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from stapsdtd.catalog.selector_text import probe_name
from stapsdtd.cli.function_selectors import is_function
from stapsdtd.cli.named_values import Named, readable
from stapsdtd.cli.render import Clock, format_value, is_address, paint
from stapsdtd.client.messages import ALL_AVAILABLE
from stapsdtd.runtime.text import escape
from stapsdtd.signatures import Declared, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stapsdtd.cli.named_values import ArgumentNames
    from stapsdtd.client import CapturedArgument, DescribedSite, EventBatch, EventBlock, SiteStatus, Value

_GAP = "  "
_ELAPSED = Named(Declared("elapsed", Kind.DURATION, "duration(ns)", unit_ns=1), None, is_length=False)
_WIDTHS = (3, 15, 13, 15)
"""Of the columns for the CPU, the program's name, the thread and the time."""
_MAY_BE_LEFT_OUT = 2
_FEWEST_FOR_VALUES = 24
"""Characters of a line that are kept for values, if columns can be left out for them."""
_FEWEST_CHARACTERS = 24
"""Of a value that is cut. Where that does not suffice, the terminal wraps the line."""
_CUT = "…"


@dataclass(frozen=True, slots=True)
class _Shown:
    """How a site's events are shown. order: of the values' positions, without lengths, since the strings that they
    belong to show them. hexadecimal: the positions of numbers shown so. labels: of values, by position. named: what is
    known of values. of_end: of a start's values, the positions of the end's that are the same if they are equal.
    """

    probe: str
    order: tuple[int, ...]
    hexadecimal: frozenset[int]
    labels: Mapping[int, str]
    named: Mapping[int, Named]
    of_end: Mapping[int, int]

    def values(self, values: Sequence[Value], unavailable: Mapping[int, str]) -> list[str]:
        return [
            self.labels.get(position, "") + self._value(position, values[position], unavailable)
            for position in self.order
            if position not in self.of_end or values[position] != values[self.of_end[position]]
        ]

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
        self._layout: _Layout | None = None

    def add_sites(self, sites: Iterable[SiteStatus]) -> None:
        """Take note of sites that may fire."""
        for site in sites:
            self._places.setdefault((site.provider, site.name), set()).add((site.path, site.offset))
            self._probe_width = max(self._probe_width, len(escape(probe_name(site.provider, site.name))))
        self._shown.clear()

    def format(self, batch: EventBatch, width: int | None) -> list[str]:
        """Return a line for each event, in order of seq. width: the terminal's, None for as wide as need be."""
        if self._layout is None or self._layout.width != width:
            # once for a terminal's width: columns do not come and go with the lengths of values
            self._layout = _Layout.of(width, self._probe_width)
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

    def _line(self, columns: list[str], probe: str, values: list[str]) -> str:
        layout = self._layout or _Layout()
        self._probe_width = max(self._probe_width, len(probe))
        cpu, comm, thread, clock = (cell if shown else "" for cell, shown in zip(columns, layout.shown, strict=True))
        name = f"{probe:<{self._probe_width}}"
        plain = [cell for cell in (clock, comm, thread, cpu, name) if cell]
        text = " ".join(_fitting(values, layout.room(plain)))
        cells = (paint(clock, "dim", color=self._color), comm, thread, cpu, paint(name, "cyan", color=self._color))
        return _GAP.join([*filter(None, cells), text]).rstrip()

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
        labels |= {
            at: f"start.arg{capture.index}=" for at, capture in enumerate(described.captures) if capture.of_start
        }
        labels |= {at: f"{each.declared.name}=" for at, each in named.items()}
        name = f"{probe_name(probe.provider, probe.name)}{self._place(described)}"
        shown = _Shown(
            escape(name),
            _order(described.captures, named),
            frozenset(hexadecimal),
            labels,
            named,
            _equals(described.captures, named),
        )
        return self._shown.setdefault(site.site_id, shown)

    def _place(self, described: DescribedSite) -> str:
        """Return what tells the site from others of its probe: `@postgres`, `@exec_simple_query:0x1234`, or nothing.

        The probes of all kernel functions have the same names.
        """
        probe, site = described.probe, described.site
        places = self._places.get((probe.provider, probe.name), set())
        paths = {path for path, _ in places} | {probe.path}
        parts = []
        if len(paths) > 1:
            is_unique = sum(os.path.basename(path) == os.path.basename(probe.path) for path in paths) == 1
            parts.append(probe.module if is_unique else probe.path)
        if is_function(probe):
            parts.append(site.function or "")
        elif any(path == probe.path and offset != site.offset for path, offset in places):
            parts += [*([site.function] if site.function else []), f"{site.offset:#x}"]
        return f"@{':'.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which columns a terminal has room for.

    width: the terminal's; None for no limit. shown: of the CPU, the program's name, the thread and the time.
    """

    width: int | None = None
    shown: tuple[bool, ...] = (True,) * 4

    @classmethod
    def of(cls, width: int | None, probe_width: int) -> _Layout:
        """Leave out the CPU, and then the program's name, if values would have too little room."""
        if width is None:
            return cls()
        left_out = 0
        while left_out < _MAY_BE_LEFT_OUT:
            taken = sum(each + len(_GAP) for each in _WIDTHS[left_out:]) + probe_width + len(_GAP)
            if taken + _FEWEST_FOR_VALUES <= width:
                break
            left_out += 1
        return cls(width, tuple(position >= left_out for position in range(len(_WIDTHS))))

    def room(self, cells: Sequence[str]) -> int | None:
        """Return how many characters values may take behind the other columns; None for any number."""
        if self.width is None:
            return None
        return max(self.width - sum(len(cell) + len(_GAP) for cell in cells), _FEWEST_CHARACTERS)


def _fitting(values: list[str], room: int | None) -> list[str]:
    """Cut the longest values, each with a mark, until all of them fit."""
    if room is None:
        return values
    excess = sum(map(len, values)) + len(values) - 1 - room
    while excess > 0:
        longest = max(range(len(values)), key=lambda at: len(values[at]))
        second = max((len(each) for at, each in enumerate(values) if at != longest), default=0)
        length = max(len(values[longest]) - excess, second - 1, _FEWEST_CHARACTERS)
        if length >= len(values[longest]):
            break
        excess -= len(values[longest]) - length
        values[longest] = values[longest][: length - 1] + _CUT
    return values


def _order(captures: Sequence[CapturedArgument], named: Mapping[int, Named]) -> tuple[int, ...]:
    """Return the positions of values to show: the time elapsed first, which is not to be behind long texts."""
    shown = [at for at in range(len(captures)) if at not in named or not named[at].is_length]
    return tuple(sorted(shown, key=lambda at: captures[at].field != "elapsed"))


def _equals(captures: Sequence[CapturedArgument], named: Mapping[int, Named]) -> dict[int, int]:
    """Return for arguments of a start that have names where the end has an argument with the same name."""
    names = {at: (each.declared.name.removeprefix("start."), captures[at].is_hex) for at, each in named.items()}
    ends = {name: at for at, name in names.items() if not captures[at].of_start and not captures[at].field}
    return {at: ends[name] for at, name in names.items() if captures[at].of_start and name in ends}


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
