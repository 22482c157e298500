"""How the program adds up a consumer's hits: what keys consist of, and how the daemon reads them.

    aggregation, site ──► Recipe: operands of the key's parts and of the value      for bpf/aggregate.h
                      └─► KeyLayout: what the key has at which place                for row_decoder.py

A site whose layout has no parts and no value needs no table: its hits are counted anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, Computed, Function, HitField, KeySource
from stapsdtd.aggregate.buckets import Edges, LogLinear
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.key_layout import BytesPart, CgroupPart, FixedPart, KeyLayout, NumberPart, Part, TextPart
from stapsdtd.capture.bpf.operands import NotEncodableError, encode_hit_field, encode_of_pair, encode_value, encode_word
from stapsdtd.capture.bpf.pairs import Pair, subject_at
from stapsdtd.events.columns import COMM_BYTES
from stapsdtd.functions.probes import is_in_kernel
from stapsdtd.model import MAX_STRING_BYTES, Argument, BuiltIn, Capture, Constant, Site, Unavailable
from stapsdtd.plan.values import OfPair, Value, value_of
from stapsdtd.query.compile import MAX_OPERATIONS, compile_numbers, is_unsigned, operations, why_not_calculated
from stapsdtd.query.expression import Expression
from stapsdtd.query.program import Program
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.spans.span import is_of_pair

_MAX_SUB_BITS = 8
"""The numbers of its buckets have 16 bits."""

_MAX_SHOWN_CHARACTERS = 80

_ADDING = frozenset({Function.SUM, Function.AVG})
_COMPARING = frozenset({Function.MIN, Function.MAX})


@dataclass(frozen=True, slots=True)
class Recipe:
    """operands: of the key's parts that are not fixed, then of the value if there is one.

    program: calculates those that are expressions, as so many words; None if there are none.
    """

    aggregation: Aggregation
    layout: KeyLayout
    operands: tuple[bytes, ...]
    program: Program | None = None
    words: int = 0

    @property
    def is_counted(self) -> bool:
        """Report whether all hits have the same key and no value."""
        return not self.operands

    @property
    def parts(self) -> int:
        return len(self.operands) - (self.layout.is_signed is not None)

    @property
    def is_small(self) -> bool:
        """Report whether the key has one number at most."""
        parts = [part for part in self.layout.parts if not isinstance(part, FixedPart)]
        is_of_numbers = not any(isinstance(part, TextPart | BytesPart) for part in parts)
        return is_of_numbers and len(parts) <= 1 and key_class(self.aggregation) == 0

    @property
    def adds(self) -> bool:
        return not _ADDING.isdisjoint(self.aggregation.functions)

    @property
    def compares(self) -> bool:
        return not _COMPARING.isdisjoint(self.aggregation.functions)

    @classmethod
    def of(
        cls,
        aggregation: Aggregation,
        site: Site,
        site_id: int,
        architecture: str,
        pair: Pair | None = None,
        *,
        first_word: int = 0,
    ) -> Recipe:
        """pair: what is known of pairs at this site; None to ask only what there is, rather than where. first_word: of
        those where expressions are calculated.

        Raises ValueError if the program cannot aggregate the hits of this site.
        """
        reason = _why_not(aggregation)
        if reason is not None:
            raise NotEncodableError(reason)
        maker = _Maker(site, architecture, pair, first_word)
        parts = tuple(maker.part(key) for key in aggregation.keys)
        is_signed = None if aggregation.value is None or not aggregation.needs_value else maker.value(aggregation.value)
        has_site = not SITE_FIELDS.isdisjoint(aggregation.keys)
        key_layout = KeyLayout(site_id if has_site else 0, parts, is_signed)
        return cls(aggregation, key_layout, tuple(maker.operands), maker.program(), maker.words)


class _Maker:
    """Collects operands, and expressions to calculate."""

    def __init__(self, site: Site, architecture: str, pair: Pair | None, first_word: int) -> None:
        self._site = site
        self._architecture = architecture
        self._pair = pair
        self._first_word = first_word
        self._expressions: list[Expression] = []
        self.operands: list[bytes] = []

    @property
    def words(self) -> int:
        return len(self._expressions)

    def program(self) -> Program | None:
        """Return what calculates the expressions. Raises NotEncodableError."""
        if not self._expressions:
            return None
        if sum(map(operations, self._expressions)) > MAX_OPERATIONS:
            raise NotEncodableError(f"the kernel does at most {MAX_OPERATIONS} operations for its keys and its value")
        program = compile_numbers(self._expressions, self._site, self._first_word)
        for index in program.arguments:
            encode_value(Value(index), self._site.arguments[index], self._architecture)
        return program

    def part(self, key: KeySource | Computed) -> Part:
        """Raises NotEncodableError."""
        if isinstance(key, HitField):
            return self._hit_field(key)
        if not isinstance(key, Capture):
            return NumberPart(self._calculated(key))
        if is_of_pair(key):
            return NumberPart(self._of_pair(key))
        subject = self._subject(key)
        source = value_of(key, subject, self._architecture)
        match source:
            case Value():
                self._append(source, subject)
            case Constant(number):
                if isinstance(subject, Argument):
                    _check_integer(Value(key.subject), subject)
                return FixedPart(_integer(number, subject))
            case Unavailable():
                return FixedPart(None)
        if isinstance(subject, BuiltIn):
            if subject in {BuiltIn.CGROUP, BuiltIn.CONTAINER}:
                return CgroupPart(is_container=subject is BuiltIn.CONTAINER)
            return NumberPart(is_signed=False)
        if source.is_string:
            return TextPart(_text_words(source.limit), source.shown)
        if source.is_buffer:
            return BytesPart(source.limit)
        _check_integer(source, subject)
        return NumberPart(subject.signed)

    def value(self, capture: Capture | Computed) -> bool | None:
        """Return whether the value is signed, or None if it is unavailable. Raises NotEncodableError."""
        if not isinstance(capture, Capture):
            return self._calculated(capture)
        if is_of_pair(capture):
            return self._of_pair(capture)
        subject = self._subject(capture)
        source = value_of(capture, subject, self._architecture)
        if isinstance(source, Unavailable) or capture.is_pointed_to:
            return None
        value = source if isinstance(source, Value) else Value(capture.subject)
        if isinstance(subject, Argument):
            _check_integer(value, subject)
        elif subject in {BuiltIn.CGROUP, BuiltIn.CONTAINER}:
            return None
        self._append(value, subject)
        return isinstance(subject, Argument) and subject.signed

    def _hit_field(self, field: HitField) -> Part:
        if field in SITE_FIELDS:
            return FixedPart(None)
        self.operands.append(encode_hit_field(field))
        if field is HitField.EXECNAME:
            return TextPart(2, COMM_BYTES)
        return NumberPart(is_signed=False)

    def _of_pair(self, capture: Capture) -> bool:
        """Return whether the number is signed."""
        value = self._pair.word_of(capture) if self._pair else OfPair(0, 0, is_signed=True)
        self.operands.append(encode_of_pair(value))
        return value.is_signed

    def _calculated(self, source: Computed) -> bool:
        """Return whether the number is signed. Raises NotEncodableError."""
        if not isinstance(source, ExpressionSource):
            raise _not_computed(source, "it is no expression")
        if reason := why_not_calculated(source.expression, self._site):
            raise _not_computed(source, reason)
        self.operands.append(encode_word(self._first_word + len(self._expressions)))
        self._expressions.append(source.expression)
        return not is_unsigned(source.expression, self._site)

    def _subject(self, capture: Capture) -> Argument | BuiltIn:
        return subject_at(self._site, capture.subject)

    def _append(self, value: Value, subject: Argument | BuiltIn) -> None:
        # a container's value is that of its cgroup
        of_value = value.subject if isinstance(value.subject, BuiltIn) else subject
        if isinstance(subject, Argument) and is_in_kernel(subject, is_text=value.is_text):
            raise NotEncodableError(
                "the kernel adds up what is in registers of its functions, not what is in its memory"
            )
        self.operands.append(encode_value(value, of_value, self._architecture))


def key_class(aggregation: Aggregation) -> int:
    """Return the class of sizes that the kernel's keys belong to. Raises NotEncodableError if there is none."""
    words = 1 + sum(map(_words, aggregation.keys))
    try:
        return next(number for number, size in enumerate(layout.KEY_BYTES) if 8 * words <= size)
    except StopIteration:
        raise NotEncodableError(
            f"its key takes {8 * words} bytes, and in the kernel at most {layout.KEY_BYTES[-1]}"
        ) from None


