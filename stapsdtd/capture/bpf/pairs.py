"""How the program pairs starts and ends: what the key consists of, what is kept of a start, and where a pair has it.

span, site ──► operands of the key's parts and of what is kept      for bpf/span.h
span       ──► Pair: where an end finds what is of both             for records and recipes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from stapsdtd.aggregate.aggregation import SITE_FIELDS, HitField, KeySource
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.operands import (
    NotEncodableError,
    encode_frame,
    encode_hit_field,
    encode_number,
    encode_value,
)
from stapsdtd.capture.bpf.sources import NumberAt, Source
from stapsdtd.capture.bpf.span_kinds import SMALL_SPAN, SPAN_OF_WORDS, SPANS_OF_RECORDS, SpanKind
from stapsdtd.functions.probes import RETURN, is_in_kernel
from stapsdtd.functions.values import MAX_VALUE_BYTES
from stapsdtd.model import MAX_STRING_BYTES, Argument, BuiltIn, Capture, Site, StartArgument, Subject, Unavailable
from stapsdtd.plan.values import OfPair, OfStart, Value, value_of
from stapsdtd.spans.span import Span

_THREAD = (HitField.TID,)
_VALUE_BYTES = 9
"""Besides its text: its place in the record, and the end of a string."""
_TEXTS = frozenset({BuiltIn.CGROUP, BuiltIn.CONTAINER})


def why_not(span: Span) -> str | None:
    """Return why the program cannot pair starts and ends, or None if it can."""
    if keeps_records(span):
        return _why_not_recorded(span.start_captures)
    if span.is_nested and not (span.is_of_calls and not span.start_captures):
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


def keeps_records(span: Span) -> bool:
    """Report whether starts are kept as records, which can tell of anything, rather than as a few words."""
    return span.is_of_calls and not span.is_added and bool(span.start_captures)


def _why_not_recorded(captures: Sequence[Capture]) -> str | None:
    if len(captures) > layout.MAX_VALUES:
        return f"the kernel keeps at most {layout.MAX_VALUES} values of a start"
    texts = [(each.max_bytes or MAX_STRING_BYTES) + each.is_string for each in captures if each.is_pointed_to]
    byte_count = sum(texts) + MAX_VALUE_BYTES * (len(captures) - len(texts)) + _VALUE_BYTES * len(captures)
    most = SPANS_OF_RECORDS[-1].entry_bytes
    if layout.RECORD.itemsize + byte_count > most:
        return f"its start may take {byte_count} bytes, and the kernel keeps at most {most}"
    return None


def kind_of(span: Span) -> SpanKind:
    """Return the kind of table that keeps starts as words."""
    is_small = span.key == _THREAD and not span.start_captures and not span.is_of_calls
    return SMALL_SPAN if is_small else SPAN_OF_WORDS


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
    if span.is_of_calls:
        # by the frame's address alone, calls in the place of a return (tail calls) could not be told apart
        function = crc32((site.function or "").encode())
        frame = encode_frame(architecture, is_return=site.name == RETURN)
        return Numbers((frame, encode_number(function)), (False, False))
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
class Kept:
    """What is kept of starts, in the order of what is captured of them.

    sources: where an end finds that, among words or among the values of a record. byte_count: of a record, at most.
    """

    operands: tuple[bytes, ...]
    sources: tuple[Source, ...]
    byte_count: int = 0

    @classmethod
    def as_words(cls, span: Span, site: Site, architecture: str) -> Kept:
        """Raises NotEncodableError."""
        kept = Numbers.of(span.start_captures, site, architecture)
        return cls(kept.operands, tuple(NumberAt(1 + number, sign) for number, sign in enumerate(kept.signs)))


@dataclass(frozen=True, slots=True)
class Pair:
    """What an end knows of its start.

    pairing: its place among its plan's. kept: None as long as there are no starts, and thus no pairs.
    """

    pairing: int
    span: Span
    kept: Kept | None

    def word_of(self, capture: Capture) -> OfPair:
        """Return which number a capture of a pair is. Raises NotEncodableError."""
        if not isinstance(capture.subject, StartArgument):
            return OfPair(self.pairing, 0, is_signed=True)
        source = self.source_of(capture)
        if isinstance(source, NumberAt):
            return OfPair(self.pairing, source.position, source.is_signed)
        # any word, as long as there are no starts
        return OfPair(self.pairing, 1, is_signed=False)

    def value_of(self, capture: Capture) -> Value | Unavailable:
        """Return what a record has to hold for a capture of a pair. Raises NotEncodableError."""
        if not isinstance(capture.subject, StartArgument) or not keeps_records(self.span):
            return Value(self.word_of(capture))
        if self.kept is None:
            return Unavailable("there was no start yet")
        return Value(OfStart(self.pairing), limit=self.kept.byte_count)

    def source_of(self, capture: Capture) -> Source | None:
        """Return where a capture of a start is in what is kept, None before there is one. Raises NotEncodableError."""
        if not isinstance(capture.subject, StartArgument):
            return None
        kept = replace(capture, subject=capture.subject.index)
        if kept not in self.span.start_captures:
            raise NotEncodableError(f"arg{capture.subject.index} of the start is not kept")
        return None if self.kept is None else self.kept.sources[self.span.start_captures.index(kept)]
