"""Calls of kernel functions, as lines of columns and as JSON.

TIME             CPU      PID      TID  FUNCTION
14:03:07.123456    1     4711     4711  vfs_read(file->f_pos = 0, count = 123)
14:03:07.123461    1     4711     4711  vfs_read = 123
14:03:07.123470    0     4711     4712  vfs_open(path->dentry = 0xffff888100b1c000) = -13 after 1.84 us
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from stapsdtd.cli.kernel_plan import RETURN
from stapsdtd.cli.kernel_selectors import RESULT
from stapsdtd.cli.kernel_stacks import CallStacks
from stapsdtd.cli.kernel_values import json_of, text_of
from stapsdtd.cli.quantity import format_quantity
from stapsdtd.cli.render import Clock, format_value
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stapsdtd.cli.kernel_plan import Plan, Shown, Traced
    from stapsdtd.client import DescribedSite, EventBatch, EventBlock, Value

HEADER = f"{'TIME':<15}  {'CPU':>3}  {'PID':>7}  {'TID':>7}  FUNCTION"
_ELAPSED = "elapsed"


class _Call(NamedTuple):
    """traced: None for a thread's exit."""

    tid: int
    traced: Traced | None
    is_return: bool
    line: str


class FunctionLines:
    """shows_zeros: also members of structs that are zero. stacks: which calls are shown; None for all. seen: how many
    entries and returns there were, shown or not.
    """

    def __init__(self, plan: Plan, *, shows_zeros: bool) -> None:
        self._traced = {(each.function.module, each.function.name): each for each in plan.traced}
        self._shows_zeros = shows_zeros
        self._clock = Clock()
        self.seen = 0
        self.stacks = CallStacks([each.function.name for each in plan.traced]) if plan.is_stack else None

    def text(self, batch: EventBatch) -> list[str]:
        return self._shown(batch.in_order(self._texts))

    def json(self, batch: EventBatch) -> list[str]:
        return self._shown(batch.in_order(self._records))

    def _shown(self, calls: Sequence[_Call]) -> list[str]:
        self.seen += len(calls)
        if self.stacks is None:
            return [call.line for call in calls]
        lines: list[str] = []
        for tid, traced, is_return, line in calls:
            if traced is None:
                self.stacks.exited(tid)
            elif is_return:
                lines += self.stacks.returned(tid, traced.function.name, line)
            else:
                lines += self.stacks.entered(tid, traced.function.name, line)
        return lines

    def _of(self, site: DescribedSite) -> Traced | None:
        return self._traced.get((site.probe.path, site.site.function or ""))

    def _texts(self, block: EventBlock) -> Iterator[_Call]:
        for time_ns, cpu, pid, tid, site, values, missing in _rows(block):
            traced, line = self._of(site), ""
            if traced is not None:
                head = f"{self._clock.format(time_ns)}  {cpu:>3}  {pid:>7}  {tid:>7}"
                line = f"{head}  {self._call(traced, site, values, missing)}"
            yield _Call(tid, traced, site.probe.name == RETURN, line)

    def _call(self, traced: Traced, site: DescribedSite, values: Sequence[Value], missing: Mapping[int, str]) -> str:
        name = escape(traced.function.name)
        at_site, of_start, elapsed = _divided(site, values, missing)
        if site.probe.name != RETURN:
            return f"{name}({self._list(traced.at_entry or (), at_site)})"
        called = f"{name}({self._list(traced.at_entry or (), of_start)})" if traced.is_paired else name
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
            f"{_label(each.wanted.path)} = {self._value(each, *value)}"
            for each, value in zip(shown, values, strict=True)
        )

    def _value(self, shown: Shown, value: Value, reason: str) -> str:
        if value is None or isinstance(value, str | float) or shown.known.shape is None:
            return format_value(value, reason)
        return escape(text_of(shown.known.shape, value, shows_zeros=self._shows_zeros))

    def _records(self, block: EventBlock) -> Iterator[_Call]:
        for time_ns, cpu, pid, tid, site, values, missing in _rows(block):
            traced, line = self._of(site), ""
            if traced is not None:
                record = {"time_ns": time_ns, "cpu": cpu, "pid": pid, "tid": tid}
                line = json.dumps(record | _record(traced, site, values, missing))
            yield _Call(tid, traced, site.probe.name == RETURN, line)


def _record(
    traced: Traced, site: DescribedSite, values: Sequence[Value], missing: Mapping[int, str]
) -> dict[str, object]:
    at_site, of_start, elapsed = _divided(site, values, missing)
    is_return = site.probe.name == RETURN
    record: dict[str, object] = {
        "module": traced.function.module, "function": traced.function.name, "at": site.probe.name,
    }  # fmt: skip
    entered = of_start if is_return else at_site
    of_call = [*zip(traced.at_entry or (), entered, strict=True)] if entered else []
    of_return = [*zip(traced.at_return or (), at_site, strict=True)] if is_return else []
    unavailable = {each.wanted.path: reason for each, (value, reason) in of_call + of_return if value is None}
    record["values"] = {each.wanted.path: _json(each, value) for each, (value, _) in of_call + of_return}
    return (
        record
        | ({"unavailable": unavailable} if unavailable else {})
        | ({"elapsed_ns": elapsed} if elapsed is not None else {})
    )


def _label(path: str) -> str:
    """Return `*file` for `file[0]`."""
    root, _, index = path.partition("[")
    return f"*{escape(root)}" if index == "0]" and root.isidentifier() else escape(path)


def _json(shown: Shown, value: Value) -> object:
    if value is None or isinstance(value, str | float) or shown.known.shape is None:
        return value.hex() if isinstance(value, bytes) else value
    return json_of(shown.known.shape, value)


def _divided(
    site: DescribedSite, values: Sequence[Value], missing: Mapping[int, str]
) -> tuple[list[tuple[Value, str]], list[tuple[Value, str]], int | None]:
    """Return the site's own values and those of its start, each with why it may be missing, and the time between."""
    own: list[tuple[Value, str]] = []
    of_start: list[tuple[Value, str]] = []
    elapsed = None
    for at, (capture, value) in enumerate(zip(site.captures, values, strict=True)):
        if capture.field == _ELAPSED:
            elapsed = value if isinstance(value, int) else None
        elif not capture.field:
            (of_start if capture.of_start else own).append((value, missing.get(at, "")))
    return own, of_start, elapsed


def _rows(
    block: EventBlock,
) -> Iterator[tuple[int, int, int, int, DescribedSite, Sequence[Value], Mapping[int, str]]]:
    for at in range(block.count):
        values = [column[at] for column in block.values]
        missing = block.unavailable[at] if block.unavailable else {}
        site = block.sites[block.site_id[at]]
        yield block.time_ns[at], block.cpu[at], block.pid[at], block.tid[at], site, values, missing