def _words(key: KeySource | Computed) -> int:
    if isinstance(key, Capture):
        limit = key.max_bytes or MAX_STRING_BYTES
        return _text_words(limit + 1) if key.is_string else BytesPart(limit).words if key.is_buffer else 1
    return 0 if key in SITE_FIELDS else 2 if key is HitField.EXECNAME else 1


def _text_words(limit: int) -> int:
    """Return how many words a string takes, with its NUL."""
    return (limit + 8) // 8


def _why_not(aggregation: Aggregation) -> str | None:
    if Function.STDDEV in aggregation.functions:
        return "the kernel computes no standard deviation"
    if len(aggregation.keys) > layout.MAX_PARTS:
        return f"its key has {len(aggregation.keys)} parts, and in the kernel at most {layout.MAX_PARTS}"
    match aggregation.buckets:
        case LogLinear(sub_bits) if sub_bits > _MAX_SUB_BITS:
            return f"the kernel makes at most {1 << _MAX_SUB_BITS} buckets for each power of two"
        case Edges(edges) if len(edges) >= 1 << 12:
            return f"its histogram has {len(edges)} edges, and in the kernel fewer than {1 << 12}"
    key_class(aggregation)
    return None


def _not_computed(source: Computed, reason: str) -> NotEncodableError:
    text = source.text if len(source.text) <= _MAX_SHOWN_CHARACTERS else f"{source.text[:_MAX_SHOWN_CHARACTERS]}…"
    return NotEncodableError(f"the kernel does not calculate {text}: {reason}")


def _check_integer(value: Value, argument: Argument) -> None:
    """Raises NotEncodableError."""
    if argument.is_float or value.is_text:
        raise NotEncodableError(f"{argument.text} is no integer, and the kernel aggregates nothing else")


def _integer(number: int, subject: Argument | BuiltIn) -> int:
    """Return a constant as events have it: of 64 bits."""
    bits = number % (1 << 64)
    is_negative = isinstance(subject, Argument) and subject.signed and bits >> 63
    return bits - (1 << 64) if is_negative else bits


def why_not(aggregation: Aggregation, site: Site, architecture: str) -> str | None:
    """Return why the program cannot aggregate hits of a site, or None if it can."""
    try:
        Recipe.of(aggregation, site, 0, architecture)
    except NotEncodableError as error:
        return str(error)
    return None
