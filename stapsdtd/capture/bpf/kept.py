"""What is kept of a start as a record, which bpf/start.h takes as it takes those of events."""

from __future__ import annotations

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.operands import NotEncodableError
from stapsdtd.capture.bpf.pairs import Kept, keeps_records
from stapsdtd.capture.bpf.span_kinds import SPANS_OF_RECORDS, SpanKind
from stapsdtd.capture.bpf.subjects import Subjects
from stapsdtd.model import Site
from stapsdtd.plan.values import Value, united
from stapsdtd.spans.span import Span


def kept_of(span: Span, site: Site, architecture: str) -> Kept:
    """Return what is kept of starts at a site. Raises NotEncodableError."""
    if not keeps_records(span):
        return Kept.as_words(span, site, architecture)
    subjects = Subjects(site, architecture)
    found = [(capture, subjects.source_of(capture)) for capture in span.start_captures]
    values = united(source for _, source in found if isinstance(source, Value))
    positions = {value.key: position for position, value in enumerate(values)}
    sources = tuple(subjects.reading_of(capture, source, positions) for capture, source in found)
    byte_count = layout.RECORD.itemsize + sum(8 + value.limit + value.is_string for value in values)
    return Kept(tuple(map(subjects.encode, values)), sources, byte_count)


def kind_for(kept: Kept) -> SpanKind:
    """Return the kind of table for records. Raises NotEncodableError."""
    for kind in SPANS_OF_RECORDS:
        if kept.byte_count <= kind.entry_bytes:
            return kind
    most = SPANS_OF_RECORDS[-1].entry_bytes
    raise NotEncodableError(f"its start takes up to {kept.byte_count} bytes, and the kernel keeps at most {most}")
