"""The format file of an event, which gives its fields' offsets.

name: e1
ID: 2326
format:
    field:unsigned short common_type;	offset:0;	size:2;	signed:0;
    field:__data_loc char[] comm;	offset:20;	size:4;	signed:1;
    field:u64 q0;	offset:24;	size:8;	signed:0;
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIELD = re.compile(r"field:[^;]*?(\w+)(?:\[\d*\])?;\s*offset:(\d+);\s*size:(\d+);")


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """offset and size in bytes, from the start of the record's data."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class EventFormat:
    """id: the value of common_type in this event's records."""

    id: int
    fields: Mapping[str, FieldPlace]

    @classmethod
    def parse(cls, text: str) -> EventFormat:
        match = re.search(r"^ID: (\d+)$", text, re.MULTILINE)
        if match is None:
            raise ValueError(f"no ID in an event's format file: {text[:80]!r}")
        fields = {name: FieldPlace(int(offset), int(size)) for name, offset, size in _FIELD.findall(text)}
        return cls(int(match.group(1)), fields)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The layout of a page of trace_pipe_raw. data_offset: behind timestamp and commit. bytes: the page's length.

    From events/header_page:

        field: u64 timestamp;	offset:0;	size:8;	signed:0;
        field: local_t commit;	offset:8;	size:8;	signed:1;
        field: char data;	offset:16;	size:4080;	signed:0;
    """

    data_offset: int
    bytes: int

    @classmethod
    def parse(cls, text: str) -> PageFormat:
        match = re.search(r"char data;\s*offset:(\d+);\s*size:(\d+);", text)
        if match is None:
            raise ValueError(f"no data field in events/header_page: {text[:80]!r}")
        offset, size = map(int, match.groups())
        return cls(offset, offset + size)
