"""Records of an event into event batches, by the event's format and the plan of its sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stapsdtd.capture.engine import Followed, Scope
from stapsdtd.capture.ftrace.format import EventFormat, FieldPlace
from stapsdtd.capture.ftrace.pages import Records
from stapsdtd.events.batch import EventBatch, ValueTable
from stapsdtd.events.columns import (
    COMM_BYTES,
    CUT,
    F64,
    I32,
    I64,
    U64,
    Bools,
    Comms,
    Indices,
    Numbers,
    Strings,
    ValueColumn,
    floats,
    shortened,
)
from stapsdtd.model import MAX_STRING_BYTES, Argument, BuiltIn, Capture, Constant, Register, Unavailable
from stapsdtd.plan.events import EventSpec, Field
from stapsdtd.procs.descendants import FollowedProcesses
from stapsdtd.query.columns import Hits, Values, run
from stapsdtd.query.program import ACCEPT, Program

PidsOf = Callable[[I32], I32]
"""Maps thread ids to process ids."""

_TEXTS = frozenset({BuiltIn.CGROUP, BuiltIn.CONTAINER})

_KERNEL_BYTES = 4095
"""Of a string, without its NUL: MAX_STRING_SIZE of kernel/trace/trace_probe.h."""

EVERYTHING = Program((), ACCEPT)
"""Accepts every hit."""


@dataclass(frozen=True, slots=True)
class SiteConsumer:
    """What one subscription wants of a site.

    width: how many of the plan's values are delivered; the others are only read by the program. scope: None for all
    processes.
    """

    site_id: int
    width: int
    scope: Scope = None
    program: Program = EVERYTHING


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the records of one event for one subscription. sites is parallel to spec.sites."""

    spec: EventSpec
    format: EventFormat
    sites: tuple[SiteConsumer, ...]

    def decode(self, records: Records, pids_of: PidsOf, excluded: frozenset[int]) -> list[tuple[EventBatch, int]]:
        """Return a batch for each site that fired, without the records that are filtered, and how many of these are
        undecided.
        """
        sites = _numbers(records, self.format.fields["site"])
        return [
            self._site_batch(position, records.take(np.flatnonzero(sites == position)), pids_of, excluded)
            for position in np.unique(sites).tolist()
        ]

    def _site_batch(
        self, position: int, records: Records, pids_of: PidsOf, excluded: frozenset[int]
    ) -> tuple[EventBatch, int]:
        fields = self.format.fields
        consumer = self.sites[position]
        tids = _numbers(records, fields["common_pid"]).astype(np.uint32).view(np.int32)
        pids = pids_of(tids)
        comms = _comms(records, fields["comm"])
        cpus = np.full(len(records), records.cpu, np.uint16)
        wanted, undecided = self._wanted(
            position, records, Hits(pids, tids, comms, {}, cpus, records.time_ns), excluded
        )
        if not wanted.all():
            # before values are decoded, since strings are expensive
            rows = np.flatnonzero(wanted)
            records, pids, tids, comms = records.take(rows), pids[rows], tids[rows], comms[rows]
            cpus = cpus[rows]
        values = tuple(self._values(position, number, records) for number in range(consumer.width))
        batch = EventBatch(
            records.time_ns,
            pids,
            tids,
            cpus,
            comms,
            np.full(len(records), consumer.site_id, np.uint32),
            (ValueTable(values),),
        )
        return batch, undecided

    def _wanted(self, position: int, records: Records, hits: Hits, excluded: frozenset[int]) -> tuple[Bools, int]:
        consumer, undecided = self.sites[position], 0
        wanted: Bools = ~np.isin(hits.pid, list(excluded)) if excluded else np.ones(len(records), np.bool_)
        if consumer.scope is not None:
            wanted &= _are_in(consumer.scope, hits.pid)
        if consumer.program is not EVERYTHING:
            captures = self.spec.sites[position].capture.captures
            numbers = {
                index: self._numbers(position, captures.index(Capture(index)), records)
                for index in consumer.program.arguments
            }
            arguments = {
                # programs never read floating-point numbers
                index: Values(column.data.view(np.uint64), column.unavailable)
                for index, column in numbers.items()
            }
            outcome = run(consumer.program, replace(hits, arguments=arguments))
            undecided = int(np.count_nonzero(wanted & outcome.undecided))
            wanted &= outcome.accepted
        return wanted, undecided

    def _values(self, position: int, number: int, records: Records) -> ValueColumn:
        plan = self.spec.sites[position]
        capture, source = plan.capture.captures[number], plan.sources[number]
        if not capture.is_pointed_to and capture.subject not in _TEXTS:
            return self._numbers(position, number, records)
        if isinstance(source, Field):
            return Strings.of(_strings(records, self.format.fields[source.name], capture.max_bytes))
        return Strings.of([None] * len(records))

    def _numbers(self, position: int, number: int, records: Records) -> Numbers:
        plan = self.spec.sites[position]
        argument = plan.capture.subject(number)
        source: Field | Constant | Unavailable = plan.sources[number]
        if not isinstance(argument, Argument):
            return Numbers(np.zeros(len(records), np.uint64), np.ones(len(records), np.bool_))
        match source:
            case Unavailable():
                missing = np.ones(len(records), np.bool_)
                return Numbers(_narrowed(np.zeros(len(records), np.uint64), argument), missing)
            case Constant(value):
                return Numbers(_narrowed(np.full(len(records), value % (1 << 64), np.uint64), argument))
            case Field(name=name):
                return Numbers(_narrowed(_numbers(records, self.format.fields[name]), argument))


