"""Calls of kernel functions, as lines of columns and as JSON.

TIME             CPU      PID      TID  FUNCTION
14:03:07.123456    1     4711     4711  vfs_read(file->f_pos = 0, count = 123)
14:03:07.123461    1     4711     4711  vfs_read = 123
14:03:07.123470    0     4711     4712  vfs_open(path->dentry = 0xffff888100b1c000) = -13 after 1.84 us
"""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from stapsdtd.cli.function_selectors import RETURN
from stapsdtd.cli.kernel_selectors import RESULT
from stapsdtd.cli.kernel_stacks import CallStacks
from stapsdtd.cli.kernel_values import json_of, text_of
from stapsdtd.cli.quantity import format_quantity
from stapsdtd.cli.render import Clock, format_value
from stapsdtd.query.byte_order import turned
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stapsdtd.cli.kernel_plan import Plan, Shown, Traced
    from stapsdtd.cli.kernel_selectors import TracedValue
    from stapsdtd.client import DescribedSite, EventBatch, EventBlock, Value

HEADER = f"{'TIME':<15}  {'CPU':>3}  {'PID':>7}  {'TID':>7}  FUNCTION"
_ELAPSED = "elapsed"


class _Row(NamedTuple):
    """An entry or a return. missing: why values are, by position."""

    traced: Traced
    time_ns: int
    monotonic_ns: int | None
    cpu: int
    pid: int
    tid: int
    site: DescribedSite
    values: Sequence[Value]
    missing: Mapping[int, str]


class FunctionLines:
    """shows_zeros: also members of structs that are zero. seen: how many entries and returns there were, shown or
    not.
    """

    def __init__(self, plan: Plan, *, shows_zeros: bool) -> None:
        self._traced = {(each.function.module, each.function.name): each for each in plan.traced}
        self._shows_zeros = shows_zeros
        self._clock = Clock()
        names = [each.function.name for each in plan.traced]
        awaited = [each.function.name for each in plan.traced if each.is_awaited]
        self._stacks: CallStacks[_Row] | None = CallStacks(names, awaited) if plan.is_stack else None
        self.seen = 0

    @property
    def forgotten(self) -> int:
        """Return of how many threads calls of a stack were forgotten."""
        return 0 if self._stacks is None else self._stacks.forgotten

    def lost(self) -> None:
        """Note that some entries or returns are missing."""
        if self._stacks is not None:
            self._stacks.forget()

    def text(self, batch: EventBatch) -> list[str]:
        return [self._line(row) for row in self._shown(batch)]

    def json(self, batch: EventBatch) -> list[str]:
        return [json.dumps(_record(row)) for row in self._shown(batch)]

    def _shown(self, batch: EventBatch) -> Iterable[_Row]:
        rows = batch.in_order(self._rows)
        self.seen += len(rows)
        return rows if self._stacks is None else chain.from_iterable(map(partial(_of_stack, self._stacks), rows))

    def _rows(self, block: EventBlock) -> Iterator[_Row]:
        monotonic_ns = block.monotonic_ns
        for at in range(block.count):
            site = block.sites[block.site_id[at]]
            yield _Row(
                self._traced[site.probe.path, site.site.function or ""],
                block.time_ns[at],
                monotonic_ns[at],
                block.cpu[at],
                block.pid[at],
                block.tid[at],
                site,
                [column[at] for column in block.values],
                block.unavailable[at] if block.unavailable else {},
            )

    def _line(self, row: _Row) -> str:
        return f"{self._clock.format(row.time_ns)}  {row.cpu:>3}  {row.pid:>7}  {row.tid:>7}  {self._call(row)}"

    def _call(self, row: _Row) -> str:
        traced = row.traced
        name = escape(traced.function.name)
        at_site, of_start, elapsed = _divided(row)
        if row.site.probe.name != RETURN:
            return f"{name}({self._list(traced.at_entry or (), at_site)})"
        called = f"{name}({self._list(traced.at_entry or (), of_start)})" if of_start else name
        returned = self._returned(traced.at_return or (), at_site)
        return f"{called}{returned}" + (f" after {format_quantity(elapsed, 'ns')}" if elapsed is not None else "")

    def _returned(self, shown: Sequence[Shown], values: Sequence[tuple[Value, str]]) -> str:
        """Return ` = 123`, or ` returned` where there is no result to show."""
        pairs = list(zip(shown, values, strict=True))
        result = next((self._value(each, *value) for each, value in pairs if each.wanted.path == RESULT), "")
        others = [pair for pair in pairs if pair[0].wanted.path != RESULT]
        listed = self._list([each for each, _ in others], [value for _, value in others])
        return (f" = {result}" if result else " returned") + (f" ({listed})" if listed else "")

    def _list(self, shown: Sequence[Shown], values: Sequence[tuple[Value, str]]) -> str:
        return ", ".join(
            f"{_label(each.wanted)} = {self._value(each, *value)}" for each, value in zip(shown, values, strict=True)
        )

    def _value(self, shown: Shown, value: Value, reason: str) -> str:
        value = _turned(shown, value)
        if value is None or isinstance(value, str | float) or shown.wanted.turned or shown.known.shape is None:
            return format_value(value, reason)
        return escape(text_of(shown.known.shape, value, shows_zeros=self._shows_zeros))


