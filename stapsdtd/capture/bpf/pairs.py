"""How the program pairs starts and ends: what the key consists of, what is kept of a start, and where a pair has it.

span, site ──► operands of the key's parts and of what is kept      for bpf/span.h
span       ──► Pair: where an end finds what is of both             for records and recipes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stapsdtd.aggregate.aggregation import SITE_FIELDS, HitField, KeySource
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.operands import NotEncodableError, encode_hit_field, encode_value
from stapsdtd.functions.probes import is_in_kernel
from stapsdtd.model import Argument, BuiltIn, Capture, Site, StartArgument, Subject, Unavailable
from stapsdtd.plan.values import OfPair, Value, value_of
from stapsdtd.spans.span import Span

_THREAD = (HitField.TID,)
_TEXTS = frozenset({BuiltIn.CGROUP, BuiltIn.CONTAINER})


def why_not(span: Span) -> str | None:
    """Return why the program cannot pair starts and ends, or None if it can."""
    if span.is_nested:
        return "the kernel keeps one start for each key"
    if len(span.start_captures) >= layout.PAIR_WORDS:
        return f"the kernel keeps at most {layout.PAIR_WORDS - 1} arguments of a start"
    if any(map(_is_text, span.start_captures)):
        return "the kernel keeps no strings or bytes of a start"
    if span.key == _THREAD:
        return None
    if HitField.TID in span.key:
        return "in the kernel, a key that has the thread has nothing else"
    if len(span.key) > layout.PAIR_KEY_WORDS:
        return f"in the kernel, a span's key has at most {layout.PAIR_KEY_WORDS} parts"
    if any(map(_is_text, span.key)) or not SITE_FIELDS.isdisjoint(span.key):
        return "in the kernel, a span's key consists of numbers"
    return None


def is_small(span: Span) -> bool:
    """Report whether the key is the thread, and nothing is kept of a start but its time."""
    return span.key == _THREAD and not span.start_captures


def subject_at(site: Site, subject: Subject | OfPair) -> Argument | BuiltIn:
    """Return what a hit of a site can tell of, before it is paired. Raises NotEncodableError."""
    match subject:
        case int(index):
            return site.arguments[index]
        case BuiltIn():
            return subject
        case _:
            raise NotEncodableError("a hit knows nothing of its span's start before it is paired")


def _is_text(source: KeySource) -> bool:
    if isinstance(source, Capture):
        return source.is_pointed_to or source.subject in _TEXTS
    return source is HitField.EXECNAME


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a hit: their operands, and which are signed."""

    operands: tuple[bytes, ...]
    signs: tuple[bool, ...]

    @classmethod
    def of(cls, sources: Iterable[KeySource], site: Site, architecture: str) -> Numbers:
        """Raises NotEncodableError."""
        found = [_number(source, site, architecture) for source in sources]
        return cls(tuple(operand for operand, _ in found), tuple(is_signed for _, is_signed in found))


def key_of(span: Span, site: Site, architecture: str) -> Numbers:
    """Return the parts of a key of numbers. Raises NotEncodableError."""
    return Numbers.of(() if span.key == _THREAD else span.key, site, architecture)


def _number(source: KeySource, site: Site, architecture: str) -> tuple[bytes, bool]:
    if isinstance(source, HitField):
        return encode_hit_field(source), False
    argument = subject_at(site, source.subject)
    if isinstance(argument, BuiltIn):
        return encode_value(Value(argument), argument, architecture), False
    value = value_of(source, argument, architecture)
    if isinstance(value, Unavailable):
        raise NotEncodableError(value.reason)
    if argument.is_float or (isinstance(value, Value) and value.is_text):
        raise NotEncodableError(f"{argument.text} is no integer, and the kernel pairs nothing else")
    if is_in_kernel(argument):
        raise NotEncodableError(f"{argument.text} is in memory; the daemon keeps that of a nested span's start")
    return encode_value(Value(source.subject), argument, architecture), argument.signed


@dataclass(frozen=True, slots=True)
class Pair:
    """What an end knows of its start. pairing: its place among its plan's. signs: of what is kept of starts."""

    pairing: int
    span: Span
    signs: tuple[bool, ...]

    def value_of(self, capture: Capture) -> OfPair:
        """Return where a capture of a pair is. Raises NotEncodableError."""
        if not isinstance(capture.subject, StartArgument):
            return OfPair(self.pairing, 0, is_signed=True)
        kept = replace(capture, subject=capture.subject.index)
        if kept not in self.span.start_captures:
            raise NotEncodableError(f"arg{capture.subject.index} of the start is not kept")
        word = self.span.start_captures.index(kept)
        return OfPair(self.pairing, 1 + word, self.signs[word])
