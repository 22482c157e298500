"""Spans that are open, as text and as JSON.

mode=EXCLUSIVE  open 2.50 s  pid 4711
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stapsdtd.cli.named_values import cut_at, meaning, readable
from stapsdtd.cli.quantity import format_quantity
from stapsdtd.cli.render import Clock, format_value, plural, print_stderr
from stapsdtd.client import CutText
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stapsdtd.cli.named_values import ArgumentNames, Named
    from stapsdtd.client import CapturedArgument, OpenSpan, OpenSpans, Value

_GAP = "  "
_SHOWN = 10
_OF_START = "start."


class OpenSpanTexts:
    """names: of starts' arguments, as far as they are known."""

    def __init__(self, names: ArgumentNames | None = None) -> None:
        self._names = names
        self._clock = Clock()

    def print_last(self, spans: OpenSpans) -> None:
        """Print on standard error what was open at the end."""
        print_stderr(f"{plural(spans.count, 'span')} open at the end:")
        for line in self.lines(spans):
            print_stderr(f"  {line}")

    def lines(self, spans: OpenSpans) -> list[str]:
        """Return a line for each of the oldest spans, and one that tells how many more there are."""
        shown = spans.spans[:_SHOWN]
        more = spans.count - len(shown)
        lines = [self._line(spans, each) for each in shown]
        return [*lines, f"and {plural(more, 'more span')} open"] if more else lines

    def events(self, spans: OpenSpans) -> list[str]:
        """Return a line for each span, with the time at which it began."""
        return [f"{self._clock.format(each.begin_ns)}{_GAP}{self._line(spans, each)}" for each in spans.spans]

    def _line(self, spans: OpenSpans, span: OpenSpan) -> str:
        thread = str(span.pid) if span.tid == span.pid else f"{span.pid}/{span.tid}"
        key = [f"key {' '.join(map(format_value, span.key))}"] if span.key else []
        values = " ".join(f"{each.name}={each.text}" for each in self._values(spans, span) if not each.is_length)
        age = format_quantity(span.waiting_ns, "ns")
        return _GAP.join([*filter(None, [values]), *key, f"open {age}", f"pid {thread}"])

    def _values(self, spans: OpenSpans, span: OpenSpan) -> Iterator[_Value]:
        """Yield the values of a start, strings cut at their lengths."""
        known = self._names.of_start(spans.captures) if self._names else {}
        for position, (capture, value) in enumerate(zip(spans.captures, span.values, strict=True)):
            named = known.get(position)
            cut_by = named.cut_by if named else None
            yield _Value(capture, named, value if cut_by is None else cut_at(value, span.values[cut_by]))

    def record(self, spans: OpenSpans) -> dict[str, object]:
        """Return what JSON tells of open spans: how many there are, and the oldest ones."""
        return {"count": spans.count, "oldest": [self._record(spans, each) for each in spans.spans]}

    def _record(self, spans: OpenSpans, span: OpenSpan) -> dict[str, object]:
        values = list(self._values(spans, span))
        named = {each.name: _in_json(meaning(each.named.declared, each.value)) for each in values if each.named}
        truncated = [each.name for each in values if isinstance(each.value, CutText)]
        return {
            "begin_ns": span.begin_ns,
            **({} if span.begin_monotonic_ns is None else {"begin_monotonic_ns": span.begin_monotonic_ns}),
            "waiting_ns": span.waiting_ns,
            "pid": span.pid,
            "tid": span.tid,
            **({"key": list(map(_in_json, span.key))} if span.key else {}),
            **({"start_args": [_in_json(each.value) for each in values]} if values else {}),
            **({"named": named} if named else {}),
            **({"truncated": truncated} if truncated else {}),
        }


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a start. named: what is known of it."""

    capture: CapturedArgument
    named: Named | None
    value: Value

    @property
    def name(self) -> str:
        return self.named.declared.name.removeprefix(_OF_START) if self.named else f"arg{self.capture.index}"

    @property
    def is_length(self) -> bool:
        """Whether it is the length of another value, which shows it."""
        return self.named is not None and self.named.is_length

    @property
    def text(self) -> str:
        meant = readable(self.named.declared, self.value) if self.named and not self.capture.is_hex else None
        if meant is not None:
            return escape(meant)
        return format_value(self.value, self.capture.missing, is_hexadecimal=self.capture.is_hex)


def _in_json(value: Value) -> object:
    return value.hex() if isinstance(value, bytes) else value