def _are_in(scope: frozenset[int | Followed], pids: I32) -> Bools:
    found = np.isin(pids, [each for each in scope if isinstance(each, int)])
    for each in scope:
        if isinstance(each, FollowedProcesses):
            found |= each.among(pids)
    return found


def _numbers(records: Records, place: FieldPlace) -> U64:
    """Gather a field of 1, 2, 4 or 8 bytes, zero-extended. The kernel packs fields without aligning them."""
    at = (records.starts + place.offset) // 4
    words = records.words
    skipped = 8 * (place.offset % 4)
    bits = 8 * place.size
    gathered = words[at].astype(np.uint64) >> np.uint64(skipped)
    for number, bit in enumerate(range(32 - skipped, bits, 32), 1):
        gathered |= words[at + number].astype(np.uint64) << np.uint64(bit)
    return gathered if bits == 64 else gathered & np.uint64((1 << bits) - 1)


def _narrowed(values: U64, argument: Argument) -> I64 | U64 | F64:
    """Truncate what was fetched to the argument's size, and extend its sign."""
    bits = 8 * argument.size
    first_bit = argument.operand.first_bit if isinstance(argument.operand, Register) else 0
    unused = np.uint64(max(64 - bits, 0))
    top = (values >> np.uint64(first_bit)) << unused
    if argument.is_float:
        return floats(top >> unused, argument.size)
    return top.view(np.int64) >> np.int64(unused) if argument.signed else top >> unused


def _spans(records: Records, place: FieldPlace) -> tuple[Indices, Indices]:
    """Return where a __data_loc field's data begins in records.content, and its length in bytes.

    The low 16 bits of the field are the data's offset in the record, the high 16 bits its length.
    """
    locations = _numbers(records, place).astype(np.intp)
    return records.starts + (locations & 0xFFFF), locations >> 16


def _strings(records: Records, place: FieldPlace, max_bytes: int | None) -> list[bytes | None]:
    """Return None for strings that the kernel could not read: they have length 0, an empty string has its NUL."""
    content, most = records.content, max_bytes or MAX_STRING_BYTES
    begins, lengths = _spans(records, place)
    return [
        _string(content[at : at + length].split(b"\0", 1)[0], most) if length else None
        for at, length in zip(begins.tolist(), lengths.tolist(), strict=True)
    ]


def _string(text: bytes, most: int) -> bytes:
    # one that fills the kernel's own room was probably cut by that
    return text + CUT if len(text) == _KERNEL_BYTES <= most else shortened(text, most)


def _comms(records: Records, place: FieldPlace) -> Comms:
    begins, lengths = _spans(records, place)
    columns = np.arange(COMM_BYTES)
    content = np.frombuffer(records.content, np.uint8)
    letters = content[np.minimum(begins[:, None] + columns, len(content) - 1)]
    letters[columns >= lengths[:, None]] = 0
    comms: Comms = letters.view(f"S{COMM_BYTES}").reshape(len(records))
    return comms


@dataclass(frozen=True, slots=True)
class Decoded:
    """filtered: how many records were not wanted. unknown: how many were of an event without a decoder. undecided: of
    those filtered, how many the predicate could not be evaluated of.
    """

    batches: list[EventBatch]
    filtered: int
    unknown: int
    undecided: int = 0


def decode_records(
    records: Records, decoders: Mapping[int, Decoder], pids_of: PidsOf, excluded: frozenset[int] = frozenset()
) -> Decoded:
    """Decode records of several events. excluded: processes whose records are never wanted."""
    if not len(records):
        return Decoded([], 0, 0)
    types = records.words[records.starts // 4] & np.uint32(0xFFFF)
    batches: list[EventBatch] = []
    unknown = undecided = 0
    for type_id in np.unique(types).tolist():
        rows = np.flatnonzero(types == type_id)
        decoder = decoders.get(type_id)
        if decoder is None:
            unknown += len(rows)
            continue
        for batch, of_site in decoder.decode(records.take(rows), pids_of, excluded):
            batches.append(batch)
            undecided += of_site
    filtered = len(records) - unknown - sum(map(len, batches))
    return Decoded([batch for batch in batches if len(batch)], filtered, unknown, undecided)
