"""Read the build-id, which identifies an object to debug files and other hosts: a note of owner `GNU` and type 3."""

from __future__ import annotations

from collections.abc import Iterator

from stapsdtd.elf.container import PT_NOTE, SHT_NOTE, Container
from stapsdtd.elf.notes import UnusableNoteError, iter_notes
from stapsdtd.model import MAX_BUILD_ID_BYTES

_NT_GNU_BUILD_ID = 3

_MAX_NOTES_BYTES = 4096
_MAX_SOURCES = 16


def read_build_id(container: Container) -> str | None:
    """Return the build-id in lower-case hex; None if the object has none of a plausible length."""
    for data, alignment in _note_blocks(container):
        try:
            for note in iter_notes(data, container.byte_order, alignment):
                is_build_id = note.owner == b"GNU\0" and note.kind == _NT_GNU_BUILD_ID
                if is_build_id and 0 < len(note.descriptor) <= MAX_BUILD_ID_BYTES:
                    return note.descriptor.hex()
        except UnusableNoteError:
            continue
    return None


def _note_blocks(container: Container) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of notes and their alignment. A PT_NOTE segment holds notes of a single alignment, 4 or 8."""
    for section in container.sections_named(b".note.gnu.build-id")[:_MAX_SOURCES]:
        if section.kind == SHT_NOTE:
            yield container.file.read(section.offset, min(section.size, _MAX_NOTES_BYTES)), 4
    for segment in container.segments(PT_NOTE)[:_MAX_SOURCES]:
        size = min(segment.file_size, _MAX_NOTES_BYTES)
        yield container.file.read(segment.offset, size), 8 if segment.alignment == 8 else 4