def _of_stack(stacks: CallStacks[_Row], row: _Row) -> list[_Row]:
    """Return what is to be shown now that a row has come."""
    happened = stacks.returned if row.site.probe.name == RETURN else stacks.entered
    # each CPU has an idle thread of its own, and all of them are 0
    return happened(row.tid or -1 - row.cpu, row.traced.function.name, row)


def _record(row: _Row) -> dict[str, object]:
    traced, site = row.traced, row.site
    at_site, of_start, elapsed = _divided(row)
    is_return = site.probe.name == RETURN
    record: dict[str, object] = {
        "time_ns": row.time_ns, **({} if row.monotonic_ns is None else {"monotonic_ns": row.monotonic_ns}),
        "cpu": row.cpu, "pid": row.pid, "tid": row.tid, "module": traced.function.module,
        "function": traced.function.name, "at": site.probe.name,
    }  # fmt: skip
    entered = of_start if is_return else at_site
    of_call = [*zip(traced.at_entry or (), entered, strict=True)] if entered else []
    of_return = [*zip(traced.at_return or (), at_site, strict=True)] if is_return else []
    unavailable = {each.wanted.name: reason for each, (value, reason) in of_call + of_return if value is None}
    record["values"] = {each.wanted.name: _json(each, value) for each, (value, _) in of_call + of_return}
    return (
        record
        | ({"unavailable": unavailable} if unavailable else {})
        | ({"elapsed_ns": elapsed} if elapsed is not None else {})
    )


def _label(wanted: TracedValue) -> str:
    """Return `*file` for `file[0]`."""
    root, _, index = wanted.path.partition("[")
    is_pointed_to = index == "0]" and root.isidentifier() and not wanted.turned
    return f"*{escape(root)}" if is_pointed_to else escape(wanted.name)


def _turned(shown: Shown, value: Value) -> Value:
    """Return a number in the order that was asked for."""
    return turned(shown.wanted.turned, value) if shown.wanted.turned and isinstance(value, int) else value


def _json(shown: Shown, value: Value) -> object:
    value = _turned(shown, value)
    if value is None or isinstance(value, str | float) or shown.wanted.turned or shown.known.shape is None:
        return value.hex() if isinstance(value, bytes) else value
    return json_of(shown.known.shape, value)


def _divided(row: _Row) -> tuple[list[tuple[Value, str]], list[tuple[Value, str]], int | None]:
    """Return the site's own values and those of its start, each with why it may be missing, and the time between."""
    own: list[tuple[Value, str]] = []
    of_start: list[tuple[Value, str]] = []
    elapsed = None
    for at, (capture, value) in enumerate(zip(row.site.captures, row.values, strict=True)):
        if capture.field == _ELAPSED:
            elapsed = value if isinstance(value, int) else None
        elif not capture.field:
            (of_start if capture.of_start else own).append((value, row.missing.get(at, "")))
    return own, of_start, elapsed
