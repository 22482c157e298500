"""What can be captured at a site: how the program fetches it, and how the reader reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stapsdtd.capture.bpf.operands import NotEncodableError, encode_of_pair, encode_start, encode_value
from stapsdtd.capture.bpf.pairs import Pair, subject_at
from stapsdtd.capture.bpf.sources import CgroupAt, Fixed, NoText, NumberAt, OfStartAt, Source, TextAt
from stapsdtd.functions.probes import is_in_kernel
from stapsdtd.model import Argument, BuiltIn, Capture, Constant, Memory, Site, StartArgument, Subject, Unavailable
from stapsdtd.plan.values import OfPair, OfStart, Value, ValueKey, value_of, value_of_built_in
from stapsdtd.spans.span import is_of_pair


def source_of(capture: Capture, subject: Argument | BuiltIn, architecture: str) -> Value | Constant | Unavailable:
    """Return the value that a record holds for a capture, or the constant or reason that replaces it."""
    source = value_of(capture, subject, architecture)
    return _fetchable(source, lambda value: encode_value(value, subject, architecture))


def _fetchable(
    source: Value | Constant | Unavailable, encode: Callable[[Value], bytes]
) -> Value | Constant | Unavailable:
    """Return a source, or why the program cannot fetch it."""
    if isinstance(source, Value) and isinstance(source.subject, int):
        try:
            encode(source)
        except NotEncodableError as error:
            return Unavailable(str(error))
    return source


class Subjects:
    """Encodes what can be captured at a site for the program, and tells how to read it from a record."""

    def __init__(self, site: Site, architecture: str) -> None:
        self._site = site
        self._architecture = architecture
        self._encoded: dict[Value, bytes] = {}

    def source_of(self, capture: Capture, pair: Pair | None = None) -> Value | Constant | Unavailable:
        """pair: what is known of pairs, if these are what is recorded. Raises NotEncodableError."""
        if pair is not None and is_of_pair(capture):
            return pair.value_of(capture)
        return _fetchable(value_of(capture, self._subject(capture.subject), self._architecture), self.encode)

    def encode(self, value: Value) -> bytes:
        """Raises NotEncodableError."""
        encoded = self._encoded.get(value)
        if encoded is None:
            encoded = self._encoded[value] = self._encode(value)
        return encoded

    def _encode(self, value: Value) -> bytes:
        if isinstance(value.subject, OfPair):
            return encode_of_pair(value.subject)
        if isinstance(value.subject, OfStart):
            return encode_start(value.subject, value.limit)
        return encode_value(value, self._subject(value.subject), self._architecture)

    def reads_memory(self, value: Value) -> bool:
        if isinstance(value.subject, OfPair | OfStart):
            return False
        subject = self._subject(value.subject)
        return value.is_text or (isinstance(subject, Argument) and isinstance(subject.operand, Memory))

    def is_in_kernel(self, value: Value) -> bool:
        return isinstance(value.subject, int) and is_in_kernel(self._site.arguments[value.subject])

    def _subject(self, subject: Subject) -> Argument | BuiltIn:
        return self._site.arguments[subject] if isinstance(subject, int) else subject_at(self._site, subject)

    def reading_of(
        self,
        capture: Capture,
        source: Value | Constant | Unavailable,
        positions: Mapping[ValueKey, int],
        pair: Pair | None = None,
    ) -> Source:
        """positions: of the record's values. pair: as `source_of`."""
        if isinstance(source, Value) and isinstance(source.subject, OfStart):
            kept = None if pair is None else pair.source_of(capture)
            return OfStartAt(positions[source.key], kept) if isinstance(kept, NumberAt | TextAt) else kept or NoText()
        if isinstance(source, Unavailable) and isinstance(capture.subject, StartArgument):
            return NoText() if capture.is_pointed_to else Fixed(None, is_signed=False)
        if isinstance(source, Value) and isinstance(source.subject, OfPair):
            return NumberAt(positions[source.key], source.subject.is_signed)
        argument = self._subject(capture.subject)
        if isinstance(argument, BuiltIn):
            position = positions[value_of_built_in(argument).key]
            if argument in {BuiltIn.CGROUP, BuiltIn.CONTAINER}:
                return CgroupAt(position, is_container=argument is BuiltIn.CONTAINER)
            return NumberAt(position, is_signed=False)
        match source:
            case Value(is_text=True):
                return TextAt(positions[source.key], source.shown, is_raw=not source.is_string)
            case Value():
                float_bytes = argument.size if argument.is_float else 0
                return NumberAt(positions[source.key], argument.signed, float_bytes)
            case Constant(value=number):
                return Fixed(number, argument.signed)
            case Unavailable() if capture.is_pointed_to:
                return NoText()
            case Unavailable():
                return Fixed(None, argument.signed, argument.is_float)
